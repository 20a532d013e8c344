"""A HardwareProfile changes: everything that runs on it is planned anew, and only what then differs is rolled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from api_server import Key
from kimi_operator.store import ResourceKey
from stage import K3, Stage, example, node

OTHER = ResourceKey("ns", "other")
ROLLED = ("StatefulSet", "ConfigMap", "Deployment", "Pod", "Service")


def change_profile(stage: Stage, path: str, value: object, name: str = "local-cpu") -> None:
    spec = copy.deepcopy(stage.server.get("HardwareProfile", name)["spec"])
    *parents, last = path.split(".")
    place = spec
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    stage.server.edit("HardwareProfile", name, spec=spec)


def plan(stage: Stage, key: ResourceKey = K3) -> dict[str, Any]:
    found: dict[str, Any] = stage.server.get("KimiDeployment", key.name)["status"]["plan"]
    return found


async def look(stage: Stage) -> list[Key]:
    """As after events: what is marked is reconciled, three times over. What was written."""
    stage.server.writes.clear()
    for _ in range(3):
        await stage.operator.list_all()
        stage.reconciler.clock = lambda: stage.server.now_s
        for key in sorted(stage.operator.inbox.queue._due):
            await stage.reconciler(key)
        stage.server.end_deleted_pods()
        stage.server.make_pods()
        stage.server.start_pods()
    return [key for _, key in stage.server.writes]


def rolled(written: list[Key]) -> set[str]:
    """Names of the pods' owners, and of pods, that were written to."""
    return {key.name for key in written if key.kind in ROLLED}


@pytest.fixture
async def pair(stage: Stage) -> Stage:
    """k3 on local-cpu, whose decode leaves maxNumSeqs to the profile, and another on a profile of its own."""
    decode = dict(example("2p2d.yaml")["spec"]["decode"])
    del decode["maxNumSeqs"]
    stage.change_spec(decode=decode)
    profile, document = example("profile.yaml"), copy.deepcopy(stage.server.get("KimiDeployment", "k3"))
    profile["metadata"]["name"] = "of-another"
    stage.server.put(profile)
    document["metadata"] = {"name": "other", "namespace": "ns"}
    document["spec"]["hardware"]["profile"] = "of-another"
    stage.server.put(document)
    for index in range(4, 8):
        stage.server.put(node(f"node{index}"))
    for _ in range(5):
        await look(stage)
        stage.server.start_router()
    assert await look(stage) == []
    assert {key.name for key in stage.server.objects if key.kind == "StatefulSet"} == {
        f"{name}-{role}-0" for name in ("k3", "other") for role in ("prefill", "decode")
    }
    return stage


async def test_a_figure_that_changes_no_setting_rolls_nothing(pair: Stage) -> None:
    before, other = plan(pair), plan(pair, OTHER)
    change_profile(pair, "gpu.hbmBytesPerSecond", 5_300_000_000_000)
    written = await look(pair)
    assert set(written) == {pair.deployment_key()}, "the status alone, once"
    after = plan(pair)
    assert after["profileVersion"] != before["profileVersion"]
    assert after | {"profileVersion": ""} == before | {"profileVersion": ""}
    assert plan(pair, OTHER) == other


async def test_max_num_seqs_of_decode_rolls_decode_alone(pair: Stage) -> None:
    before = plan(pair)
    change_profile(pair, "limits.maxNumSeqs", 12)
    written = await look(pair)
    names = rolled(written)
    assert {"k3-decode-0", "k3-decode-0-0", "k3-decode-0-1"} <= names
    assert all(name.startswith("k3-decode-") for name in names), names
    assert (pair.generation("k3-decode-0"), pair.generation("k3-prefill-0")) == (2, 1)
    after = plan(pair)
    assert (before["decode"]["maxNumSeqs"], after["decode"]["maxNumSeqs"]) == (15, 12)
    assert after["prefill"] == before["prefill"]
    assert after["decode"]["numPages"] > before["decode"]["numPages"]
    assert pair.notes("k3-decode-0") == ("0", "0"), "a change is no failure"


async def test_memory_rolls_both_roles_of_those_who_use_the_profile(pair: Stage) -> None:
    other = copy.deepcopy(pair.server.get("KimiDeployment", "other"))
    change_profile(pair, "gpu.memory", "96Mi")
    names = rolled(await look(pair))
    assert {"k3-decode-0", "k3-prefill-0"} <= names
    assert not [name for name in names if name.startswith(("other-", "k3-router"))]
    for role in ("prefill", "decode"):
        assert sum(line["bytes"] for line in plan(pair)[role]["lines"]) == 96 * 2**20
    assert pair.server.get("KimiDeployment", "other") == other


async def test_where_no_group_fits_any_more_all_goes_on_as_it_was_planned(pair: Stage) -> None:
    before = plan(pair)
    change_profile(pair, "gpu.memory", "40Mi")
    assert rolled(await look(pair)) == set()
    assert pair.condition("PlanResolved") == ("False", "DoesNotFit")
    assert "expected at most 40.0 MiB, the memory of a GPU: the line" in pair.message("PlanResolved")
    assert "are missing in all; " in pair.message("PlanResolved")
    assert pair.condition("Available")[0] == "True"
    assert plan(pair) == before
    change_profile(pair, "gpu.memory", "64Mi")
    assert rolled(await look(pair)) == set()
    assert pair.condition("PlanResolved")[0] == "True"


async def test_while_a_rollout_is_paused_the_plan_is_told_and_nothing_rolls(pair: Stage) -> None:
    pair.change_spec(rollout={"paused": True})
    await look(pair)
    change_profile(pair, "limits.maxNumSeqs", 12)
    assert not [key for key in await look(pair) if key.kind in ("StatefulSet", "Pod")]
    assert plan(pair)["decode"]["maxNumSeqs"] == 12
    assert pair.condition("DecodeReady") == ("False", "Paused")
