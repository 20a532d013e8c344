"""One seeded random walk of a few lanes through faults, and the checks at its end."""

import random
from collections import Counter, deque

from sim_fabric import Fabric, Faults, Loop, SimNetwork, SimTransport
from sim_lanes import LONGEST_STEP_S, TIMING, DecodeLane, InvariantError, Lane, PrefillLane, World

FAULTS_S = 20.0
SETTLE_S = 160.0
"""Longer than all time-outs in a row."""
ANSWER_S = 2 * TIMING.resend_max_s + TIMING.silence_s + 4.0
"""After the last fault: for every client to know. A lost message costs a repetition, never a whole time-out."""
PROBE_S = 20.0


class Walk:
    """Builds a world from a seed and lets it run: requests, cancels, crashes, restarts, partitions."""

    def __init__(self, seed: int, *, early: bool = False, only_steps: bool = False) -> None:
        """`only_steps`: nothing is lost or broken, but every lane is busy for long at times."""
        self._rng = rng = random.Random(seed)
        self._early = early
        self._only_steps = only_steps
        self._trace: deque[tuple[object, ...]] = deque(maxlen=400)
        self._crashed = False
        loop = Loop()
        self._faults = faults = Faults(
            lose_message=rng.choice([0, 0, 0.1, 0.3]),
            repeat_message=rng.choice([0, 0.2]),
            late_message=rng.choice([0, 0.1, 0.3]),
            slow_write=rng.choice([0, 0.02, 0.2]),
            slowest_write_s=rng.choice([2.0, 20.0]),
            break_wire=rng.choice([0, 0, 0.1]),
        )
        self._slow = faults.slow_write > 0
        if only_steps:
            faults.stop()
        network = SimNetwork(loop, rng, faults)
        fabric = Fabric(loop, rng, faults, completes_locally=rng.random() < 0.5)
        self.world = World(loop, rng, network, fabric, self._note)
        fabric.check_source = self._check_source
        fabric.check_landing = self._check_landing
        self._owners: dict[SimTransport, Lane] = {}
        self.decodes = [self._decode(f"decode-{index}") for index in range(rng.choice([1, 1, 2]))]
        self.prefills = [self._prefill(f"prefill-{index}", "layout-a") for index in range(rng.choice([1, 2]))]
        if rng.random() < 0.2:
            self.prefills.append(self._prefill("prefill-other", "layout-b"))

    def run(self) -> Counter[str]:
        """Run to the end and return how the requests ended. Raises InvariantError with the last events as a note."""
        try:
            self._schedule()
            self.world.loop.run(FAULTS_S)
            self._heal()
            self.world.loop.run(FAULTS_S + ANSWER_S)
            if not self._crashed and not self._slow:
                self._check_answered()
            self.world.loop.run(FAULTS_S + SETTLE_S)
            self._check_idle()
            self._tell()
            self._probe()
            self._check_idle()
            self._check_fabric()
        except (InvariantError, AssertionError, RuntimeError) as error:
            error.add_note("\n".join(" ".join(map(str, event)) for event in self._trace))
            raise
        outcomes = [outcome for lane in self.decodes for outcome in lane.outcomes.values()]
        return Counter(outcome.ended or "lost" for outcome in outcomes)

    def _note(self, *what: object) -> None:
        self._trace.append((round(self.world.loop.now, 4), *what))

    def _decode(self, endpoint: str) -> DecodeLane:
        lane = DecodeLane(self.world, endpoint, "layout-a")
        self._owners |= dict.fromkeys(lane.transports, lane)
        return lane

    def _prefill(self, endpoint: str, layout_hash: str) -> PrefillLane:
        fence = self.world.fabric.completes_locally
        lane = PrefillLane(self.world, endpoint, layout_hash, fence=fence, early=self._early)
        lane.trouble = self._rng.choice([0, 0.2]) if self.world.loop.now < FAULTS_S else 0.0
        self._owners |= dict.fromkeys(lane.transports, lane)
        return lane

    def _check_source(self, transport: SimTransport, start: int, end: int) -> None:
        pool = self._owners[transport].pool
        if pool.is_free(start) or pool.is_free(end - 1):
            raise InvariantError(f"I2: a write of {self._owners[transport].endpoint} reads freed memory at {start}")

    def _check_landing(self, source: SimTransport, target: SimTransport) -> None:
        layouts = [self._owners[transport].identity.layout_hash for transport in (source, target)]
        if layouts[0] != layouts[1]:
            raise InvariantError(f"I6: bytes of layout {layouts[0]} land in layout {layouts[1]}")

    def _schedule(self) -> None:
        rng, loop = self._rng, self.world.loop
        for _ in range(rng.choice([0, 1, 2])):
            loop.after(rng.uniform(0, FAULTS_S), self._verify)
        for number in range(rng.randint(3, 10)):
            request_id = str(number * 10)
            at = rng.uniform(0, FAULTS_S)
            loop.after(at, lambda request_id=request_id: self._request(request_id))  # type: ignore[misc]
            if rng.random() < 0.2:
                loop.after(at + rng.uniform(0, 3), lambda request_id=request_id: self._cancel(request_id))  # type: ignore[misc]
        for _ in range(rng.choice([0, 0, 1, 2]) + self._only_steps):
            loop.after(rng.uniform(0, FAULTS_S - LONGEST_STEP_S), self._step)
        if self._only_steps:
            return
        for _ in range(rng.choice([0, 0, 1, 2])):
            loop.after(rng.uniform(0, FAULTS_S), self._crash)
        for _ in range(rng.choice([0, 0, 1, 2])):
            loop.after(rng.uniform(0, FAULTS_S), self._partition)
        for _ in range(rng.choice([0, 0, 1, 2])):
            loop.after(rng.uniform(0, FAULTS_S), self._break_wires)

    def _request(self, request_id: str) -> None:
        decode = self._rng.choice(self.decodes)
        decode.request(request_id, self._rng.choice(self.prefills).endpoint, self._rng.randint(1, 4))

    def _cancel(self, request_id: str) -> None:
        for decode in self.decodes:
            decode.cancel(request_id)

    def _crash(self) -> None:
        """A process dies; another takes its place at once, later, elsewhere, or never."""
        lane = self._rng.choice([*self.decodes, *self.prefills])
        if not lane.is_alive:
            return
        lane.crash()
        self._crashed = True
        if self._rng.random() < 0.75:
            self.world.loop.after(self._rng.choice([0.05, 2.0, 8.0]), lambda: self._restart(lane))

    def _restart(self, lane: Lane) -> None:
        endpoint = lane.endpoint if self._rng.random() < 0.6 else f"{lane.endpoint}-moved"
        if endpoint in self.world.network.receivers:
            return
        self._note(endpoint, "starts")
        if isinstance(lane, DecodeLane):
            self.decodes.append(self._decode(endpoint))
        else:
            self.prefills.append(self._prefill(endpoint, lane.identity.layout_hash))

    def _step(self) -> None:
        """A lane is busy with one step for longer than a silent peer is waited for."""
        self._rng.choice([*self.decodes, *self.prefills]).step_for(self._rng.uniform(0.5, LONGEST_STEP_S))

    def _partition(self) -> None:
        pair = frozenset((self._rng.choice(self.decodes).endpoint, self._rng.choice(self.prefills).endpoint))
        self.world.network.cut.add(pair)
        self.world.loop.after(self._rng.choice([1.0, 7.0, 15.0]), lambda: self.world.network.cut.discard(pair))

    def _verify(self) -> None:
        """A list of prefill lanes is told: some that are there, some that are gone."""
        prefills = self._rng.sample(self.prefills, self._rng.randint(0, len(self.prefills)))
        for decode in self.decodes:
            if decode.is_alive:
                decode.verify([lane.endpoint for lane in prefills])

    def _there(self) -> list[str]:
        lanes = [lane for lane in self.prefills if lane.is_alive and lane.identity.layout_hash == "layout-a"]
        return [lane.endpoint for lane in lanes]

    def _tell(self) -> None:
        for decode in self.decodes:
            if decode.is_alive:
                decode.verify(self._there())

    def _check_fabric(self) -> None:
        """Without faults every live lane of the same layout can write, and is known to."""
        there = self._there()
        for decode in self.decodes:
            fabric = decode.decode_side.fabric
            found = (fabric.num_peers, fabric.num_verified, fabric.error)
            if decode.is_alive and found != (len(set(there)), len(set(there)), ""):
                raise InvariantError(f"I5: {decode.endpoint} verified {fabric.num_verified} of {there}: {fabric.error}")

    def _heal(self) -> None:
        self._faults.stop()
        for prefill in self.prefills:
            prefill.trouble = 0.0
        self.world.network.cut.clear()
        self._tell()

    def _break_wires(self) -> None:
        self._rng.choice(self._rng.choice(self.prefills).transports).break_wires()

    def _check_idle(self) -> None:
        for lane in [*self.decodes, *self.prefills]:
            if not lane.is_alive:
                continue
            lane.check_idle()
        self._check_answered()

    def _check_answered(self) -> None:
        for lane in self.decodes:
            unfinished = [name for name, outcome in lane.outcomes.items() if not outcome.ended]
            if unfinished and lane.is_alive:
                raise InvariantError(f"I5: requests {unfinished} of {lane.endpoint} have no end")

    def _probe(self) -> None:
        """After the faults each decode lane is served by each prefill lane of its layout, at the second try."""
        number = 1000
        for decode in self.decodes:
            for prefill in self.prefills:
                if not decode.is_alive or not prefill.is_alive or prefill.identity.layout_hash != "layout-a":
                    continue
                tries = []
                for _ in range(2):
                    number += 10
                    decode.request(str(number), prefill.endpoint, 2)
                    self.world.loop.run(self.world.loop.now + PROBE_S)
                    tries.append(decode.outcomes[str(number)].ended)
                if tries[1] != "done":
                    raise InvariantError(f"I5: probes of {decode.endpoint} at {prefill.endpoint} ended {tries}")
