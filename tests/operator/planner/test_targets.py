"""Targets that are missed, or met within the band alone; and the nearest layout that meets what is missed."""

from __future__ import annotations

from typing import Any

import pytest
from kimi_operator.api import KimiDeploymentSpec, Role, parse
from kimi_operator.errors import Problem
from kimi_operator.planner import Plan
from kimi_operator.planner.budget import Budget, PagePool
from kimi_operator.planner.case import Case, Solution, Timing
from kimi_operator.planner.elsewhere import with_remedies
from kimi_operator.planner.memory import GroupShape, MemoryLine
from kimi_operator.planner.search import Layout, Search, page_pools
from kimi_operator.planner.solve import solve
from kimi_operator.planner.targets import TPOT, TTFT
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import forecast_of, plan_on
from msgspec.structs import replace

K3, MI300X = architecture("kimi-k3"), built_in_profiles()["mi300x"]
BF16 = MI300X.spec.runtime.kv_cache_dtype
SHORT = Workload(fixed(1000), fixed(100))


def band(low: float, high: float) -> Any:
    return lambda _one, _other: (low, high)


def times(seconds: float, low: float, high: float) -> Timing:
    """The same whatever runs, so that a target alone decides."""
    return Timing(lambda _seqs, _tokens: seconds, lambda _new, _cached: seconds, band(low, high), band(low, high))


def solved(role: Role, target_s: float, timing: Timing) -> Solution:
    budget = Budget(10**6, (MemoryLine("weights", 10, ""),), PagePool(16, 100, 100))
    case = Case(replace(SHORT, tpot_s=target_s, ttft_s=target_s), role, 8, budget, 4, 4096, timing)
    found = solve(case)
    assert isinstance(found, Solution), found
    return found


@pytest.mark.parametrize(("role", "field"), [(Role.DECODE, TPOT), (Role.PREFILL, TTFT)])
@pytest.mark.parametrize(
    ("target_s", "is_missed", "is_sure"),
    [
        (0.5, True, True),
        (0.8, True, False),
        (0.99, True, False),
        (1.0, False, False),
        (1.2, False, False),
        (1.21, False, True),
    ],
)
def test_within_the_band_the_answer_is_not_sure(
    role: Role, field: str, *, target_s: float, is_missed: bool, is_sure: bool
) -> None:
    found = solved(role, target_s, times(1.0, 0.8, 1.2))
    told = found.misses + found.doubts
    assert [problem.field for problem in told] == ([] if is_sure and not is_missed else [field])
    assert bool(found.misses) == is_missed
    for problem in told:
        assert problem.got == f"{target_s:g} s"
        assert ("within the band of 0.8 to 1.2 s" in problem.expected) != is_sure


def test_a_band_is_that_of_as_many_as_run() -> None:
    """Two of at most four: the third step would take longer than the target."""
    timing = Timing(
        lambda seqs, _tokens: 0.1 * seqs,
        lambda _new, _cached: 0.01,
        lambda seqs, _tokens: (0.08 * seqs, 0.12 * seqs),
        band(0.01, 0.01),
    )
    found = solved(Role.DECODE, 0.22, timing)
    (doubt,) = found.doubts
    assert found.max_num_seqs == 2
    assert "0.2 s is predicted, and it lies within the band of 0.16 to 0.24 s" in doubt.expected


def test_times_without_a_band_are_taken_as_they_are() -> None:
    found = solved(Role.DECODE, 1.0, Timing(lambda _seqs, _tokens: 1.0, lambda _new, _cached: 1.0))
    assert (found.misses, found.doubts) == ((), ())


def spec_of(workload: dict[str, Any], **role: int) -> KimiDeploymentSpec:
    each = {"groups": 1, "nodesPerGroup": 2, "gpusPerNode": 8, "tensorParallel": 2} | role
    document = {"model": {"checkpoint": {"hostPath": {"path": "/k3"}}}, "prefill": each, "decode": each}
    return parse(KimiDeploymentSpec, {**document, "workload": workload}, "spec")


def asked(tpot_s: float) -> dict[str, Any]:
    return {"prompt": {"fixed": 1000}, "output": {"fixed": 100}, "targets": {"tpotSeconds": tpot_s}}


def step_s(tensor_parallel: int, nodes: int = 2) -> float:
    """Of one request, on a layout of its own."""
    timing = forecast_of(K3, MI300X, BF16, SHORT).timing(GroupShape(nodes, 8, tensor_parallel), 1)
    return timing.decode_step_s(1, SHORT.mean_context)


def warning_of(tpot_s: float) -> str:
    plan = plan_on(K3, spec_of(asked(tpot_s)), MI300X)
    assert isinstance(plan, Plan), str(plan)
    assert plan.decode.max_num_seqs == 1
    (warning,) = plan.warnings
    return warning


def test_the_nearest_layout_that_meets_a_missed_target_is_named() -> None:
    """TP4 and TP8 of the same nodes are faster than TP2, in this order of nearness."""
    assert step_s(2) > step_s(4) > step_s(8)
    for meets, misses in ((4, 2), (8, 4)):
        warning = warning_of((step_s(meets) + step_s(misses)) / 2)
        lanes = 16 // meets
        shape = f"1 x 2 nodes (TP{meets} DP{lanes} EP16)"
        assert f"; use prefill: {shape}, decode: {shape}, which meets it within the band, or raise it" in warning


def test_a_named_layout_keeps_the_max_num_seqs_that_is_stated() -> None:
    """One request a lane: half as many lanes hold half as many."""
    workload = asked((step_s(4) + step_s(2)) / 2) | {"concurrency": 8}
    plan = plan_on(K3, spec_of(workload, maxNumSeqs=1), MI300X)
    assert isinstance(plan, Plan), str(plan)
    (warning,) = plan.warnings
    assert "decode: 1 x 2 nodes (TP4 DP4 EP16), which meets it within the band but misses concurrency, or" in warning


def test_without_a_layout_that_meets_it_the_plan_says_so() -> None:
    warning = warning_of(0.9 * step_s(8))
    assert warning.endswith("; no other tensorParallel or size of a group on the same nodes meets it: raise it")


def test_the_layout_that_is_named_meets_the_target_in_a_plan_of_its_own() -> None:
    target_s = (step_s(4) + step_s(2)) / 2
    plan = plan_on(K3, spec_of(asked(target_s), tensorParallel=4), MI300X)
    assert isinstance(plan, Plan), str(plan)
    (warning,) = plan.warnings
    assert warning.startswith(f"spec.workload.targets.tpotSeconds: got {target_s:g} s, expected more to be sure")


@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_the_named_layout_is_the_one_that_a_count_of_all_finds(tensor_parallel: int) -> None:
    """Four nodes a role in one or two groups: every split and width, judged one by one."""
    spec = spec_of(asked(1.0), groups=2, tensorParallel=tensor_parallel)
    here = GroupShape(2, 8, tensor_parallel)
    target_s = 0.97 * step_s(tensor_parallel)
    work = replace(SHORT, tpot_s=target_s)
    timing = forecast_of(K3, MI300X, BF16, work).timing
    request = Search(K3, MI300X.spec, work, 8, page_pools(K3, MI300X.spec, BF16), timing=timing)
    shapes = [GroupShape(nodes, 8, width) for nodes in (2, 4) for width in (1, 2, 4, 8)]
    meeting = [
        (
            abs(decode.nodes - 2) + abs(prefill.nodes - 2),
            abs(decode.tensor_parallel - here.tensor_parallel),
            prefill,
            decode,
        )
        for prefill in shapes
        for decode in shapes
        if prefill.tensor_parallel == decode.tensor_parallel
        and isinstance(request.outcome(Role.PREFILL, prefill, 4 // prefill.nodes), Solution)
        and isinstance(solution := request.outcome(Role.DECODE, decode, 4 // decode.nodes), Solution)
        and not solution.misses
    ]
    *_, prefill, decode = min(meeting, key=lambda each: each[:2])
    (told,) = with_remedies((Problem(TPOT, "", "", "raise it"),), request, spec)
    assert f"use {Layout(prefill, 4 // prefill.nodes, decode, 4 // decode.nodes)}, which" in told.remedy


def test_other_problems_keep_their_remedies() -> None:
    problem = Problem("workload.concurrency", "9", "at most 8", "lower it")
    request = Search(K3, MI300X.spec, SHORT, 4, page_pools(K3, MI300X.spec, BF16))
    assert with_remedies((problem,), request, spec_of(asked(1.0))) == (problem,)
