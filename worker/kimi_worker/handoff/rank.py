"""A rank's hand in the handoff: performs its leader's commands on its own memory and transport."""

from collections.abc import Sequence

from kimi_worker.handoff.transport import Region, Transport
from kimi_worker.protocol.handoff import RankCommand, RankReport


class RankPort:
    """One rank's transport, its regions, and what is under way. `descriptor` goes to the leader for its Hello."""

    descriptor: bytes

    def __init__(self, rank: int, transport: Transport, regions: Sequence[Region]) -> None:
        """`rank` is the TP rank within the lane, from 0."""

    def execute(self, command: RankCommand) -> None: ...

    def poll(self) -> list[RankReport]:
        """Make progress (on the written side too) and return what has ended."""

    def close(self) -> None: ...
