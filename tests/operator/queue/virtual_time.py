"""An event loop in virtual time: hours pass in milliseconds, and every wait is exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import structlog


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Instead of waiting for a timer it moves the loop's clock to it."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("deadlock: nothing is due and nothing will be")
        if not events and timeout:
            self._loop.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time moves only when everything waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_s


def run_virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine on a virtual loop."""
    with structlog.testing.capture_logs(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
