"""How far a long computation is, in lines on standard error; nothing is said of a short one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

QUIET_S = 2.0
"""Nobody wonders before; after, a line each time so long."""


class Progress:
    """Counts steps; each call is one."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """The clock runs from here on."""
        self.what, self.total, self.clock = what, total, clock
        self.done = 0
        self.next_s = clock() + QUIET_S

    def __call__(self) -> None:
        """One step is done."""
        self.done += 1
        if (now_s := self.clock()) < self.next_s:
            return
        self.next_s = now_s + QUIET_S
        share = self.done / self.total
        sys.stderr.write(f"kimictl: {self.what}: {self.done:,} of {self.total:,} ({share:.0%})\n")
        sys.stderr.flush()
