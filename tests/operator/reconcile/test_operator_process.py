"""The operator's process: lists beside the watches, and an end in time whatever hangs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from api_server import Key
from kimi_operator import __main__ as process
from kimi_operator.store import ObjectKey
from stage import K3, Stage

DEADLINE_S = 30.0


async def leaves(stage: Stage, key: ObjectKey) -> None:
    """The operator no longer knows the object."""
    while stage.operator.inbox.store.get(key) is not None:  # noqa: ASYNC110  # it has no event to offer
        await asyncio.sleep(0.01)


async def test_soon_after_the_start_everything_is_listed_once_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went between the first list and that of the watches is found out, and its owner is woken."""
    await stage.settle()
    await stage.operator.list_all()
    inbox, name = stage.operator.inbox, "k3-decode-0-0"
    stage.server.drop(Key("Pod", "ns", name))
    monkeypatch.setattr(process, "SETTLE_S", 0.01)
    task = asyncio.create_task(stage.operator._relist_forever())
    async with asyncio.timeout(DEADLINE_S):
        await leaves(stage, ObjectKey("Pod", "ns", name))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert K3 in inbox.queue._due


async def test_what_went_while_a_watch_was_broken_is_found_soon_after(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that begins anew lists what is there: events without a type, and none for what went."""
    await stage.settle()
    inbox, name = stage.operator.inbox, "k3-decode-0-0"
    stage.server.drop(Key("Pod", "ns", name))
    monkeypatch.setattr(process, "SETTLE_S", 0.01)
    task = asyncio.create_task(stage.operator._relist_forever())
    async with asyncio.timeout(DEADLINE_S):
        await leaves(stage, ObjectKey("Pod", "ns", name))
        stage.server.drop(stage.deployment_key())
        inbox.take("MODIFIED", stage.server.get("Node", "node0"))
        assert not inbox.watch_began.is_set()
        inbox.take(None, stage.server.get("Node", "node0"))
        await leaves(stage, ObjectKey("KimiDeployment", *K3))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert K3 in inbox.queue._due


async def test_the_first_part_that_ends_ends_the_others() -> None:
    ended: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waiting")

    async def end() -> None:
        return None

    assert await process.first_to_end(wait_for_ever(), end()) == 1
    assert ended == ["waiting"]


async def test_the_error_of_a_part_is_raised_though_another_will_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LEAVE_S", 0.05)
    release = asyncio.Event()

    async def cling() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("watch broke")

    with pytest.raises(RuntimeError, match="watch broke"):
        await process.first_to_end(cling(), fail())
    release.set()
    await asyncio.sleep(0)
