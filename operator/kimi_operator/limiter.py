"""A token bucket: the operator never asks the API server for more than its share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class RateLimit:
    """Lets `per_second` calls through on average, up to `burst` at once; the rest wait their turn."""

    per_second: float
    burst: int
    _tokens: float = field(init=False)
    _filled_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._tokens = float(self.burst)

    async def take(self) -> None:
        """Wait until one more call is allowed."""
        now = asyncio.get_running_loop().time()
        self._tokens = min(self.burst, self._tokens + (now - self._filled_s) * self.per_second)
        self._filled_s = now
        self._tokens -= 1.0
        if self._tokens < 0:
            # Each call that finds the bucket empty books a later moment, so waiting calls keep their order.
            await asyncio.sleep(-self._tokens / self.per_second)
