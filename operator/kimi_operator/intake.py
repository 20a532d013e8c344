"""Bodies on their way: bounded each and in sum. Whoever comes slowly is in nobody's way: the oldest gives way."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class NotTaken(Exception):  # noqa: N818 - named for what is wrong
    """A body that is not read to its end, with the status of HTTP that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class Coming:
    """One body, as much of it as has come."""

    intake: Intake
    data: bytearray = field(default_factory=bytearray)
    has_given_way: bool = False

    async def read(self, chunks: AsyncIterable[bytes]) -> None:
        """Take it all into `data`. Raises NotTaken when it is too large or had to give way."""
        async for chunk in chunks:
            self.require()
            if len(self.data) + len(chunk) > self.intake.max_body_bytes:
                raise NotTaken(413, f"the body: got over {self.intake.max_body_bytes} bytes, send less")
            self.intake.hold(self, chunk)
        self.require()

    def require(self) -> None:
        """Raises NotTaken when another has taken the room of this one."""
        if self.has_given_way:
            raise NotTaken(503, "too many bodies came at once, and this one first; send it again")


@dataclass(slots=True)
class Intake:
    """All bodies that are not yet answered to."""

    max_body_bytes: int
    max_held_bytes: int
    """In sum; at least one body, so that the youngest always has room."""
    held_bytes: int = 0
    _coming: dict[Coming, None] = field(default_factory=dict)

    @contextmanager
    def expect(self) -> Iterator[Coming]:
        """A body that counts while the block runs."""
        coming = Coming(self)
        self._coming[coming] = None
        try:
            yield coming
        finally:
            self._let_go(coming)

    def hold(self, coming: Coming, chunk: bytes) -> None:
        """Add to a body; the oldest let go until there is room: whoever is not slow is young."""
        coming.data += chunk
        self.held_bytes += len(chunk)
        while self.held_bytes > self.max_held_bytes:
            oldest = next(iter(self._coming))
            self._let_go(oldest)
            oldest.data.clear()
            oldest.has_given_way = True

    def _let_go(self, coming: Coming) -> None:
        if coming in self._coming:
            del self._coming[coming]
            self.held_bytes -= len(coming.data)
