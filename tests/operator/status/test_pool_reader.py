"""Real pools, read over HTTP from a worker's /state: once a pod, smallest lane, whole groups only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kimi_operator import measure
from kimi_operator.api.base import dump
from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import GroupState, MeasuredFabric
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
            "role": "decode",
            "group": "0",
            "generation": 1,
            "lanes": [
                {"lane": 0, "num_pages": 500, "num_slots": 10, "max_num_seqs": 8},
                {"lane": 1, "num_pages": 480, "num_slots": 10, "max_num_seqs": 8},
            ],
            "memory": {"weights_bytes": 4 * 1234, "free_bytes": 4 * 500},
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
    monkeypatch.setattr(measure, "TIMEOUT_S", 60.0)  # no test is about it, and a busy machine must answer in it
    yield served
    await runner.cleanup()


def group(*ips: str | None, key: GroupKey = KEY, uid: str = "uid") -> dict[GroupKey, GroupSeen]:
    base = PodSeen("p", "uid", 1, "v1-a", 0.0, ready=True)
    name = f"k3-{key.role}-{key.group}"
    pods = tuple(replace(base, name=f"{name}-{i}", uid=f"{uid}-{i}", ip=ip) for i, ip in enumerate(ips))
    return {key: GroupSeen(key, "set", "owner", 1, "v1-a", len(pods), pods=pods)}


async def test_the_smallest_lane_counts_and_a_pod_is_asked_once(worker: Worker) -> None:
    async with aiohttp.ClientSession() as session:
        reader = measure.PoolReader(session)
        for _ in range(3):
            pools = (await reader.read(group("127.0.0.1", "127.0.0.1"), READY, 2))[KEY]
        assert (pools.num_pages, pools.num_state_slots, pools.max_num_seqs, pools.weights_bytes) == (480, 10, 8, 1234)
        assert pools.free_bytes == 500, "of one of four GPUs"
        assert worker.asked == 2
        reader.forget_except(["uid-0"])
        await reader.read(group("127.0.0.1", "127.0.0.1"), READY, 2)
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
        assert await reader.read(group(*ips), READY, 2) == {}
        worker.status, worker.body = 200, good
        assert KEY in await reader.read(group("127.0.0.1", "127.0.0.1"), READY, 2)


async def test_a_device_that_cannot_tell_its_free_memory_is_not_full(worker: Worker) -> None:
    async with aiohttp.ClientSession() as session:
        worker.body["memory"] = {"weights_bytes": 8, "free_bytes": 0}
        assert (await measure.PoolReader(session).read(group("127.0.0.1"), READY, 2))[KEY].free_bytes is None
        worker.body["memory"] = {"weights_bytes": -8}
        assert await measure.PoolReader(session).read(group("127.0.0.1"), READY, 2) == {}


@pytest.mark.parametrize("first", [0, 1])
async def test_the_fullest_pod_counts(worker: Worker, first: int) -> None:
    said = [{"weights_bytes": 4 * 100, "free_bytes": 4 * 500}, {"weights_bytes": 4 * 200, "free_bytes": 4 * 300}]
    async with aiohttp.ClientSession() as session:
        reader = measure.PoolReader(session)
        worker.body["memory"] = said[first]
        await reader.read(group("127.0.0.1"), READY, 2)
        worker.body["memory"] = said[1 - first]
        pools = (await reader.read(group("127.0.0.1", "127.0.0.1"), READY, 2))[KEY]
    assert (pools.weights_bytes, pools.free_bytes) == (200, 300)


async def test_groups_that_are_not_ready_are_not_asked(worker: Worker) -> None:
    starting = {KEY: replace(READY[KEY], state=GroupState.STARTING)}
    async with aiohttp.ClientSession() as session:
        assert await measure.PoolReader(session).read(group("127.0.0.1"), starting, 2) == {}
    assert worker.asked == 0


STRANGERS = {"deployment": "other", "role": "prefill", "group": "1", "generation": 2}


@pytest.mark.parametrize("field", STRANGERS)
async def test_what_another_pod_answers_does_not_count(worker: Worker, field: str) -> None:
    """On the node's network another deployment's pod may hold the port, or the previous start's."""
    worker.body[field] = STRANGERS[field]
    async with aiohttp.ClientSession() as session:
        reader = measure.PoolReader(session)
        assert await reader.read(group("127.0.0.1"), READY, 2) == {}
        assert reader.has_open_questions(group("127.0.0.1"), READY)


async def test_the_fabric_is_asked_about_until_it_is_verified(worker: Worker) -> None:
    async with aiohttp.ClientSession() as session:
        reader = measure.PoolReader(session)

        async def ask(fabric: dict[str, Any] | None) -> MeasuredFabric | None:
            worker.body["fabric"] = fabric
            return (await reader.read(group("127.0.0.1", "127.0.0.1"), READY, 2))[KEY].fabric

        assert await ask({"peers": 4, "verified": 1, "error": ""}) == MeasuredFabric(peers=8, verified=2)
        broken = await ask({"peers": 4, "verified": 3, "error": "lane 2 of 10.0.0.1: nothing arrived"})
        assert broken is not None
        assert broken.error == "k3-decode-0-0: lane 2 of 10.0.0.1: nothing arrived"
        assert await ask({"peers": 4, "verified": 4, "error": None}) == MeasuredFabric(peers=8, verified=8)
        assert not reader.has_open_questions(group("127.0.0.1", "127.0.0.1"), READY)
        await ask({"peers": 0, "verified": 0, "error": ""})
        assert worker.asked == 6, "a verified fabric is not asked about again"


async def test_other_prefill_pods_open_the_question_of_the_fabric_again(worker: Worker) -> None:
    worker.body["fabric"] = {"peers": 1, "verified": 1, "error": ""}
    prefill = GroupKey(Role.PREFILL, 0)
    ready = READY | {prefill: replace(READY[KEY], key=prefill)}
    async with aiohttp.ClientSession() as session:
        reader = measure.PoolReader(session)
        first = group("127.0.0.1") | group("127.0.0.1", key=prefill, uid="first")
        await reader.read(first, ready, 2)
        assert worker.asked == 2
        await reader.read(first, ready, 2)
        # The prefill pod, whose address this worker has too, is refused: it answers for decode.
        assert worker.asked == 3
        await reader.read(group("127.0.0.1") | group("127.0.0.1", key=prefill, uid="second"), ready, 2)
        assert worker.asked == 5


async def test_a_worker_without_test_writes_is_no_fault(worker: Worker) -> None:
    async with aiohttp.ClientSession() as session:
        reader = measure.PoolReader(session)
        assert (await reader.read(group("127.0.0.1"), READY, 2))[KEY].fabric is None
        assert not reader.has_open_questions(group("127.0.0.1"), READY)


async def test_a_prefill_group_has_no_fabric_to_verify(worker: Worker) -> None:
    """Its pods count no peers: shown, 0 of 0 would be taken for a fault."""
    worker.body |= {"role": "prefill", "fabric": {"peers": 0, "verified": 0, "error": ""}}
    prefill = GroupKey(Role.PREFILL, 0)
    ready = {prefill: replace(READY[KEY], key=prefill)}
    async with aiohttp.ClientSession() as session:
        measured = (await measure.PoolReader(session).read(group("127.0.0.1", key=prefill), ready, 2))[prefill]
    assert (measured.num_pages, measured.fabric) == (480, None)
    assert "fabric" not in dump(measured)
