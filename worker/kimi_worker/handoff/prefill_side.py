"""Prefill's half of the handoff: transfers. See session.py."""

from kimi_worker.handoff.actions import Action, LaneIdentity, Timing
from kimi_worker.protocol.engine import SampledToken
from kimi_worker.protocol.handoff import RankReport, ToPrefill, TransferKey


class PrefillSide:
    """Table of the transfers that decode lanes asked for."""

    def __init__(
        self, identity: LaneIdentity, timing: Timing, *, fence: bool = False, notify_before_writes_land: bool = False
    ) -> None: ...

    def receive(self, peer: str, message: ToPrefill, now: float) -> list[Action]: ...

    def computed(
        self, key: TransferKey, page_ids: list[int], slot: int, first: SampledToken, now: float
    ) -> list[Action]:
        """The prompt is in these pages and this slot; they are the session's until FreeSource."""

    def fail(self, key: TransferKey, code: str, message: str, now: float) -> list[Action]:
        """The scheduler does not take the request or cannot compute it; nothing is held for it any more."""

    def report(self, report: RankReport, now: float) -> list[Action]: ...

    def tick(self, now: float) -> list[Action]: ...

    def next_deadline(self) -> float | None: ...

    num_open: int
    """Transfers that are queued, being written, or not yet released."""
