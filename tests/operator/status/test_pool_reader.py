"""Real pools, read over HTTP from a worker's /state: once a pod, smallest lane, whole groups only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kimi_operator import measure
from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import GroupState
from kimi_operator.decide.groups import GroupDecision, Stamp
from kimi_operator.observe import GroupSeen, PodSeen
from kimi_operator.render.names import GroupKey

KEY = GroupKey(Role.DECODE, 0)
READY = {KEY: GroupDecision(KEY, GroupState.READY, Reason.GROUPS_READY, "", Stamp(), 2)}


class Worker:
    """Answers /state; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.status = 200
        self.body: dict[str, Any] = {
            "deployment": "k3",
            "lanes": [
                {"lane": 0, "num_pages": 500, "num_slots": 10, "max_num_seqs": 8},
                {"lane": 1, "num_pages": 480, "num_slots": 10, "max_num_seqs": 8},
            ],
            "memory": {"weights_bytes": 1234},
        }

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response(self.body, status=self.status)


@pytest.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    served = Worker()
    app = web.Application()
    app.router.add_get("/state", served.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setattr(measure, "API_PORT", runner.addresses[0][1])
    yield served
    await runner.cleanup()


def group(*ips: str | None) -> dict[GroupKey, GroupSeen]:
    base = PodSeen("p", "uid", 1, "v1-a", 0.0, ready=True)
    pods = tuple(replace(base, name=f"p{i}", uid=f"uid-{i}", ip=ip) for i, ip in enumerate(ips))
    return {KEY: GroupSeen(KEY, "set", "owner", 1, "v1-a", len(pods), pods=pods)}


async def test_the_smallest_lane_counts_and_a_pod_is_asked_once(worker: Worker) -> None:
    async with aiohttp.ClientSession() as session:
        reader = measure.PoolReader(session)
        for _ in range(3):
            pools = (await reader.read(group("127.0.0.1", "127.0.0.1"), READY))[KEY]
        assert (pools.num_pages, pools.num_state_slots, pools.max_num_seqs, pools.weights_bytes) == (480, 10, 8, 1234)
        assert worker.asked == 2
        reader.forget_except(["uid-0"])
        await reader.read(group("127.0.0.1", "127.0.0.1"), READY)
        assert worker.asked == 3


@pytest.mark.parametrize("fault", ["status", "body", "no address", "nobody there"])
async def test_a_pod_that_does_not_answer_leaves_its_group_out_until_it_does(worker: Worker, fault: str) -> None:
    good = dict(worker.body)
    ips: list[str | None] = ["127.0.0.1", "127.0.0.1"]
    match fault:
        case "status":
            worker.status = 503
        case "body":
            worker.body = {"lanes": [{"lane": 0}]}
        case "no address":
            ips[1] = None
        case _:
            ips[1] = "127.0.0.2"
    async with aiohttp.ClientSession() as session:
        reader = measure.PoolReader(session)
        # On this machine 127.0.0.2 answers only when somebody listens on all addresses, which the worker does not.
        assert await reader.read(group(*ips), READY) == {}
        worker.status, worker.body = 200, good
        assert KEY in await reader.read(group("127.0.0.1", "127.0.0.1"), READY)


async def test_groups_that_are_not_ready_are_not_asked(worker: Worker) -> None:
    starting = {KEY: replace(READY[KEY], state=GroupState.STARTING)}
    async with aiohttp.ClientSession() as session:
        assert await measure.PoolReader(session).read(group("127.0.0.1"), starting) == {}
    assert worker.asked == 0
