"""The loop of a lane's leader: receive, decide, step with the group, publish. Costs no CPU while nothing happens."""

import math
import time
from dataclasses import dataclass

import zmq

from kimi_worker.engine.coordination import Coordination
from kimi_worker.engine.follower import PUMP_MS
from kimi_worker.engine.lane import LaneEngine, ToClient
from kimi_worker.engine.links import ClientLink, FollowerLink, PeerLink
from kimi_worker.engine.messages import (
    AskDrain,
    AskWave,
    Assembled,
    Drained,
    DrainGroup,
    Empty,
    FromCoordinator,
    Join,
    Run,
    Started,
    Wake,
)
from kimi_worker.engine.runner import Runner
from kimi_worker.engine.sampling import Draw, sample
from kimi_worker.engine.wave import LaneWave
from kimi_worker.handoff.rank import RankPort
from kimi_worker.handoff.session import Send, ToRanks
from kimi_worker.parallel.groups import Groups
from kimi_worker.protocol.handoff import RankCommand
from kimi_worker.scheduler.lane import Share, plan_of

STATE_S = 1.0
"""At the latest so long after the last one a busy lane reports its state."""
STATE_MIN_S = 0.1
"""Between reports of a busy lane whose books change at every step."""


@dataclass(frozen=True, slots=True)
class Links:
    """The leader's ways to others."""

    clients: ClientLink
    followers: list[FollowerLink]
    coordination: Coordination
    peers: PeerLink | None


class Leader:
    """Owns the lane's engine and its sockets; runs one thread."""

    def __init__(self, lane: LaneEngine, links: Links, runner: Runner, groups: Groups, port: RankPort | None) -> None:
        self._lane = lane
        self._links = links
        self._runner = runner
        self._groups = groups
        self._port = port
        self._wave = LaneWave()
        self._step = 0
        self._has_asked_drain = False
        self._has_said_empty = False
        self._published = 0.0
        """When changes of the books were last told."""
        self._reported = 0.0
        """When the state was last told whether it had changed or not."""
        self._poller = zmq.Poller()
        sockets = [links.clients.socket, *links.coordination.sockets, *(link.socket for link in links.followers)]
        for socket in sockets if links.peers is None else [*sockets, links.peers.socket]:
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        """Until the process ends. Raises CollectiveError or GroupLostError when another rank is gone."""
        self._links.coordination.send(Join(self._groups.place.lane))
        while True:
            self._poller.poll(self._idle_ms())
            now = time.monotonic()
            self._receive(now)
            self._lane.tick(now)
            self._coordinate()
            self._send(now)
            if self._wave.is_running:
                self._take_step()
            self._publish()

    def _idle_ms(self) -> int | None:
        """How long the loop may wait for messages, in milliseconds; None: until one comes."""
        if self._wave.is_running:
            return 0
        now = time.monotonic()
        waits = [PUMP_MS / 1000] if self._port is not None and self._port.is_watching else []
        if self._lane.next_deadline is not None:
            waits.append(max(0.0, self._lane.next_deadline - now))
        if not self._lane.is_empty:
            waits.append(max(0.0, self._published + STATE_MIN_S - now))
        return math.ceil(min(waits) * 1000) if waits else None

    def _receive(self, now: float) -> None:
        lane, links = self._lane, self._links
        for client, message in links.clients.receive():
            lane.receive(client, message, now)
        for from_coordinator in links.coordination.receive():
            self._obey(from_coordinator)
        for follower in links.followers:
            for report in follower.receive():
                assert not isinstance(report, Started)
                lane.report(report, now)
        if links.peers is not None:
            for peer, control in links.peers.receive():
                lane.receive_from_peer(peer, control, now)
            lane.see_peers(links.peers.reached(), links.peers.heard(), now)
        if self._port is not None and self._port.is_watching:
            for report in self._port.poll():
                lane.report(report, now)

    def _obey(self, message: FromCoordinator) -> None:
        match message:
            case Assembled():
                self._lane.is_assembled = True
            case Wake(wave):
                self._wave.wake(wave)
            case DrainGroup():
                self._lane.is_draining = True
            case Drained():
                self._lane.is_drained = True

    def _coordinate(self) -> None:
        """Tell the coordinator of work, of draining, and of its end. The lane 0's answer is there at once."""
        lane, coordination = self._lane, self._links.coordination
        if not lane.is_assembled:
            return
        if lane.scheduler.has_work and (wave := self._wave.ask()) is not None:
            coordination.send(AskWave(wave))
        if lane.is_draining and not self._has_asked_drain:
            self._has_asked_drain = True
            coordination.send(AskDrain())
        if lane.is_draining and lane.is_empty and not self._has_said_empty:
            self._has_said_empty = True
            coordination.send(Empty(self._groups.place.lane))
        for message in coordination.receive():
            self._obey(message)

    def _take_step(self) -> None:
        """Run the group's next step, or end the wave when no lane has work for it."""
        shares = self._lane.scheduler.schedule()
        plan = plan_of(self._step, shares, self._runner.caches.page_size)
        self._step += 1
        for follower in self._links.followers:
            follower.send(Run(plan))
        if not self._groups.sum_over_group(plan.num_tokens):
            self._wave.end()
            return
        started = time.perf_counter()
        logits = self._runner.execute(plan)
        assert logits is not None, "the lane's leader has the logits"
        sampled = sample(logits, [_draw(share) for share in shares if share.sample])
        self._lane.complete(shares, sampled, time.monotonic())
        self._lane.count_step(time.perf_counter() - started)

    def _send(self, now: float) -> None:
        """Carry out what the lane has decided, in order."""
        effects, self._lane.effects = self._lane.effects, []
        for effect in effects:
            match effect:
                case ToClient(client, message):
                    self._links.clients.send(client, message)
                case Send(peer, control):
                    assert self._links.peers is not None
                    self._links.peers.send(peer, control, now)
                case ToRanks(command):
                    self._command_ranks(command)

    def _command_ranks(self, command: RankCommand) -> None:
        for follower in self._links.followers:
            follower.send(command)
        assert self._port is not None
        self._port.execute(command)

    def _publish(self) -> None:
        now = time.monotonic()
        if self._lane.is_empty or now - self._published >= STATE_MIN_S:
            is_due = not self._lane.is_empty and now - self._reported >= STATE_S
            self._lane.publish_state(is_due=is_due)
            self._published = now
            self._reported = now if is_due else self._reported
        self._send(now)


def _draw(share: Share) -> Draw:
    request = share.request
    return Draw(request.sampling, len(request.token_ids), request.seed)
