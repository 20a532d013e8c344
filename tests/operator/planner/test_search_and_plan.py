"""The search and the plan agree: what the search ranks is planned with the same limits, or refused by both."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kimi_operator.api import KimiDeploymentSpec, Role, parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Infeasible, Plan
from kimi_operator.planner.case import Solution
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.reservation import RESERVATION
from kimi_operator.planner.search import Candidate, Layout, Search, page_pools, search
from kimi_operator.planner.workload import Workload, read_workload
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import forecast_of, plan_on
from msgspec.structs import replace

K3 = architecture("kimi-k3")
PROFILES = built_in_profiles()
PLANNED = 4


def spec_of(layout: Layout, workload: dict[str, Any]) -> KimiDeploymentSpec:
    """A deployment of a layout that leaves every limit to the plan."""
    document: dict[str, Any] = {"model": {"checkpoint": {"hostPath": {"path": "/k3"}}}, "workload": workload}
    for role in Role:
        shape = layout.shape(role)
        document[role.value] = {
            "groups": layout.groups(role),
            "nodesPerGroup": shape.nodes,
            "gpusPerNode": shape.gpus_per_node,
            "tensorParallel": shape.tensor_parallel,
        }
    return parse(KimiDeploymentSpec, document, "spec")


def search_for(profile: HardwareProfile, workload: Workload, num_nodes: int) -> Search:
    kv_dtype = profile.spec.runtime.kv_cache_dtype
    served = workload.within(K3.max_positions)
    forecast = forecast_of(K3, profile, kv_dtype, served)
    request = Search(K3, profile.spec, served, num_nodes, page_pools(K3, profile.spec, kv_dtype))
    return replace(request, timing=forecast.timing, throughput=forecast.throughput)


def lengths(rng: random.Random, most: int) -> dict[str, Any]:
    """Short or long ones of any kind: the borders between plans lie where requests are long."""
    least = int(most ** rng.random()) + 1
    kinds: tuple[dict[str, Any], ...] = (
        {"fixed": least},
        {"uniform": {"min": least, "max": least + int(most ** rng.random())}},
        {"logNormal": {"median": least, "p95": least * rng.randint(1, 8)}},
        {"empirical": [int(most ** rng.random()) + 1 for _ in range(5)]},
    )
    return rng.choice(kinds)


def a_workload(rng: random.Random) -> dict[str, Any]:
    document: dict[str, Any] = {"prompt": lengths(rng, 700_000), "output": lengths(rng, 200_000)}
    if rng.random() < 0.5:
        document["targets"] = {"tpotSeconds": rng.choice((0.02, 0.08, 0.2)), "ttftSeconds": rng.choice((1.0, 10.0))}
    if rng.random() < 0.5:
        document["concurrency"] = rng.randint(1, 400)
    return document


def told_of(candidate: Candidate) -> tuple[Problem, ...]:
    """What a plan warns of; for what is missed it names another layout too, which a search lists anyway."""
    return candidate.misses + candidate.doubts


def assert_planned_alike(candidate: Candidate, plan: Plan) -> None:
    for role, solution in ((Role.PREFILL, candidate.prefill), (Role.DECODE, candidate.decode)):
        assert plan.role(role).max_num_seqs == solution.max_num_seqs
        assert plan.role(role).num_pages == solution.num_units
        assert plan.role(role).max_model_len == candidate.longest
    prefixes = {RESERVATION: ""}
    told = {
        f"{prefixes.get(each.field, 'spec.')}{each.field}: got {each.got}, expected {each.expected}; "
        for each in told_of(candidate)
    }
    # the longest request that is admitted is not the workload's
    warnings = [warning for warning in plan.warnings if not warning.startswith("spec.model.maxModelLen: ")]
    assert len(warnings) == len(told)
    assert all(warning.startswith(tuple(told)) for warning in warnings)


@pytest.mark.parametrize("name", ["mi300x", "mi325x"])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_layouts_of_a_search_are_planned_as_they_were_ranked(name: str, seed: int) -> None:
    rng = random.Random(seed)
    document = a_workload(rng)
    workload, num_nodes = read_workload(document), rng.choice((4, 6, 8))
    try:
        result = search(search_for(PROFILES[name], workload, num_nodes))
    except InvalidSpec:
        return
    for candidate in result.ranked[:PLANNED]:
        plan = plan_on(K3, spec_of(candidate.layout, document), PROFILES[name])
        assert isinstance(plan, Plan), str(plan)
        assert_planned_alike(candidate, plan)
        assert candidate.longest >= workload.within(K3.max_positions).decode_tokens.longest


@pytest.mark.parametrize("seed", range(12))
def test_a_shape_that_the_search_refuses_is_refused_by_a_plan(seed: int) -> None:
    """Beside a role that holds anything, so that only the shape in question can be why."""
    rng = random.Random(seed)
    prompt, output = rng.randint(1, 700_000), rng.randint(1, 300_000)
    document = {"prompt": {"fixed": prompt}, "output": {"fixed": output}}
    request = search_for(PROFILES["mi300x"], read_workload(document), 8)
    for nodes in (2, 4):
        shape, roomy = GroupShape(nodes, 8, 2), GroupShape(14, 8, 2)
        for role in Role:
            solution = request.outcome(role, shape, 1)
            shapes = (shape, roomy) if role is Role.PREFILL else (roomy, shape)
            plan = plan_on(K3, spec_of(Layout(shapes[0], 1, shapes[1], 1), document), PROFILES["mi300x"])
            assert isinstance(solution, Solution) == isinstance(plan, Plan), str(plan)
            if isinstance(plan, Infeasible):
                assert [problem.field for problem in plan.problems] == [f"spec.{role}"]


def test_a_layout_whose_prefill_cannot_hold_the_answer_too_is_not_ranked() -> None:
    """Prefill of two nodes holds 615,872 tokens: enough for the prompt, not for what its plan must serve."""
    workload = read_workload({"prompt": 600_000, "output": 100_000})
    result = search(search_for(PROFILES["mi300x"], workload, 6))
    assert result.ranked
    assert all(candidate.layout.prefill != GroupShape(2, 8, 2) for candidate in result.ranked)
    assert min(candidate.longest for candidate in result.ranked) >= 700_000
