"""What must hold for every plan: layouts, memory, limits and lengths drawn at random."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kimi_operator.api import KimiDeploymentSpec, Role, parse
from kimi_operator.api.profile import DType
from kimi_operator.planner import Infeasible, Plan, make_plan
from kimi_operator.planner.budget import Budget, PagePool
from kimi_operator.planner.case import Case, Solution
from kimi_operator.planner.memory import (
    ExpertFormat,
    GroupShape,
    page_bytes,
    reserve_lines,
    slot_bytes,
    weight_lines,
)
from kimi_operator.planner.plan import MAY_SHRINK, RolePlan
from kimi_operator.planner.solve import solve
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles import architecture, built_in_profiles
from msgspec import Struct
from msgspec.structs import replace

K3 = architecture("kimi-k3")
MI300X = built_in_profiles()["mi300x"]
GIB = 2**30


class Asked(Struct, frozen=True):
    """What a plan is asked for; None leaves a limit to the plan."""

    spare: int
    """Bytes of a GPU beside weights and reserves."""
    nodes: int
    tensor_parallel: int
    kv_cache: str
    prefill_seqs: int | None
    decode_seqs: int | None
    max_model_len: int | None

    @property
    def memory(self) -> int:
        shape = GroupShape(self.nodes, 8, self.tensor_parallel)
        weights = weight_lines(K3, shape, ExpertFormat.MXFP4, DType.BFLOAT16)
        return self.spare + sum(line.bytes for line in (*weights, *reserve_lines(MI300X.spec)))

    def plan(self) -> Plan | Infeasible:
        shape = {"nodesPerGroup": self.nodes, "gpusPerNode": 8, "tensorParallel": self.tensor_parallel}
        document: dict[str, Any] = {
            "model": {"checkpoint": {"hostPath": {"path": "/k3"}}},
            "precision": {"kvCache": self.kv_cache},
            "prefill": shape | ({"maxNumSeqs": self.prefill_seqs} if self.prefill_seqs else {}),
            "decode": shape | ({"maxNumSeqs": self.decode_seqs} if self.decode_seqs else {}),
        }
        if self.max_model_len:
            document["model"]["maxModelLen"] = self.max_model_len
        gpu = MI300X.spec.gpu.model_copy(update={"memory": self.memory})
        profile = MI300X.model_copy(update={"spec": MI300X.spec.model_copy(update={"gpu": gpu})})
        return make_plan(K3, parse(KimiDeploymentSpec, document, "spec"), profile)


def asked(**fixed: Any) -> st.SearchStrategy[Asked]:
    fields: dict[str, Any] = {
        "spare": st.integers(0, 40 * GIB),
        "nodes": st.sampled_from([1, 2, 4, 7, 8, 14]),
        "tensor_parallel": st.sampled_from([1, 2, 4, 8]),
        "kv_cache": st.sampled_from(["BF16", "FP32"]),
        "prefill_seqs": st.none() | st.integers(1, 32),
        "decode_seqs": st.none() | st.integers(1, 32),
        "max_model_len": st.none() | st.integers(1, K3.max_positions),
    }
    return st.builds(Asked, **(fields | fixed))


LIMITED = {"prefill_seqs": st.integers(1, 32), "decode_seqs": st.integers(1, 32)}
LEFT_TO_THE_PLAN = {"prefill_seqs": st.none(), "decode_seqs": st.none()}


ONE_LONG = Asked(15 * GIB, 2, 2, "BF16", None, None, 400_000)
"""One request of the longest length takes two thirds of the pool."""
ALL_SHORT = Asked(15 * GIB, 2, 2, "BF16", None, None, 4096)
"""No request is as long as the context that the profile sets aside."""
UNEVEN = Asked(20 * GIB, 2, 2, "BF16", 1, 30, None)
"""The roles' pools differ, and both are smaller than the model's longest length."""


def pool_bytes(plan: Plan, role: Role) -> int:
    planned = plan.role(role)
    return planned.num_pages * planned.page_bytes + planned.num_state_slots * planned.slot_bytes


@settings(max_examples=40)
@given(ask=asked(**LIMITED), more=st.integers(1, 64 * GIB))
def test_more_memory_never_gives_a_smaller_pool(ask: Asked, more: int) -> None:
    small, large = ask.plan(), replace(ask, spare=ask.spare + more).plan()
    if isinstance(small, Infeasible):
        return
    assert isinstance(large, Plan)
    for role in Role:
        assert large.role(role).num_pages >= small.role(role).num_pages
        assert large.role(role).num_state_slots == small.role(role).num_state_slots
        assert large.role(role).max_model_len >= small.role(role).max_model_len


@settings(max_examples=40)
@given(ask=asked(**LEFT_TO_THE_PLAN), more=st.integers(1, 64 * GIB))
def test_more_memory_never_makes_the_plan_choose_less(ask: Asked, more: int) -> None:
    """Where the plan chooses, a further slot may take pages, but never more than a page of the pool as a whole."""
    small, large = ask.plan(), replace(ask, spare=ask.spare + more).plan()
    if isinstance(small, Infeasible):
        return
    assert isinstance(large, Plan)
    for role in Role:
        assert large.role(role).max_num_seqs >= small.role(role).max_num_seqs
        assert pool_bytes(large, role) > pool_bytes(small, role) - small.role(role).page_bytes


SEVENTEEN = Asked(13_303_000_000, 2, 2, "BF16", None, None, None)
"""17 running requests; 40 MB more make room for another, which takes its slot from the pages."""


@settings(max_examples=40)
@given(ask=asked(), more=st.integers(1, GIB))
@example(ask=SEVENTEEN, more=40_000_000)
def test_only_a_plan_that_says_so_loses_pages_to_more_memory_and_stating_its_choice_keeps_them(
    ask: Asked, more: int
) -> None:
    small, large = ask.plan(), replace(ask, spare=ask.spare + more).plan()
    if isinstance(small, Infeasible):
        return
    seqs = {"prefill_seqs": small.prefill.max_num_seqs, "decode_seqs": small.decode.max_num_seqs}
    kept = replace(ask, spare=ask.spare + more, **seqs).plan()
    assert isinstance(large, Plan)
    assert isinstance(kept, Plan)
    for role in Role:
        before, after = small.role(role), large.role(role)
        assert after.num_pages >= before.num_pages or MAY_SHRINK in before.binds
        assert MAY_SHRINK not in kept.role(role).binds
        assert kept.role(role).num_pages >= before.num_pages
        assert kept.role(role).max_model_len >= before.max_model_len


@settings(max_examples=40)
@given(ask=asked(**LEFT_TO_THE_PLAN))
@example(ask=ONE_LONG)
@example(ask=ALL_SHORT)
def test_the_plan_chooses_the_most_that_hold_their_context_and_finds_some_where_one_fits(ask: Asked) -> None:
    chosen = ask.plan()
    assert isinstance(chosen, Plan) == isinstance(replace(ask, prefill_seqs=1, decode_seqs=1).plan(), Plan)
    if isinstance(chosen, Infeasible):
        return
    limits = MI300X.spec.limits
    context = min(limits.context_tokens_per_seq, ask.max_model_len or limits.context_tokens_per_seq)
    context_pages = -(-context // limits.page_size_tokens)
    seqs = chosen.decode.max_num_seqs
    assert seqs == 1 or chosen.decode.num_pages >= seqs * context_pages
    if seqs < MI300X.spec.limits.max_num_seqs:
        more = replace(ask, prefill_seqs=1, decode_seqs=seqs + 1).plan()
        assert isinstance(more, Infeasible) or more.decode.num_pages < (seqs + 1) * context_pages


@settings(max_examples=40)
@given(ask=asked(**LIMITED), fewer=st.integers(1, 32))
def test_more_running_requests_never_leave_more_pages(ask: Asked, fewer: int) -> None:
    more = ask.plan()
    if isinstance(more, Infeasible) or ask.decode_seqs is None:
        return
    less = replace(ask, decode_seqs=min(fewer, ask.decode_seqs)).plan()
    assert isinstance(less, Plan)
    assert less.decode.num_pages >= more.decode.num_pages
    assert less.decode.num_state_slots <= more.decode.num_state_slots
    assert less.prefill.num_pages == more.prefill.num_pages


@settings(max_examples=40)
@given(ask=asked(max_model_len=st.integers(1, K3.max_positions)), shorter=st.integers(1, K3.max_positions))
def test_a_shorter_length_fits_where_a_longer_one_does(ask: Asked, shorter: int) -> None:
    long = ask.plan()
    if isinstance(long, Infeasible) or ask.max_model_len is None:
        return
    short = replace(ask, max_model_len=min(shorter, ask.max_model_len)).plan()
    assert isinstance(short, Plan)
    for role in Role:
        assert short.role(role).max_num_seqs >= long.role(role).max_num_seqs
        if short.role(role).max_num_seqs == long.role(role).max_num_seqs:
            assert short.role(role).num_pages == long.role(role).num_pages


@settings(max_examples=40)
@given(ask=asked())
@example(ask=SEVENTEEN)
def test_planning_a_plan_again_changes_nothing(ask: Asked) -> None:
    """Writing the plan's own choices into the spec gives the same plan, of which nothing is a choice any more."""
    first = ask.plan()
    if isinstance(first, Infeasible):
        return
    choices = {"prefill_seqs": first.prefill.max_num_seqs, "decode_seqs": first.decode.max_num_seqs}
    assert replace(ask, max_model_len=first.decode.max_model_len).plan() == first
    stated = replace(first, prefill=as_stated(first.prefill), decode=as_stated(first.decode))
    assert replace(ask, **choices).plan() == stated
    assert replace(ask, max_model_len=first.decode.max_model_len, **choices).plan() == stated


def as_stated(planned: RolePlan) -> RolePlan:
    """Without the words on what the plan chose."""
    return replace(planned, binds=planned.binds.removesuffix(MAY_SHRINK))


@settings(max_examples=100)
@given(ask=asked(prefill_seqs=st.none()), longest=st.integers(2, K3.max_positions))
@example(ask=ONE_LONG, longest=400_000)
@example(ask=ONE_LONG, longest=600_000)
def test_pools_are_cut_for_exactly_the_requests_that_the_solver_does_not_refuse(ask: Asked, longest: int) -> None:
    """Cutting refuses with the nearest layout; the solver, asked about the same memory, must never disagree."""
    shape = GroupShape(ask.nodes, 8, ask.tensor_parallel)
    limits, kv_dtype = MI300X.spec.limits, DType.BFLOAT16 if ask.kv_cache == "BF16" else DType.FLOAT32
    weights = weight_lines(K3, shape, ExpertFormat.MXFP4, DType.BFLOAT16)
    pool = PagePool(
        limits.page_size_tokens,
        page_bytes(K3, limits.page_size_tokens, kv_dtype),
        slot_bytes(K3, ask.tensor_parallel, DType.BFLOAT16),
    )
    budget = Budget(ask.memory, (*weights, *reserve_lines(MI300X.spec)), pool)
    work = Workload(fixed(longest - 1), fixed(1))
    solution = solve(Case(work, Role.PREFILL, 8, budget, limits.max_num_seqs, K3.max_positions))
    cut = replace(ask, decode_seqs=None, max_model_len=longest).plan()
    assert isinstance(cut, Plan) == isinstance(solution, Solution)


@settings(max_examples=40)
@given(ask=asked())
@example(ask=UNEVEN)
def test_a_plan_spends_exactly_the_memory_and_holds_one_longest_request(ask: Asked) -> None:
    plan = ask.plan()
    if isinstance(plan, Infeasible):
        assert all(p.field and p.got and p.expected and p.remedy for p in plan.problems)
        return
    for role in Role:
        planned = plan.role(role)
        lines = {line.label: line.bytes for line in planned.lines}
        assert sum(lines.values()) == ask.memory
        assert min(lines.values()) >= 0
        assert lines["KV pages"] == planned.num_pages * planned.page_bytes
        assert lines["state slots"] == planned.num_state_slots * planned.slot_bytes
        assert lines["free"] < planned.page_bytes
        assert planned.num_pages * planned.page_size_tokens >= planned.max_model_len >= 1
        assert planned.num_state_slots > planned.max_num_seqs
        assert planned.lanes * ask.tensor_parallel == planned.ranks == 8 * ask.nodes


@pytest.mark.parametrize("nodes", [2, 4, 7])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_what_splits_further_weighs_less(nodes: int, tensor_parallel: int) -> None:
    """More ranks hold fewer experts each, a wider lane less of what it shares, and nobody less of what is whole."""

    def weights(nodes: int, tensor_parallel: int) -> list[int]:
        shape = GroupShape(nodes, 8, tensor_parallel)
        return [line.bytes for line in weight_lines(K3, shape, ExpertFormat.MXFP4, DType.BFLOAT16)]

    experts, lane, whole = weights(nodes, tensor_parallel)
    assert weights(2 * nodes, tensor_parallel) == [experts // 2, lane, whole]
    assert weights(nodes, 2 * tensor_parallel) == [experts, lane // 2, whole]
