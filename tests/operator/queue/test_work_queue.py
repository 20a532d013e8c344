"""The work queue in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_operator.errors import ClusterUnavailable
from kimi_operator.queue import FORGET, QueueSettings, WorkQueue
from virtual_time import run_virtual

EXACT = QueueSettings(workers=4, base_delay_s=1.0, max_delay_s=60.0, resync_s=300.0, jitter=0.0)


class Recorder:
    """A reconcile that notes when it ran and behaves as told: a number answers, an exception is raised."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.starts: dict[str, list[float]] = defaultdict(list)
        self.running: Counter[str] = Counter()
        self.most_at_once = 0
        self.answers: dict[str, list[float | Exception | None]] = defaultdict(list)

    async def __call__(self, key: str) -> float | None:
        self.starts[key].append(asyncio.get_running_loop().time())
        self.running[key] += 1
        assert self.running[key] == 1, "a key is served twice at a time"
        self.most_at_once = max(self.most_at_once, sum(self.running.values()))
        await asyncio.sleep(self.takes_s)
        self.running[key] -= 1
        answer = self.answers[key].pop(0) if self.answers[key] else None
        if isinstance(answer, Exception):
            raise answer
        return answer


async def serve(queue: WorkQueue[str], for_s: float, script: Callable[[], Awaitable[None]] | None = None) -> None:
    """Run the queue for a span of virtual time, with a script of marks beside it."""
    task = asyncio.create_task(queue.run())
    started = asyncio.get_running_loop().time()
    if script is not None:
        await script()
    await asyncio.sleep(max(0.0, started + for_s - asyncio.get_running_loop().time()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_marks_before_the_start_coalesce_into_one_run() -> None:
    async def main() -> None:
        seen = Recorder()
        queue = WorkQueue(seen, EXACT)
        for _ in range(10):
            queue.add("a")
        await serve(queue, for_s=1)
        assert seen.starts == {"a": [0.0]}

    run_virtual(main)


def test_a_mark_during_a_run_gives_exactly_one_more_run_after_it() -> None:
    async def main() -> None:
        seen = Recorder(takes_s=5.0)
        queue = WorkQueue(seen, EXACT)

        async def script() -> None:
            queue.add("a")
            for _ in range(3):
                await asyncio.sleep(1)
                queue.add("a")

        await serve(queue, for_s=100, script=script)
        assert seen.starts == {"a": [0.0, 5.0]}

    run_virtual(main)


def test_the_answer_asks_for_another_look_and_an_event_comes_first() -> None:
    async def main() -> None:
        seen = Recorder()
        seen.answers["a"] = [30.0, 30.0, 25.0]
        queue = WorkQueue(seen, EXACT)

        async def script() -> None:
            queue.add("a")
            await asyncio.sleep(10)
            queue.add("a")

        await serve(queue, for_s=50, script=script)
        # The look at 10 answers anew: the one that was due at 30 is no longer needed.
        assert seen.starts["a"] == [0.0, 10.0, 40.0]

    run_virtual(main)


def test_errors_back_off_exponentially_and_success_resets() -> None:
    async def main() -> None:
        seen = Recorder()
        seen.answers["a"] = [ValueError("x")] * 4 + [None, ValueError("x"), None]
        queue = WorkQueue(seen, EXACT)

        async def script() -> None:
            queue.add("a")
            await asyncio.sleep(20)
            queue.add("a")

        await serve(queue, for_s=40, script=script)
        assert seen.starts["a"] == [0.0, 1.0, 3.0, 7.0, 15.0, 20.0, 21.0]

    run_virtual(main)


def test_back_off_has_a_ceiling_and_honours_the_errors_own_wish() -> None:
    async def main() -> None:
        seen = Recorder()
        seen.answers["a"] = [ValueError("x")] * 40
        seen.answers["b"] = [ClusterUnavailable("API server is away", retry_after_s=17.0)]
        queue = WorkQueue(seen, EXACT)
        queue.add("a")
        queue.add("b")
        await serve(queue, for_s=1200)
        gaps = [later - earlier for earlier, later in zip(seen.starts["a"], seen.starts["a"][1:], strict=False)]
        assert max(gaps) == 60.0
        assert gaps[-1] == 60.0
        assert seen.starts["b"][1] == 17.0

    run_virtual(main)


def test_marks_wait_for_the_end_of_a_back_off_but_a_fresh_one_ends_it() -> None:
    async def main() -> None:
        seen = Recorder()
        seen.answers["a"] = [ClusterUnavailable("x", retry_after_s=10.0), None]
        seen.answers["b"] = [ClusterUnavailable("x", retry_after_s=10.0), None]
        queue = WorkQueue(seen, EXACT)

        async def script() -> None:
            queue.add("a")
            queue.add("b")
            await asyncio.sleep(2)
            queue.add("a")
            queue.add("b", fresh=True)

        await serve(queue, for_s=20, script=script)
        assert seen.starts["a"] == [0.0, 10.0]
        assert seen.starts["b"][:2] == [0.0, 2.0]

    run_virtual(main)


def test_resync_comes_with_jitter_and_ends_with_the_key() -> None:
    async def main() -> None:
        seen = Recorder()
        seen.answers["gone"] = [FORGET]
        jittered = QueueSettings(resync_s=100.0, jitter=0.2)
        queue = WorkQueue(seen, jittered, rng=random.Random(7))
        for key in ("a", "b", "gone"):
            queue.add(key)
        await serve(queue, for_s=1000)
        assert seen.starts["gone"] == [0.0]
        for key in ("a", "b"):
            gaps = [later - earlier for earlier, later in zip(seen.starts[key], seen.starts[key][1:], strict=False)]
            assert len(gaps) >= 8
            assert all(80 <= gap <= 120 for gap in gaps)
        assert seen.starts["a"] != seen.starts["b"]

    run_virtual(main)


def test_no_more_than_the_pool_run_at_once() -> None:
    async def main() -> None:
        seen = Recorder(takes_s=1.0)
        queue = WorkQueue(seen, QueueSettings(workers=3, jitter=0.0))
        for index in range(10):
            queue.add(str(index))
        await serve(queue, for_s=10)
        assert seen.most_at_once == 3
        assert sorted(start for starts in seen.starts.values() for start in starts) == [0.0] * 3 + [1.0] * 3 + [
            2.0
        ] * 3 + [3.0]

    run_virtual(main)


@settings(max_examples=150)
@given(
    marks=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5), st.floats(0, 20)), min_size=1, max_size=40),
    takes_s=st.floats(0, 3),
    workers=st.integers(1, 4),
    failures=st.integers(0, 3),
)
def test_every_mark_is_followed_by_a_run_and_no_key_overlaps(
    marks: list[tuple[str, float, float]], takes_s: float, workers: int, failures: int
) -> None:
    """Whatever the order of marks, delays and errors: a run follows each mark, and none starts earlier than asked."""

    async def main() -> None:
        seen = Recorder(takes_s=takes_s)
        for key in "abc":
            seen.answers[key] = [ValueError("x")] * failures
        queue = WorkQueue(
            seen, QueueSettings(workers=workers, base_delay_s=0.5, max_delay_s=4.0, resync_s=10_000, jitter=0.0)
        )
        marked: list[tuple[str, float]] = []

        async def script() -> None:
            for key, pause_s, delay_s in marks:
                await asyncio.sleep(pause_s)
                marked.append((key, asyncio.get_running_loop().time()))
                queue.add(key, delay_s)

        await serve(queue, for_s=2000, script=script)
        for key, at in marked:
            assert any(start >= at - 1e-5 for start in seen.starts[key])
        for key, starts in seen.starts.items():
            earliest = min(at + delay for (name, at), (_, _, delay) in zip(marked, marks, strict=True) if name == key)
            assert starts[0] >= earliest - 1e-5
            assert all(later - earlier >= takes_s - 1e-5 for earlier, later in itertools.pairwise(starts))

    run_virtual(main)
