"""Numbers of things and what binds, as a sentence has them: one thing in the singular, several in the plural."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from kimi_operator.api import KimiDeploymentSpec, parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner import Architecture
from kimi_operator.planner.case import Limit, Stretch
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.search import Layout, search
from kimi_operator.planner.space import worker_search
from kimi_operator.planner.units import binding, counted
from kimi_operator.planner.workload import empirical, fixed, log_normal, read_workload, uniform
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import forecast_of, plan_on
from msgspec.structs import replace

NOUNS = "GPU|agent|answer|group|heading|lane|layout|length|node|page|prompt|rank|request|shape|slot|token|turn"
ONE_OF_SEVERAL = re.compile(rf"(?<![0-9.,/])1 (prompt |observed |KV |state )?({NOUNS})s\b")
SEVERAL_OF_ONE = re.compile(rf"(?<![0-9.,/])([02-9]|[0-9,]*[0-9]{{2,}}) ({NOUNS})\b(?! of)")
SINGULAR = {
    Limit.TPOT: "target TPOT binds",
    Limit.TTFT: "target TTFT binds",
    Limit.WORKLOAD: "workload binds",
    Limit.MEMORY: "memory binds",
    Limit.SETTING: "stated pool binds",
    Limit.MODEL: "model binds",
}
PLURAL = {
    Limit.LANES: "lanes bind",
    Limit.GRAPHS: "graph captures bind",
    Limit.SLOTS: "slots bind",
    Limit.PAGES: "pages bind",
}
OF_THE_CURVE = {"concurrency": "binds", "prefill": "binds", "maxNumSeqs": "binds", "KV pages": "bind"}


def test_each_limit_binds_in_its_number() -> None:
    assert {limit: binding(limit) for limit in Limit} == {**SINGULAR, **PLURAL}
    assert {name: binding(name).removeprefix(f"{name} ") for name in OF_THE_CURVE} == OF_THE_CURVE


@pytest.mark.parametrize(("number", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1001, "1,001 tokens")])
def test_a_number_of_things(number: int, text: str) -> None:
    assert counted(number, "token") == text


@pytest.mark.parametrize("limit", Limit)
@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 2), (5, 5), (7, 8)])
def test_a_stretch_of_contexts(limit: Limit, first: int, last: int) -> None:
    text = str(Stretch(first, last, limit, 1, 1))
    assert text.startswith(f"{binding(limit)} ")
    contexts = f"at {counted(first, 'token')}" if first == last else f"from {first} to {last} tokens"
    assert f" {contexts} a request: 1 a lane" in text
    assert not ONE_OF_SEVERAL.search(text)


@pytest.mark.parametrize("number", [1, 2])
def test_lengths_and_shapes(number: int) -> None:
    texts = (
        *map(str, (fixed(number), uniform(1, number), log_normal(1, number), empirical((1,) * number))),
        str(GroupShape(number, number, 1)),
        str(Layout(GroupShape(number, 8, 1), number, GroupShape(1, 8, 1), 1)),
    )
    for text in texts:
        assert not ONE_OF_SEVERAL.search(text), text
        assert not SEVERAL_OF_ONE.search(text), text


def a_workload(rng: random.Random) -> dict[str, Any]:
    return {
        "prompt": {"fixed": rng.choice((1, 2))},
        "output": {"fixed": rng.choice((1, 2))},
        "concurrency": rng.choice((1, 2, 5000)),
        "targets": {"tpotSeconds": rng.choice((0.001, 0.09, 9)), "ttftSeconds": rng.choice((0.001, 9))},
    }


def said_by_a_plan(rng: random.Random, a: Architecture, profile: HardwareProfile) -> str:
    role = {"groups": 1, "nodesPerGroup": rng.choice((1, 2)), "gpusPerNode": rng.choice((1, 8)), "tensorParallel": 1}
    role["maxNumSeqs"] = rng.choice((1, 2))
    model = {"architecture": a.name, "checkpoint": {"hostPath": {"path": "/k3"}}}
    model["maxModelLen"] = rng.choice((1, 2, 9000))
    document = {"model": model, "workload": rng.choice((None, a_workload(rng))), "prefill": role, "decode": role}
    return str(plan_on(a, parse(KimiDeploymentSpec, document, "spec"), profile))


def said_by_a_search(rng: random.Random, a: Architecture, profile: HardwareProfile) -> Iterator[str]:
    work, kv_dtype = read_workload(a_workload(rng)), profile.spec.runtime.kv_cache_dtype
    request = worker_search(a, profile.spec, kv_dtype, work.within(a.max_positions), rng.randint(0, 4))
    try:
        result = search(replace(request, timing=forecast_of(a, profile, kv_dtype, work).timing))
    except InvalidSpec as error:
        yield str(error)
        return
    yield from (str(each) for each in (*result.ranked, *result.refused, result.shortage))
    yield from (str(each.layout) for each in result.ranked)


@pytest.mark.parametrize("seed", range(60))
def test_plans_and_searches_of_few_things_have_no_wrong_number(seed: int) -> None:
    rng = random.Random(seed)
    profile = built_in_profiles()[rng.choice(("mi300x", "mi325x"))]
    a = architecture(rng.choice(("kimi-k3", "kimi-k3-tiny")))
    for text in (said_by_a_plan(rng, a, profile), *said_by_a_search(rng, a, profile)):
        assert not ONE_OF_SEVERAL.search(text), text
        assert not re.search(r"(TPOT|TTFT|workload|memory|pool|model) bind\b", text), text
