"""A keyed work queue: one serial `reconcile` a key; coalescing, back-off after errors, jittered resync."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import structlog

Key = TypeVar("Key", bound=Hashable)
log = structlog.get_logger()

# The loop may fire a timer a hair early; without slack the queue would spin until the clock has caught up.
_TIMER_SLACK_S = 1e-6

FORGET = math.inf
"""Answer of a reconcile whose key no longer exists: no resync; only a new mark brings it back."""


class QueueHooks(Protocol):
    """What a queue tells whoever measures it. Times in seconds."""

    def depth(self, keys: int) -> None:
        """Keys that are due or will be."""

    def started(self, waited_s: float) -> None:
        """A key is handed out, this long after it was due."""

    def finished(self, took_s: float, *, failed: bool) -> None:
        """A reconcile ended."""


class NoHooks:
    """Measures nothing."""

    def depth(self, keys: int) -> None:
        """Ignore."""

    def started(self, waited_s: float) -> None:
        """Ignore."""

    def finished(self, took_s: float, *, failed: bool) -> None:
        """Ignore."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Times in seconds."""

    workers: int = 8
    """Keys served at the same time."""
    base_delay_s: float = 0.5
    """Wait after the first error of a key; doubles with each further one."""
    max_delay_s: float = 60.0
    resync_s: float = 300.0
    """Every key is looked at about this often, event or not."""
    jitter: float = 0.2
    """Delays are spread by this fraction to either side, so that keys do not move in step."""


@dataclass(slots=True)
class WorkQueue(Generic[Key]):
    """Serves each dirty key by `reconcile(key)`, never twice at a time.

    Its answer asks for another look after so many seconds; None leaves it to the resync, FORGET ends it.
    An exception is logged and the key comes again after a back-off. Marks that arrive during a back-off wait for its
    end: an error that causes events must not spin.
    """

    reconcile: Callable[[Key], Awaitable[float | None]]
    settings: QueueSettings = field(default_factory=QueueSettings)
    hooks: QueueHooks = field(default_factory=NoHooks)
    rng: random.Random = field(default_factory=random.Random)
    _due: dict[Key, float] = field(default_factory=dict, init=False)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list, init=False)
    _running: set[Key] = field(default_factory=set, init=False)
    _failures: Counter[Key] = field(default_factory=Counter, init=False)
    _not_before: dict[Key, float] = field(default_factory=dict, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _pushed: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: Key, delay_s: float = 0.0, *, fresh: bool = False) -> None:
        """Mark a key dirty, to be served after `delay_s`; an earlier mark stands.

        `fresh` ends a back-off: what failed has changed.
        """
        if fresh:
            self._failures.pop(key, None)
            self._not_before.pop(key, None)
        due = max(self._now() + delay_s, self._not_before.get(key, 0.0))
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        self._push(key)
        self.hooks.depth(len(self._due))

    async def run(self) -> None:
        """Serve until cancelled."""
        free = asyncio.Semaphore(self.settings.workers)
        async with asyncio.TaskGroup() as group:
            while True:
                await free.acquire()
                key = await self._next()
                group.create_task(self._serve(key, free))

    async def _next(self) -> Key:
        while True:
            self._wake.clear()
            now = self._now()
            while self._heap and self._heap[0][0] <= now + _TIMER_SLACK_S:
                due, _, key = heapq.heappop(self._heap)
                # Entries stay in the heap until due: one that was overtaken, or whose key is running, is skipped here.
                if self._due.get(key) != due or key in self._running:
                    continue
                del self._due[key]
                self._running.add(key)
                self.hooks.started(max(0.0, now - due))
                self.hooks.depth(len(self._due))
                return key
            wait_s = self._heap[0][0] - now if self._heap else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _serve(self, key: Key, free: asyncio.Semaphore) -> None:
        started = self._now()
        failed = False
        try:
            look_again_s = await self.reconcile(key)
            self._failures.pop(key, None)
            self._not_before.pop(key, None)
        except Exception as error:  # noqa: BLE001 - the edge: whatever went wrong with one key must not end the others
            failed = True
            look_again_s = self._back_off(key, error)
        finally:
            self._running.discard(key)
            self.hooks.finished(self._now() - started, failed=failed)
            free.release()
        if key in self._due:  # marked while it ran
            self._push(key)
        resync_s = self._spread(self.settings.resync_s)
        look_again_s = resync_s if look_again_s is None else look_again_s
        if failed or look_again_s != FORGET:
            self.add(key, min(look_again_s, resync_s))

    def _back_off(self, key: Key, error: Exception) -> float:
        self._failures[key] += 1
        doublings = min(self._failures[key] - 1, 30)
        delay_s = self._spread(min(self.settings.max_delay_s, self.settings.base_delay_s * 2**doublings))
        delay_s = max(delay_s, getattr(error, "retry_after_s", 0.0))
        self._not_before[key] = self._now() + delay_s
        if key in self._due:
            self._due[key] = max(self._due[key], self._not_before[key])
        log.warning(
            "reconcile_failed",
            key=str(key),
            error=str(error),
            kind=type(error).__name__,
            failures=self._failures[key],
            retry_in_s=round(delay_s, 2),
            exc_info=not hasattr(error, "retry_after_s"),
        )
        return delay_s

    def _spread(self, delay_s: float) -> float:
        return delay_s * self.rng.uniform(1 - self.settings.jitter, 1 + self.settings.jitter)

    def _push(self, key: Key) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self._due[key], self._pushed, key))
        self._wake.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
