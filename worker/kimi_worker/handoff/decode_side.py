"""Decode's half of the handoff: reservations. See session.py."""

from kimi_worker.handoff.actions import Action, HandoffRequest, LaneIdentity, Timing
from kimi_worker.protocol.handoff import RankReport, ToDecode


class DecodeSide:
    """Table of the reservations that prefill lanes fill."""

    def __init__(self, identity: LaneIdentity, timing: Timing) -> None: ...

    def begin(self, request: HandoffRequest, now: float) -> list[Action]: ...

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """The client has gone; unknown and active requests are ignored. No Fail follows."""

    def receive(self, peer: str, message: ToDecode, now: float) -> list[Action]: ...

    def report(self, report: RankReport, now: float) -> list[Action]: ...

    def tick(self, now: float) -> list[Action]: ...

    def next_deadline(self) -> float | None: ...

    num_open: int
    """Reservations that are neither activated nor freed."""
    num_quarantined: int
