"""Bodies on their way: in random walks, what is held never passes its bound, and the youngest always has room."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest
from kimi_operator.intake import Coming, Intake, NotTaken


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def is_counted(intake: Intake) -> bool:
    return intake.held_bytes == sum(len(one.data) for one in intake._coming)


@pytest.mark.parametrize("seed", range(20))
async def test_a_random_walk_holds_no_more_than_its_bound_and_loses_no_byte(seed: int) -> None:
    draw = random.Random(seed)
    intake = Intake(max_body_bytes=100, max_held_bytes=draw.choice((100, 150, 400)))
    statuses = set()
    open_ones: list[tuple[ExitStack, Coming]] = []
    for _ in range(400):
        if draw.random() < 0.3 or not open_ones:
            stack = ExitStack()
            open_ones.append((stack, stack.enter_context(intake.expect())))
        stack, coming = draw.choice(open_ones)
        before = bytes(coming.data)
        try:
            await coming.read(chunks(b"x" * draw.randint(0, 60)))
            assert coming.data.startswith(before)
        except NotTaken as why:
            statuses.add((why.status, coming.has_given_way))
            stack.close()
            open_ones.remove((stack, coming))
        assert intake.held_bytes <= intake.max_held_bytes
        assert is_counted(intake)
    for stack, _ in open_ones:
        stack.close()
    assert statuses == {(503, True), (413, False)}
    assert (intake.held_bytes, intake._coming) == (0, {})


async def test_the_oldest_gives_way_and_is_told() -> None:
    intake = Intake(max_body_bytes=100, max_held_bytes=150)
    with intake.expect() as slow, intake.expect() as other, intake.expect() as last:
        await slow.read(chunks(b"1"))
        await other.read(chunks(b"2" * 100))
        await last.read(chunks(b"3" * 49))
        assert not slow.has_given_way
        await last.read(chunks(b"3"))
        assert (slow.has_given_way, other.has_given_way, len(last.data)) == (True, False, 50)
        with pytest.raises(NotTaken, match="too many bodies came at once") as refused:
            await slow.read(chunks(b"1"))
        assert (refused.value.status, bytes(slow.data), intake.held_bytes) == (503, b"", 150)


async def test_a_body_over_its_bound_is_refused_before_it_is_held() -> None:
    intake = Intake(max_body_bytes=10, max_held_bytes=10)
    with intake.expect() as coming, pytest.raises(NotTaken, match="over 10 bytes") as refused:
        await coming.read(chunks(b"x" * 10, b"x"))
    assert (refused.value.status, intake.held_bytes) == (413, 0)
