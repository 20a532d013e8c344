"""The search for layouts: what is ranked first, what is refused with which arithmetic, and a count of all layouts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from kimi_operator.api.deployment import Role
from kimi_operator.api.profile import DType, HardwareProfileSpec
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner.case import Solution, Timing
from kimi_operator.planner.memory import ExpertFormat, GroupShape, page_bytes, reserve_lines, slot_bytes, weight_lines
from kimi_operator.planner.search import (
    Layout,
    Refusal,
    Search,
    SearchResult,
    block_pools,
    page_pools,
    search,
)
from kimi_operator.planner.workload import Workload, fixed, log_normal
from kimi_operator.profiles import architecture, built_in_profiles
from msgspec.structs import replace

K3, TINY = architecture("kimi-k3"), architecture("kimi-k3-tiny")
SHORT = Workload(fixed(2048), fixed(128))


def profile_of(name: str, **changes: Any) -> HardwareProfileSpec:
    """A built-in profile; `gpu__memory=...` changes one field of one section."""
    profile = built_in_profiles()[name].spec
    for path, value in changes.items():
        section, field = path.split("__")
        part = getattr(profile, section).model_copy(update={field: value})
        profile = profile.model_copy(update={section: part})
    return profile


def search_of(name: str, num_nodes: int, workload: Workload = SHORT, **changes: Any) -> Search:
    profile = profile_of(name, **changes)
    return Search(K3, profile, workload, num_nodes, page_pools(K3, profile, profile.runtime.kv_cache_dtype))


def refusal_of(result: SearchResult, nodes: int, tensor_parallel: int) -> Refusal:
    (found,) = [
        refusal
        for refusal in result.refused
        if (refusal.shape.nodes, refusal.shape.tensor_parallel) == (nodes, tensor_parallel)
    ]
    return found


def test_the_published_layout_is_found_first_on_four_nodes_of_mi300x() -> None:
    result = search(search_of("mi300x", 4))
    best = result.ranked[0]
    assert result.shortage is None
    assert str(best.layout) == "prefill: 1 x 2 nodes (TP2 DP8 EP16), decode: 1 x 2 nodes (TP2 DP8 EP16)"
    assert (best.layout.nodes, best.layout.lanes(Role.DECODE)) == (4, 8)
    assert best.misses == ()


def test_tp1_dp16_is_refused_on_mi300x_and_fits_mi325x() -> None:
    problem = refusal_of(search(search_of("mi300x", 4)), 2, 1).problem
    assert problem.field == "a group of 2 x 8 GPUs with tensorParallel 1"
    assert "84.2 GiB routed experts + 95.0 GiB weights split over a lane" in problem.got
    assert problem.expected == (
        "at most 192.0 GiB, the memory of a GPU: the line 'contexts' of 11.2 GiB does not fit into the 998.4 MiB "
        "that are left, and 31.2 GiB are missing in all"
    )
    assert problem.remedy == "use the nearest layout that fits: 2 x 8 GPUs with tensorParallel 2"
    assert any(candidate.layout.decode == GroupShape(2, 8, 1) for candidate in search(search_of("mi325x", 4)).ranked)


@pytest.mark.parametrize("memory", [192 * 10**9, 201_310_208 * 1024])
def test_eight_gpus_of_192_gb_are_refused_with_the_sums(memory: int) -> None:
    """1,453.7 GiB of checkpoint are more than 8 x 192e9 B, and no more than 8 x 191.98 GiB less the reserves."""
    result = search(search_of("mi300x", 2, gpu__memory=memory))
    assert result.ranked == ()
    for tensor_parallel in (1, 2, 4, 8):
        refusal = refusal_of(result, 1, tensor_parallel)
        assert refusal.roles == (Role.PREFILL, Role.DECODE)
        assert "checkpoint 1,453.7 GiB" in refusal.problem.got
        assert f"of 8 x {memory / 2**30:,.1f} GiB = {8 * memory / 2**30:,.1f} GiB" in refusal.problem.got
        assert "nearest layout that fits: 2 x 8 GPUs" in refusal.problem.remedy
    assert result.shortage is not None
    assert result.shortage.expected.startswith("at least 4: one prefill group of 2 x 8 GPUs")
    assert result.shortage.remedy == "raise it to 4"


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    result = search(search_of("mi325x", 4))
    (refusal,) = [refusal for refusal in result.refused if refusal.shape.nodes == 3]
    assert str(refusal.problem) == (
        "3 nodes a group: got 24 ranks, expected ranks that divide the 896 experts of kimi-k3; "
        "use groups of [1, 2, 4] nodes"
    )


def test_a_partitioned_card_is_judged_by_its_own_memory() -> None:
    """64 GPUs of 24 GiB a node: the reserves of a whole card alone are more than that."""
    result = search(search_of("mi300x", 2, gpu__memory=24 * 2**30, gpu__per_node=64))
    assert result.ranked == ()
    assert result.shortage is None
    assert all("no layout of up to 64 nodes fits" in refusal.problem.remedy for refusal in result.refused)


def test_a_shape_is_refused_for_both_roles_when_either_cannot_hold_prompt_and_answer() -> None:
    """A deployment has one longest request: prefill would hold the prompt, and a plan would serve no more."""
    long = Workload(fixed(400_000), fixed(300_000))
    result = search(search_of("mi300x", 4, long))
    found = [refusal for refusal in result.refused if refusal.shape == GroupShape(2, 8, 2)]
    assert [refusal.roles for refusal in found] == [(Role.PREFILL,), (Role.DECODE,)]
    for refusal in found:
        assert refusal.problem.field == f"a {refusal.roles[0]} group of 2 x 8 GPUs with tensorParallel 2"
        assert "a request of 700,000 tokens" in refusal.problem.got
        assert "or lower it to" in refusal.problem.remedy


def test_blocks_run_fewer_short_requests_than_pages_do() -> None:
    profile = profile_of("mi325x")
    pages = search(search_of("mi325x", 4, limits__max_num_seqs=4096))
    request = search_of("mi325x", 4, limits__max_num_seqs=4096)
    blocks = search(replace(request, design=block_pools(K3, 2), experts=ExpertFormat.INT4))
    assert profile.runtime.kv_cache_dtype is DType.BFLOAT16
    assert 0 < blocks.ranked[0].capacity < pages.ranked[0].capacity


def test_capacity_ranks_and_says_so() -> None:
    result = search(search_of("mi325x", 6, Workload(log_normal(8000, 60_000), fixed(500))))
    assert result.objective.startswith("targets met, then requests of the workload that decode can run at once")
    capacities = [candidate.capacity for candidate in result.ranked]
    assert capacities == sorted(capacities, reverse=True)


def test_a_throughput_ranks_before_capacity() -> None:
    def rate(layout: Layout, decode: Solution) -> float:
        """Prompts come as fast as prefill has lanes; answers as fast as decode runs requests."""
        return min(layout.lanes(Role.PREFILL) * 1.0, decode.running / 10)

    request = search_of("mi325x", 8)
    result = search(replace(request, throughput=rate))
    rates = [candidate.throughput for candidate in result.ranked]
    assert rates == sorted(rates, key=lambda each: -(each or 0))
    assert result.ranked[0].layout.prefill_groups > search(request).ranked[0].layout.prefill_groups
    assert "throughput" in result.objective


def test_of_equal_throughput_the_fewest_nodes_come_first_and_no_smaller_layout_is_left_out() -> None:
    def rate(layout: Layout, decode: Solution) -> float:
        """So many prompts that two groups of two nodes compute, or that the answers' lanes keep up with."""
        return min(16.0, layout.lanes(Role.PREFILL), decode.running / 40)

    request = replace(search_of("mi325x", 10), throughput=rate)
    result = search(request)
    keys = [(-(each.throughput or 0), each.layout.nodes) for each in result.ranked]
    assert keys == sorted(keys)
    for found in result.ranked:
        fewer = replace(found.layout, decode_groups=found.layout.decode_groups - 1)
        decode = request.outcome(Role.DECODE, fewer.decode, fewer.decode_groups) if fewer.decode_groups else None
        assert not isinstance(decode, Solution) or rate(fewer, decode) < (found.throughput or 0)
    every = every_layout(request)
    assert max(every.values()) == result.ranked[0].throughput
    least = min(layout.nodes for layout, each in every.items() if each == result.ranked[0].throughput)
    assert result.ranked[0].layout.nodes == least


def every_layout(request: Search) -> dict[Layout, float]:
    """Each number of groups of each role beside each other, with its throughput."""
    counts, found = range(1, request.num_nodes + 1), {}
    shapes = [GroupShape(nodes, 8, tensor_parallel) for nodes in counts for tensor_parallel in (1, 2, 4, 8)]
    fitting = {role: [shape for shape in shapes if request.fits(role, shape)] for role in Role}
    for prefill, decode in itertools.product(*fitting.values()):
        for groups in itertools.product(counts, repeat=2):
            layout = Layout(prefill, groups[0], decode, groups[1])
            if layout.nodes <= request.num_nodes and prefill.tensor_parallel == decode.tensor_parallel:
                outcome = request.outcome(Role.DECODE, decode, groups[1])
                assert isinstance(outcome, Solution)
                assert request.throughput is not None
                found[layout] = request.throughput(layout, outcome)
    return found


def test_layouts_that_meet_the_targets_come_before_larger_ones_that_do_not() -> None:
    def timing(shape: GroupShape, groups: int) -> Timing:
        step_s = 0.2 / shape.tensor_parallel
        return Timing(lambda seqs, tokens: step_s + seqs * 1e-4, lambda new, cached: new * 1e-4)

    work = replace(SHORT, tpot_s=0.06, ttft_s=1.0)
    result = search(replace(search_of("mi300x", 4, work), timing=timing))
    assert [len(candidate.misses) for candidate in result.ranked] == [0, 0, 1]
    assert [candidate.layout.decode.tensor_parallel for candidate in result.ranked] == [4, 8, 2]


@pytest.mark.parametrize(
    ("num_nodes", "said"),
    [
        (0, "nodes: got 0, expected at least 4: one prefill group .*; raise it to 4"),
        (-1, "nodes: got -1, expected at least 4"),
        (65, "nodes: got 65, expected at most 64"),
    ],
)
def test_numbers_of_nodes_out_of_range(num_nodes: int, said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        search(search_of("mi300x", num_nodes))


def test_prompts_longer_than_the_model_are_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"workload\.prompt: got 2,000,000 tokens"):
        search(search_of("mi300x", 4, Workload(fixed(2_000_000), fixed(1))))


# a count of every layout of a tiny model


def tiny_search(rng: random.Random) -> Search:
    profile = profile_of(
        "mi300x",
        gpu__memory=rng.randint(500_000, 1_900_000),
        gpu__per_node=rng.choice((1, 2, 4)),
        limits__max_num_seqs=rng.randint(1, 60),
        limits__page_size_tokens=rng.choice((4, 16)),
        runtime__dtype=DType.FLOAT32,
    )
    nothing = dict.fromkeys(type(profile.reserve).model_fields, 0)
    reserve = profile.reserve.model_copy(update={**nothing, "contexts": rng.randint(0, 50_000)})
    profile = profile.model_copy(update={"reserve": reserve})
    workload = Workload(fixed(rng.randint(1, 400)), fixed(rng.randint(1, 40)))
    design = page_pools(TINY, profile, DType.FLOAT32)
    return Search(TINY, profile, workload, rng.randint(1, 6), design, ExpertFormat.FLOAT32)


def slow_seqs(request: Search, shape: GroupShape, tokens: int) -> int:
    """Requests a lane, by taking slots and pages of each in turn until the GPU is full."""
    profile = request.profile
    lines = weight_lines(TINY, shape, ExpertFormat.FLOAT32, DType.FLOAT32) + reserve_lines(profile)
    page_size = profile.limits.page_size_tokens
    page, slot = page_bytes(TINY, page_size, DType.FLOAT32), slot_bytes(TINY, shape.tensor_parallel, DType.FLOAT32)
    free, seqs = profile.gpu.memory - sum(line.bytes for line in lines), 0
    while seqs < profile.limits.max_num_seqs:
        more = seqs + 1
        slots = more + max(1, (more + 3) // 4)
        if slots * slot + more * ((tokens + page_size - 1) // page_size) * page > free:
            break
        seqs = more
    return seqs


def slow_layouts(request: Search) -> Iterator[tuple[Layout, int]]:
    """Every layout that fits, whether or not it uses all nodes, with the requests that its decode runs."""
    per_node, nodes = request.profile.gpu.per_node, request.num_nodes
    counts = range(1, nodes + 1)
    whole = request.workload.decode_tokens.longest
    for tensor_parallel in (n for n in (1, 2, 4) if per_node % n == 0):
        for p_nodes, d_nodes, p_groups, d_groups in itertools.product(counts, repeat=4):
            if p_nodes * p_groups + d_nodes * d_groups > nodes:
                continue
            prefill, decode = (GroupShape(n, per_node, tensor_parallel) for n in (p_nodes, d_nodes))
            if TINY.num_experts % prefill.ranks or TINY.num_experts % decode.ranks:
                continue
            running = slow_seqs(request, decode, whole) * decode.lanes * d_groups
            if running and slow_seqs(request, prefill, whole):
                yield Layout(prefill, p_groups, decode, d_groups), running


@pytest.mark.parametrize("seed", range(60))
def test_no_layout_is_better_than_the_first_and_none_is_missed(seed: int) -> None:
    request = tiny_search(random.Random(seed))
    result, every = search(request), dict(slow_layouts(request))
    found = {candidate.layout: candidate.capacity for candidate in result.ranked}
    assert found.items() <= every.items()
    assert max(found.values(), default=0) == max(every.values(), default=0)
    best = best_with(every)
    assert {layout_key(layout): found[layout] for layout in found} == best
    refused = {(role, refusal.shape) for refusal in result.refused for role in refusal.roles}
    used = {(Role.PREFILL, layout.prefill) for layout in every} | {(Role.DECODE, layout.decode) for layout in every}
    assert not refused & used


def layout_key(layout: Layout) -> tuple[GroupShape, int, GroupShape]:
    return layout.prefill, layout.prefill_groups, layout.decode


def best_with(every: dict[Layout, int]) -> dict[tuple[GroupShape, int, GroupShape], int]:
    """The most that any number of decode groups runs, for each choice of all else."""
    best: dict[tuple[GroupShape, int, GroupShape], int] = {}
    for layout, running in every.items():
        key = layout_key(layout)
        best[key] = max(best.get(key, 0), running)
    return best


def best_capacity(request: Search) -> int:
    return max((candidate.capacity for candidate in search(request).ranked), default=0)


@pytest.mark.parametrize("seed", range(30))
def test_more_nodes_and_more_memory_never_make_the_best_layout_worse(seed: int) -> None:
    request = tiny_search(random.Random(seed))
    larger = request.profile.gpu.model_copy(update={"memory": request.profile.gpu.memory + 1 + seed * 5000})
    base = best_capacity(request)
    assert best_capacity(replace(request, num_nodes=request.num_nodes + 1)) >= base
    assert best_capacity(replace(request, profile=request.profile.model_copy(update={"gpu": larger}))) >= base


@pytest.mark.parametrize("seed", range(30))
def test_longer_requests_never_make_the_best_layout_better(seed: int) -> None:
    request = tiny_search(random.Random(seed))
    longer = replace(request.workload, prompt=fixed(request.workload.prompt.longest + 50))
    assert best_capacity(replace(request, workload=longer)) <= best_capacity(request)
