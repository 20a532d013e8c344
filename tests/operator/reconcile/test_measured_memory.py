"""What workers report over HTTP is held against the plan, and told with both numbers where it differs by over 2 %."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from kimi_operator import measure
from stage import Stage

ADDRESSES = {"prefill": "127.0.0.2", "decode": "127.0.0.3"}
MIB = 2**20
MEMORY = 64 * MIB
NUM_GPUS, NUM_LANES = 2, 1
"""Of a pod."""


@dataclass
class Workers:
    """/state of both roles, as planned until told otherwise; figures of a GPU, added up over those of a pod."""

    stage: Stage
    changes: dict[str, dict[str, int]] = field(default_factory=dict)

    def say(self, role: str, **figures: int) -> None:
        """From now on; the operator that asks is a new one, since one asks each pod once."""
        self.changes[role] = figures
        self.stage.restart_operator()

    def plan(self, role: str) -> dict[str, Any]:
        found: dict[str, Any] = self.stage.status()["plan"][role]
        return found

    async def answer(self, role: str, _: web.Request) -> web.Response:
        plan = self.plan(role)
        figures = {
            "num_pages": plan["numPages"], "num_slots": plan["numStateSlots"], "max_num_seqs": plan["maxNumSeqs"],
            "weights_bytes": plan["weightsBytes"], "free_bytes": plan["freeBytes"],
        } | self.changes.get(role, {})  # fmt: skip
        memory = {name: NUM_GPUS * figures.pop(name) for name in ("weights_bytes", "free_bytes")}
        generation = self.stage.generation(f"k3-{role}-0")
        lanes = [figures | {"lane": lane} for lane in range(NUM_LANES)]
        return web.json_response(
            {"deployment": "k3", "role": role, "group": "0", "generation": generation, "lanes": lanes, "memory": memory}
        )


@pytest.fixture
async def workers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workers]:
    """Groups that are ready, each role at an address of its own."""
    await stage.settle()
    served, runners, port = Workers(stage), [], 0
    for role, address in ADDRESSES.items():
        app = web.Application()

        async def answer(request: web.Request, role: str = role) -> web.Response:
            return await served.answer(role, request)

        app.router.add_get("/state", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, address, port).start()
        port = runner.addresses[0][1]
        runners.append(runner)
    monkeypatch.setattr(measure, "API_PORT", port)
    for pod in stage.server.of("Pod"):
        role = pod["metadata"]["labels"].get("kimi-operator.io/role", "")
        if role in ADDRESSES:
            stage.server.put({**copy.deepcopy(pod), "status": {**pod["status"], "podIP": ADDRESSES[role]}})
    yield served
    for runner in runners:
        await runner.cleanup()


async def test_what_is_as_planned_is_said_to_fit(stage: Stage, workers: Workers) -> None:
    await stage.look()
    status, reason = stage.condition("PlanResolved")
    assert (status, reason) == ("True", "PlanFits")
    assert stage.message("PlanResolved") == workers.plan("decode")["binds"]
    measured = stage.group("decode")["measured"]
    assert measured["weightsBytes"] == workers.plan("decode")["weightsBytes"]
    assert measured["freeBytes"] == workers.plan("decode")["freeBytes"]
    stage.server.writes.clear()
    stage.restart_operator()
    await stage.look(2)
    assert stage.server.writes == []


FREE = {"a little less": -0.019, "a little more": 0.019, "less": -0.021, "more": 0.021}


@pytest.mark.parametrize("share", FREE.values(), ids=FREE.keys())
async def test_free_memory_may_differ_by_two_percent_of_the_gpu(stage: Stage, workers: Workers, share: float) -> None:
    planned = workers.plan("decode")["freeBytes"]
    assert planned > 0.021 * MEMORY
    workers.say("decode", free_bytes=planned + int(share * MEMORY))
    await stage.look()
    if abs(share) < 0.02:
        assert stage.condition("PlanResolved") == ("True", "PlanFits")
        assert stage.events("MemoryDiffers") == []
        return
    assert stage.condition("PlanResolved") == ("True", "MemoryDiffers")
    told = stage.message("PlanResolved")
    have, wanted = f"{(planned + share * MEMORY) / MIB:.1f} MiB", f"{planned / MIB:.1f} MiB"
    assert told == f"decode group 0: {have} free on a GPU, planned {wanted} ({share:+.1%} of its 64.0 MiB)"
    assert stage.events("MemoryDiffers") == [told]
    assert stage.condition("Ready") == ("True", "AsDesired")
    assert stage.condition("Degraded") == (("True", "MemoryDiffers") if share < 0 else ("False", "AsDesired"))


@pytest.mark.parametrize(("share", "is_told"), [(0.981, False), (1.019, False), (0.979, True), (1.021, True)])
async def test_weights_may_differ_by_two_percent(stage: Stage, workers: Workers, share: float, is_told: bool) -> None:
    workers.say("prefill", weights_bytes=round(share * workers.plan("prefill")["weightsBytes"]))
    await stage.look()
    assert stage.condition("PlanResolved")[1] == ("MemoryDiffers" if is_told else "PlanFits")
    assert ("prefill group 0" in stage.message("PlanResolved")) == is_told


@pytest.mark.parametrize(("missing", "is_told"), [(0.019, False), (0.03, True)])
async def test_pools_may_differ_by_two_percent(stage: Stage, workers: Workers, missing: float, is_told: bool) -> None:
    planned = workers.plan("decode")["numPages"]
    workers.say("decode", num_pages=planned - int(missing * planned))
    await stage.look()
    assert stage.condition("PlanResolved")[1] == ("PoolsDiffer" if is_told else "PlanFits")
    assert stage.condition("Degraded")[0] == str(is_told)


async def test_a_device_that_cannot_tell_is_held_against_nothing(stage: Stage, workers: Workers) -> None:
    workers.say("decode", free_bytes=0)
    await stage.look()
    assert stage.condition("PlanResolved") == ("True", "PlanFits")
    assert "freeBytes" not in stage.group("decode")["measured"]


async def test_memory_that_is_as_planned_again_is_said_to_fit(stage: Stage, workers: Workers) -> None:
    workers.say("decode", free_bytes=1)
    await stage.look()
    assert stage.condition("PlanResolved")[1] == stage.condition("Degraded")[1] == "MemoryDiffers"
    workers.say("decode")
    await stage.look()
    assert stage.condition("PlanResolved")[1] == "PlanFits"
    assert stage.condition("Degraded") == ("False", "AsDesired")


@pytest.mark.parametrize("role", ADDRESSES)
async def test_the_plan_in_the_status_is_what_the_pods_are_told(stage: Stage, workers: Workers, role: str) -> None:
    plan = workers.plan(role)
    (mounted,) = [
        one["configMap"]["name"]
        for one in stage.server.get("StatefulSet", f"k3-{role}-0")["spec"]["template"]["spec"]["volumes"]
        if "configMap" in one
    ]
    settings = json.loads(stage.server.get("ConfigMap", mounted)["data"]["worker.json"])
    limits = settings["limits"]
    assert limits["num_pages"] == plan["numPages"]
    assert limits["num_state_slots"] == plan["numStateSlots"]
    assert limits["max_num_seqs"] == plan["maxNumSeqs"]
    assert limits["max_num_batched_tokens"] == plan["maxNumBatchedTokens"]
    assert limits["page_size_tokens"] == plan["pageSizeTokens"]
    assert settings["model"]["max_model_len"] == plan["maxModelLen"]
    whole = stage.status()["plan"]
    assert (whole["profile"], len(whole["profileVersion"]), whole["gpuMemoryBytes"]) == ("local-cpu", 8, MEMORY)
    assert sum(line["bytes"] for line in plan["lines"]) == MEMORY
    assert plan["binds"]
