"""Decode's half of the handoff: reservations that prefill lanes fill. See session.py for the story."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from kimi_worker.handoff.actions import (
    Action,
    Activate,
    Fail,
    FreeReservation,
    HandoffRequest,
    LaneIdentity,
    Send,
    Timing,
    ToRanks,
)
from kimi_worker.handoff.fabric import Check, FabricChecks
from kimi_worker.handoff.plan import digest_of_reservation
from kimi_worker.protocol.handoff import (
    Abort,
    Aborted,
    Accepted,
    Hello,
    Inspected,
    Prefill,
    Probed,
    Query,
    RankReport,
    Ready,
    Refused,
    Release,
    Revoke,
    Revoked,
    ToDecode,
    Watch,
)

FINAL_REFUSALS = frozenset({"prompt_too_long", "engine_error"})
"""Codes of Refused that another prefill lane would answer with as well."""


class ReservationState(Enum):
    """Of reservations in the table; ACTIVE, RELEASED and ABORTED ones have left it."""

    RESERVED = "reserved"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class _Peer:
    """What is known of a prefill lane."""

    endpoint: str
    epoch: int | None = None
    confirmed_at: float = float("-inf")
    """When it last answered a Hello of the present epochs."""
    heard_at: float = float("-inf")
    """When its last message of the present epochs came."""
    unanswered_since: float | None = None
    next_hello: float = float("-inf")
    hello_interval: float = 0.0


@dataclass(slots=True)
class _Reservation:
    number: int
    request: HandoffRequest
    deadline: float
    state: ReservationState = ReservationState.RESERVED
    peer_epoch: int | None = None
    """Of the process that Prefill was sent to; None: not sent, so nothing can have been written."""
    accepted: bool = False
    sent_at: float = 0.0
    next_send: float = 0.0
    interval: float = 0.0
    cut_off_since: float | None = None
    """Since when only a Revoke can free it."""


class DecodeSide:
    """Table of the reservations of one decode lane. Every call returns the actions to perform, in order."""

    def __init__(self, identity: LaneIdentity, timing: Timing) -> None:
        self._identity = identity
        self._timing = timing
        self._peers: dict[str, _Peer] = {}
        self._open: dict[int, _Reservation] = {}
        self._numbers: dict[str, int] = {}
        self._last_number = 0
        self._revoked: dict[int, bytes] | None = None
        """Answers to the Revoke under way, by rank; None: no Revoke is under way."""
        self._watching = False
        self.fabric = FabricChecks(identity, timing)

    @property
    def epoch(self) -> int:
        return self._identity.epoch

    @property
    def num_open(self) -> int:
        """Reservations that are neither activated nor freed."""
        return len(self._open)

    @property
    def num_quarantined(self) -> int:
        return sum(item.state is ReservationState.QUARANTINED for item in self._open.values())

    def begin(self, request: HandoffRequest, now: float) -> list[Action]:
        """Take over a reservation and ask prefill to fill it. `request_id` must not be open already."""
        assert request.request_id not in self._numbers, f"request {request.request_id} is already in the handoff"
        self._last_number += 1
        item = _Reservation(self._last_number, request, now + self._timing.reservation_timeout_s)
        self._open[item.number] = item
        self._peers.setdefault(request.prefill, _Peer(request.prefill))
        self._numbers[request.request_id] = item.number
        return self._finish([], now)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """The client has gone; unknown and active requests are ignored. No Fail follows."""
        number = self._numbers.get(request_id)
        if number is None or self._open[number].state is not ReservationState.RESERVED:
            return []
        return self._finish(self._give_up(self._open[number], now), now)

    def verify(self, endpoints: list[str], now: float) -> list[Action]:
        """Check that each of these prefill lanes, all that there are, can write into this lane."""
        self.fabric.expect(endpoints)
        return self._finish([], now)

    def see(self, peer: str, now: float) -> None:
        """The peer's process lives, however long it says nothing: it is in a long step."""
        known = self._peers.get(peer)
        if known is not None and known.unanswered_since is not None:
            known.unanswered_since = now

    def receive(self, peer: str, message: ToDecode, now: float) -> list[Action]:
        if message.peer_epoch != self.epoch:
            return []
        if isinstance(message, Hello):
            return self._finish(self._meet(peer, message, now), now)
        known = self._peers.get(peer)
        if known is not None and known.epoch == message.epoch:
            known.unanswered_since, known.heard_at = None, now
        if isinstance(message, Probed):
            return self._finish(self.fabric.answered(peer, message, now), now)
        item = self._open.get(message.number)
        if item is None or item.request.prefill != peer or item.peer_epoch != message.epoch:
            # A repetition for what is closed here; only Ready waits for an answer.
            return [self._release(peer, message)] if isinstance(message, Ready) else []
        return self._finish(self._answered(item, message, now), now)

    def report(self, report: RankReport, now: float) -> list[Action]:
        if isinstance(report, Inspected):
            self.fabric.inspected(report, now)
            return self._finish([], now)
        if not isinstance(report, Revoked) or self._revoked is None:
            return []
        self._revoked[report.rank] = report.descriptor
        if len(self._revoked) < self._identity.num_ranks:
            return []
        ranks = tuple(self._revoked[rank] for rank in range(self._identity.num_ranks))
        self._identity = replace(self._identity, epoch=self.epoch + 1, ranks=ranks)
        self._revoked = None
        self.fabric.revoked()
        for peer in self._peers.values():
            peer.confirmed_at = peer.next_hello = float("-inf")
            peer.unanswered_since = None
        quarantined = [item for item in self._open.values() if item.state is ReservationState.QUARANTINED]
        return self._finish([action for item in quarantined for action in self._free(item)], now)

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for peer in list(self._peers.values()):
            actions += self._tick_peer(peer, now)
        for item in list(self._open.values()):
            actions += self._tick_reservation(item, now)
        if self._revoked is None:
            heard_at = {endpoint: peer.heard_at for endpoint, peer in self._peers.items()}
            actions += self.fabric.tick(self.epoch, heard_at, now)
        return self._finish(actions, now)

    def next_deadline(self) -> float | None:
        """When `tick` is next wanted, in the clock of `now`; None when nothing is open."""
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        if self._revoked is None:
            yield from self.fabric.deadlines()
            for endpoint in self._debtors():
                peer = self._peers[endpoint]
                yield peer.next_hello
                if peer.unanswered_since is not None:
                    yield peer.unanswered_since + self._timing.silence_s
            for item in self._open.values():
                if item.cut_off_since is not None:
                    yield item.cut_off_since + self._timing.revoke_wait_s
                elif item.peer_epoch is not None:
                    yield item.next_send
        yield from (item.deadline for item in self._open.values() if item.state is ReservationState.RESERVED)

    def _answerable(self) -> list[_Reservation]:
        return [item for item in self._open.values() if item.cut_off_since is None]

    def _debtors(self) -> set[str]:
        """Peers that owe an answer."""
        checked = self.fabric.waiting_for() & self._peers.keys()
        return {item.request.prefill for item in self._answerable()} | checked

    # One reservation

    def _answered(self, item: _Reservation, message: Accepted | Refused | Ready | Aborted, now: float) -> list[Action]:
        match message:
            case Accepted():
                if item.state is ReservationState.RESERVED:
                    item.accepted, item.next_send = True, now + self._timing.resend_max_s
                return []
            case Refused():
                retryable = message.code not in FINAL_REFUSALS
                return [*self._failed(item, message.code, message.message, retryable), *self._free(item)]
            case Ready():
                return self._landed(item, message, now)
            case Aborted():
                failed = self._failed(item, "handoff_failed", message.message, retryable=True)
                return [*failed, *(self._free(item) if message.settled else self._cut_off(item, now))]

    def _advance(self, item: _Reservation, now: float) -> list[Action]:
        """Send Prefill when the peer's epoch is freshly confirmed, a Hello otherwise."""
        peer = self._peers[item.request.prefill]
        if now - peer.confirmed_at >= self._timing.hello_s:
            return self._hello(peer, now) if now >= peer.next_hello else []
        assert peer.epoch is not None, f"{peer.endpoint} is confirmed without an epoch"
        item.peer_epoch = peer.epoch
        return [self._ask(item, now)]

    def _advance_check(self, check: Check, now: float) -> list[Action]:
        """The same for a test write."""
        peer = self._peers.setdefault(check.endpoint, _Peer(check.endpoint))
        if now - peer.confirmed_at >= self._timing.hello_s:
            return self._hello(peer, now) if now >= peer.next_hello else []
        assert peer.epoch is not None, f"{peer.endpoint} is confirmed without an epoch"
        return [self.fabric.ask(check, self.epoch, peer.epoch, now)]

    def _ask(self, item: _Reservation, now: float) -> Action:
        assert item.peer_epoch is not None, f"transfer {item.number} has no peer yet"
        self._delay_next_send(item, now)
        request = item.request
        message = Prefill(
            number=item.number,
            epoch=self.epoch,
            peer_epoch=item.peer_epoch,
            token_ids=request.token_ids,
            sampling=request.sampling,
            page_ids=request.page_ids,
            slot=request.slot,
            deadline_s=max(0.0, item.deadline - now),
        )
        return Send(request.prefill, message)

    def _query(self, item: _Reservation, now: float) -> Action:
        assert item.peer_epoch is not None, f"transfer {item.number} was never sent"
        item.sent_at, item.next_send = now, now + self._timing.resend_max_s
        return Send(item.request.prefill, Query(item.number, self.epoch, item.peer_epoch))

    def _delay_next_send(self, item: _Reservation, now: float) -> None:
        item.sent_at = now
        item.interval = min(max(item.interval * 2, self._timing.resend_s), self._timing.resend_max_s)
        item.next_send = now + item.interval

    def _landed(self, item: _Reservation, message: Ready, now: float) -> list[Action]:
        release = self._release(item.request.prefill, message)
        if item.state is ReservationState.QUARANTINED:
            return [release, *self._free(item)]
        expected = digest_of_reservation(self._identity.layout, item.request.page_ids, item.request.slot)
        if message.digest != expected:
            text = f"prefill wrote to other pages than reserved (digest {message.digest}, expected {expected})"
            return [*self._failed(item, "handoff_failed", text, retryable=True), *self._give_up(item, now)]
        self._forget(item)
        return [Activate(item.request.request_id, message.first, message.num_bytes, message.seconds), release]

    def _release(self, peer: str, message: Ready) -> Action:
        return Send(peer, Release(message.number, self.epoch, message.epoch))

    def _failed(self, item: _Reservation, code: str, text: str, retryable: bool) -> list[Action]:
        """Tell the client, unless it has already been told or has gone."""
        if item.state is not ReservationState.RESERVED:
            return []
        return [Fail(item.request.request_id, code, text, retryable)]

    def _give_up(self, item: _Reservation, now: float) -> list[Action]:
        """Free the reservation when nobody can write into it, quarantine it otherwise."""
        if item.peer_epoch is None:
            return self._free(item)
        item.state = ReservationState.QUARANTINED
        item.interval, item.accepted = 0.0, False
        return [self._send_abort(item, now)]

    def _send_abort(self, item: _Reservation, now: float) -> Action:
        assert item.peer_epoch is not None, f"transfer {item.number} was never sent"
        self._delay_next_send(item, now)
        return Send(item.request.prefill, Abort(item.number, self.epoch, item.peer_epoch))

    def _cut_off(self, item: _Reservation, now: float) -> list[Action]:
        """Nobody will say that the writes have ended: hold the memory until a Revoke."""
        if item.peer_epoch is None:
            return self._free(item)
        item.state = ReservationState.QUARANTINED
        if item.cut_off_since is None:
            item.cut_off_since = now
        return []

    def _free(self, item: _Reservation) -> list[Action]:
        self._forget(item)
        return [FreeReservation(item.request.request_id)]

    def _forget(self, item: _Reservation) -> None:
        del self._open[item.number]
        del self._numbers[item.request.request_id]

    def _tick_reservation(self, item: _Reservation, now: float) -> list[Action]:
        if item.number not in self._open or item.cut_off_since is not None:
            return []
        if item.state is ReservationState.RESERVED and now >= item.deadline:
            text = f"{item.request.prefill} sent no Ready within {self._timing.reservation_timeout_s:g} s"
            return [*self._failed(item, "handoff_failed", text, retryable=True), *self._give_up(item, now)]
        if self._revoked is not None or item.peer_epoch is None or now < item.next_send:
            return []
        if item.state is ReservationState.QUARANTINED:
            return [self._send_abort(item, now)]
        if self._peers[item.request.prefill].heard_at <= item.sent_at:
            # It has read nothing since: what was sent waits there, and a second long prompt would only lie beside it
            item.next_send = now + max(item.interval, self._timing.resend_s)
            return []
        return [self._query(item, now) if item.accepted else self._ask(item, now)]

    # Peers

    def _hello(self, peer: _Peer, now: float) -> list[Action]:
        if peer.unanswered_since is None:
            peer.unanswered_since = now
        if now - peer.confirmed_at < self._timing.hello_s:
            peer.hello_interval = self._timing.hello_s
        else:
            longest = 2 * self._timing.hello_s
            peer.hello_interval = min(max(2 * peer.hello_interval, self._timing.resend_s), longest)
        peer.next_hello = now + peer.hello_interval
        me = self._identity
        mine = [item.number for item in self._open.values() if item.request.prefill == peer.endpoint]
        oldest = min(mine, default=self._last_number + 1)
        return [Send(peer.endpoint, Hello(me.engine, me.epoch, me.layout_hash, list(me.ranks), 0, oldest))]

    def _meet(self, endpoint: str, hello: Hello, now: float) -> list[Action]:
        peer = self._peers.get(endpoint)
        if peer is None or self._revoked is not None:
            return []
        mine = self._identity.layout_hash
        if hello.layout_hash != mine:
            text = (
                f"{endpoint} has cache layout {hello.layout_hash}, this lane {mine}; run equal settings on both roles"
            )
            return self._lose(peer, "layout_mismatch", text, now)
        actions: list[Action] = []
        if peer.epoch not in (None, hello.epoch):
            actions += self._lose(
                peer, "handoff_failed", f"{endpoint} restarted during the handoff", now, sent_only=True
            )
            self.fabric.restarted(endpoint)
        peer.epoch, peer.confirmed_at, peer.heard_at, peer.unanswered_since = hello.epoch, now, now, None
        peer.hello_interval, peer.next_hello = 0.0, now + self._timing.hello_s
        return actions

    def _lose(self, peer: _Peer, code: str, text: str, now: float, *, sent_only: bool = False) -> list[Action]:
        """Fail what the peer owes us; what it may have written into is cut off."""
        actions: list[Action] = []
        for item in list(self._open.values()):
            if item.request.prefill != peer.endpoint or (sent_only and item.peer_epoch is None):
                continue
            actions += self._failed(item, code, text, retryable=True)
            actions += self._cut_off(item, now)
        if not sent_only:
            self.fabric.fail(peer.endpoint, text, now)
            self._peers.pop(peer.endpoint, None)
        return actions

    def _tick_peer(self, peer: _Peer, now: float) -> list[Action]:
        if self._revoked is not None:
            return []
        if peer.endpoint not in self._debtors():
            peer.unanswered_since = None
            if now - peer.confirmed_at >= self._timing.forget_s:
                del self._peers[peer.endpoint]
            return []
        if peer.unanswered_since is not None and now >= peer.unanswered_since + self._timing.silence_s:
            text = f"{peer.endpoint} has been silent for {self._timing.silence_s:g} s"
            return self._lose(peer, "prefill_unreachable", text, now)
        return self._hello(peer, now) if now >= peer.next_hello else []

    def _revoke_if_due(self, now: float) -> list[Action]:
        """Cut all peers off once that harms no healthy transfer, or when it has waited for long enough."""
        since = [item.cut_off_since for item in self._open.values() if item.cut_off_since is not None]
        sent = [item for item in self._answerable() if item.peer_epoch is not None]
        if self._revoked is not None or not since or (sent and now < min(since) + self._timing.revoke_wait_s):
            return []
        self._revoked = {}
        actions: list[Action] = [ToRanks(Revoke())]
        for item in sent:
            text = "the lane cut its connections to reclaim memory from a lost prefill lane"
            actions += self._failed(item, "handoff_failed", text, retryable=True)
            item.state, item.cut_off_since = ReservationState.QUARANTINED, now
        return actions

    def _finish(self, actions: list[Action], now: float) -> list[Action]:
        """Add what follows from any event: a Revoke that is due, requests that may go out, watching or not."""
        actions = [*actions, *self._revoke_if_due(now)]
        # While something is cut off nothing new is sent: the Revoke would interrupt it, its prompt be computed twice
        if all(item.cut_off_since is None for item in self._open.values()):
            for item in list(self._open.values()):
                if item.peer_epoch is None:
                    actions += self._advance(item, now)
            if self._revoked is None:
                for check in self.fabric.due():
                    if self.fabric.has_room:
                        actions += self._advance_check(check, now)
        if (bool(self._open) or self.fabric.is_writing) != self._watching:
            self._watching = not self._watching
            actions.append(ToRanks(Watch(self._watching)))
        return actions
