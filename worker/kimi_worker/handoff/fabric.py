"""Whether every prefill lane can write into this decode lane: a test write into each rank's scratch, read here.

    decode                             prefill
    DUE        -- Hello -->                          until the peer's epoch and layout are known
    ASKED      -- Probe{nonce} -->     ToRanks(Stamp): every rank writes the nonce's pattern into its peer's scratch
               <-- Probed --
    READING    ToRanks(Inspect): every rank looks whether the pattern is there
    PASSED or FAILED, which becomes DUE again after a while

Pages and slots are not touched: the scratch is a region of its own, registered and revoked with the others. A Revoke, a
restarted peer and a new peer make a check due. When all have passed nothing is sent and no timer is set.
"""

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kimi_worker.handoff.actions import Action, LaneIdentity, Send, Timing, ToRanks
from kimi_worker.protocol.handoff import Inspect, Inspected, Probe, Probed

SCRATCH_UNITS = 16
"""Test writes that a rank can receive at once; probe n goes into unit n modulo this."""
RETRY_S = 2.0
"""After a failed check; each further one waits twice as long, up to RETRY_MAX_S."""
RETRY_MAX_S = 15.0
HINTS = {
    "nixl": "check that UCX_TLS and UCX_NET_DEVICES name a network that both pods are on, and that no policy or "
    "firewall closes ports between them",
    "moriio": "check that the RDMA devices of both nodes are up and reach each other (ibv_devinfo, ib_write_bw), and "
    "that both use the same GID index and priority",
}


def pattern(nonce: int, rank: int, size: int) -> bytes:
    """What a rank writes for a probe."""
    return hashlib.shake_128(f"{nonce}/{rank}".encode()).digest(size)


class CheckState(Enum):
    DUE = "due"
    ASKED = "asked"
    READING = "reading"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(slots=True)
class Check:
    """One peer's. `is_verified` and `error` are those of the last check that ended."""

    endpoint: str
    state: CheckState = CheckState.DUE
    is_verified: bool = False
    error: str = ""
    number: int = 0
    nonce: int = 0
    peer_epoch: int = 0
    sent_at: float = 0.0
    next_send: float = 0.0
    interval: float = 0.0
    deadline: float = 0.0
    retry_at: float = 0.0
    retry_s: float = 0.0
    unread: set[int] = field(default_factory=set)
    """Ranks that have not yet looked."""
    found: str = ""
    """What a rank found instead of the pattern."""


class FabricChecks:
    """Table of the checks of one decode lane. DecodeSide says hello, passes on what concerns it, and blocks revokes."""

    def __init__(self, identity: LaneIdentity, timing: Timing) -> None:
        self._num_ranks = identity.num_ranks
        self._transport = identity.transport
        self._timing = timing
        self._checks: dict[str, Check] = {}
        self._last_number = 0

    @property
    def num_peers(self) -> int:
        return len(self._checks)

    @property
    def num_verified(self) -> int:
        return sum(check.is_verified for check in self._checks.values())

    @property
    def error(self) -> str:
        """Of the first peer that failed: who, over what, why, what to check."""
        return next((check.error for check in self._checks.values() if check.error), "")

    @property
    def is_writing(self) -> bool:
        """Whether a test write may be under way."""
        return bool(self._units())

    def expect(self, endpoints: Sequence[str]) -> None:
        """These are all prefill lanes that there are."""
        self._checks = {name: self._checks.get(name) or Check(name) for name in dict.fromkeys(endpoints)}

    @property
    def has_room(self) -> bool:
        """Whether one more test write may be asked for."""
        return len(self._units()) < SCRATCH_UNITS

    def due(self) -> list[Check]:
        return [check for check in self._checks.values() if check.state is CheckState.DUE]

    def _units(self) -> set[int]:
        """Of the scratch, those in use."""
        states = (CheckState.ASKED, CheckState.READING)
        return {check.number % SCRATCH_UNITS for check in self._checks.values() if check.state in states}

    def waiting_for(self) -> set[str]:
        """Peers that owe an answer or a Hello."""
        states = (CheckState.DUE, CheckState.ASKED)
        return {check.endpoint for check in self._checks.values() if check.state in states}

    def ask(self, check: Check, epoch: int, peer_epoch: int, now: float) -> Action:
        """The peer is there: have it write."""
        used = self._units()
        assert len(used) < SCRATCH_UNITS, "more test writes than the scratch holds"
        self._last_number += 1
        while self._last_number % SCRATCH_UNITS in used:
            self._last_number += 1
        check.state, check.number, check.nonce = CheckState.ASKED, self._last_number, secrets.randbits(62)
        check.peer_epoch, check.interval = peer_epoch, 0.0
        check.deadline = now + self._timing.reservation_timeout_s
        return self._send(check, epoch, now)

    def answered(self, peer: str, message: Probed, now: float) -> list[Action]:
        check = self._checks.get(peer)
        if check is None or check.state is not CheckState.ASKED:
            return []
        if (check.number, check.peer_epoch) != (message.number, message.epoch):
            return []
        if message.error:
            self.fail(peer, f"the test write failed: {message.error}", now)
            return []
        check.state, check.unread, check.found = CheckState.READING, set(range(self._num_ranks)), ""
        return [ToRanks(Inspect(check.number, check.nonce))]

    def inspected(self, report: Inspected, now: float) -> None:
        for check in self._checks.values():
            if check.state is not CheckState.READING or check.number != report.number:
                continue
            check.unread.discard(report.rank)
            if report.error:
                check.found = f"rank {report.rank}: {report.error}"
            if check.unread:
                return
            if check.found:
                self.fail(check.endpoint, f"the test write was reported done but did not arrive: {check.found}", now)
            else:
                check.state, check.is_verified, check.error, check.retry_s = CheckState.PASSED, True, "", 0.0

    def fail(self, peer: str, reason: str, now: float) -> None:
        check = self._checks.get(peer)
        if check is None or check.state is CheckState.FAILED:
            return
        hint = HINTS.get(self._transport, "check the network between the pods")
        check.error = f"{peer} over {self._transport}: {reason}; {hint}"
        check.state, check.is_verified = CheckState.FAILED, False
        check.retry_s = min(max(2 * check.retry_s, RETRY_S), RETRY_MAX_S)
        check.retry_at = now + check.retry_s

    def restarted(self, peer: str) -> None:
        """Another process answers there now."""
        check = self._checks.get(peer)
        if check is not None:
            check.state, check.is_verified = CheckState.DUE, False

    def revoked(self) -> None:
        """All memory has been registered anew. What is known stays known until it is found otherwise."""
        for check in self._checks.values():
            if check.state is not CheckState.FAILED:
                check.state = CheckState.DUE

    def tick(self, epoch: int, heard_at: dict[str, float], now: float) -> list[Action]:
        """`heard_at`: when each peer said something last."""
        actions: list[Action] = []
        for check in self._checks.values():
            if check.state is CheckState.FAILED and now >= check.retry_at:
                check.state = CheckState.DUE
            elif check.state is CheckState.ASKED and now >= check.deadline:
                limit_s = self._timing.reservation_timeout_s
                self.fail(check.endpoint, f"the test write did not end within {limit_s:g} s", now)
            elif check.state is CheckState.ASKED and now >= check.next_send:
                if heard_at.get(check.endpoint, now) > check.sent_at:
                    actions.append(self._send(check, epoch, now))
                else:
                    check.next_send = now + check.interval
        return actions

    def deadlines(self) -> Iterator[float]:
        for check in self._checks.values():
            if check.state is CheckState.ASKED:
                yield min(check.next_send, check.deadline)
            elif check.state is CheckState.FAILED:
                yield check.retry_at

    def _send(self, check: Check, epoch: int, now: float) -> Action:
        check.interval = min(max(check.interval * 2, self._timing.resend_s), self._timing.resend_max_s)
        check.sent_at, check.next_send = now, now + check.interval
        return Send(check.endpoint, Probe(check.number, epoch, check.peer_epoch, check.nonce))
