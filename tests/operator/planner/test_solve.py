"""The solver: published settings explained, what binds and from which context on, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from kimi_operator.api.deployment import Role
from kimi_operator.api.profile import DType
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.budget import BlockPool, Budget, Captures, PagePool
from kimi_operator.planner.case import Case, Limit, Solution, Timing
from kimi_operator.planner.memory import MemoryLine, page_bytes, reserve_lines, slot_bytes
from kimi_operator.planner.solve import solve, stretches, unused
from kimi_operator.planner.unified import block_layout
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles import architecture, built_in_profiles
from msgspec.structs import replace

GIB = 2**30
K3, TINY = architecture("kimi-k3"), architecture("kimi-k3-tiny")
LANES = 8
FREE_MI300X = int(172.74 * GIB) - int(148.6 * GIB)
"""Measured free before load with an 8 GiB heap, less measured weights (published)."""
FREE_MI325X = int((256 - 11.2 - 16 - 148.6) * GIB)
POOL_MI300X, POOL_MI325X = 13_000_000_000, 40_000_000_000
BLOCKS = BlockPool(block_layout(K3, 2, 1))
PAGES = PagePool(64, page_bytes(K3, 64, DType.BFLOAT16), slot_bytes(K3, 2, DType.BFLOAT16))


def requests_of(tokens: int) -> Workload:
    return Workload(fixed(tokens - 1), fixed(1))


def case_of(
    workload: Workload, budget: Budget, most_seqs: int = 512, timing: Timing | None = None, role: Role = Role.DECODE
) -> Case:
    return Case(workload, role, LANES, budget, most_seqs, K3.max_positions, timing)


def published(chip: str, tokens: int, most_seqs: int = 512) -> Case:
    free, pool = {"mi300x": (FREE_MI300X, POOL_MI300X), "mi325x": (FREE_MI325X, POOL_MI325X)}[chip]
    return case_of(requests_of(tokens), Budget(free, (), BLOCKS, pool), most_seqs)


def solved(case: Case) -> Solution:
    solution = solve(case)
    assert isinstance(solution, Solution), str(solution)
    return solution


def refused(case: Case) -> Problem:
    problem = solve(case)
    assert isinstance(problem, Problem)
    return problem


# published settings


@pytest.mark.parametrize(
    ("chip", "max_num_seqs", "reach", "running"),
    [("mi300x", 8, 97_920, 64), ("mi300x", 32, 11_520, 256), ("mi325x", 32, 69_120, 256), ("mi325x", 64, 23_040, 512)],
)
def test_published_settings_bind_up_to_the_context_that_their_pool_holds(
    chip: str, max_num_seqs: int, reach: int, running: int
) -> None:
    """8 a lane on MI300X with 13e9 B, 32 or 64 a lane on MI325X with 40e9 B: what those numbers are good for."""
    case = published(chip, 2176, max_num_seqs)
    assert solved(case).running == running
    lanes, *after = stretches(case)
    assert (lanes.first_tokens, lanes.last_tokens, lanes.binds) == (1, reach, Limit.LANES)
    assert after[-1].binds is Limit.PAGES
    assert after[0].first_tokens == reach + 1
    assert after[0].seqs_at_first < max_num_seqs
    assert str(lanes) == f"lanes bind from 1 to {reach:,} tokens a request: {max_num_seqs} a lane"


@pytest.mark.parametrize(
    ("tokens", "mi300x", "mi325x"),
    [(100_000, 56, 184), (244_000, 24, 80), (414_000, 16, 48), (900_000, 8, 24)],
)
def test_requests_of_one_length_that_both_published_pools_run_at_once(tokens: int, mi300x: int, mi325x: int) -> None:
    assert [solved(published(chip, tokens)).running for chip in ("mi300x", "mi325x")] == [mi300x, mi325x]


def test_the_longest_request_of_the_published_pools() -> None:
    short, long = solved(published("mi300x", 2176)), solved(published("mi325x", 2176))
    assert (short.max_model_len, short.length_binds) == (921_600, Limit.PAGES)
    assert (long.max_model_len, long.length_binds) == (K3.max_positions, Limit.MODEL)
    problem = refused(published("mi300x", 1_000_000))
    assert "177 blocks" in problem.got
    assert "at most 163" in problem.expected
    assert problem.remedy == "lower it to 921,600 tokens or raise the pool to 14,093,844,480 B"


def test_where_the_published_settings_leave_memory_unused() -> None:
    """Bytes a GPU, at prompts of 2048 and answers of 128 tokens, which take four blocks each."""
    block = BLOCKS.unit_bytes
    for chip, seqs, free, pool, blocks in (
        ("mi300x", 8, FREE_MI300X, POOL_MI300X, 163),
        ("mi325x", 32, FREE_MI325X, POOL_MI325X, 502),
        ("mi325x", 64, FREE_MI325X, POOL_MI325X, 502),
    ):
        case = published(chip, 2176, seqs)
        lines = {line.label: line.bytes for line in unused(case, solved(case))}
        assert lines == {
            "outside the pool": free - pool,
            "pool's remainder": pool - blocks * block,
            "idle blocks": (blocks - 4 * seqs) * block,
        }
    assert POOL_MI300X - 163 * block == 20_922_880
    assert POOL_MI325X - 502 * block == 27_627_520
    assert round((FREE_MI325X - POOL_MI325X) / GIB, 1) == 42.9


def test_what_is_kept_free_for_features_that_the_worker_lacks_is_unused_too() -> None:
    """The heap of the expert exchange and captured graphs; not the margin, which is left free on purpose."""
    profile = built_in_profiles()["mi300x"].spec
    lines = reserve_lines(profile)
    spare = 20 * GIB
    case = case_of(requests_of(2176), Budget(sum(line.bytes for line in lines) + spare, lines, PAGES), most_seqs=8)
    found = {line.label: line for line in unused(case, solved(case))}
    assert found["symmetric heap"].bytes == 8 * GIB
    assert found["captured graphs"].bytes == 2 * GIB
    assert "kept free: the bundled worker captures none" in found["captured graphs"].how
    assert profile.reserve.margin > 0
    assert set(found) == {"pool's remainder", "idle KV pages", "symmetric heap", "captured graphs"}
    none = profile.reserve.model_copy(update={"symmetric_heap": 0, "graphs": 0})
    lines = reserve_lines(profile.model_copy(update={"reserve": none}))
    assert not {"symmetric heap", "captured graphs"} & {
        line.label for line in unused(replace(case, budget=replace(case.budget, lines=lines)), solved(case))
    }


def test_all_of_the_free_memory_would_hold_more() -> None:
    """The stated pool of MI325X is a choice: what it leaves out doubles the requests of 100,000 tokens."""
    case = published("mi325x", 100_000)
    whole = solved(replace(case, budget=replace(case.budget, pool_bytes=None)))
    assert (solved(case).pool_binds, whole.pool_binds) == (Limit.SETTING, Limit.MEMORY)
    assert whole.running == 8 * 51
    assert unused(case, solved(case))[0].label == "outside the pool"


# graph captures


@pytest.mark.parametrize(("max_num_seqs", "num_sizes"), [(1, 2), (4, 4), (8, 5), (16, 7), (32, 11), (64, 19)])
def test_captured_sizes(max_num_seqs: int, num_sizes: int) -> None:
    """32 captured 11 sizes on MI300X (published)."""
    assert len(Captures(1).sizes(max_num_seqs)) == num_sizes


def test_eleven_captured_graphs_left_too_little_on_mi300x() -> None:
    """11 sizes left 1.29e9 B, which was too little. With 10 GiB of activations (assumed) a size takes 82 MB."""
    left, activations = 1_290_000_000, 10 * GIB
    room = FREE_MI300X - POOL_MI300X - activations
    captures = Captures((room - left) // 11)
    lines = (MemoryLine("activations", activations, "assumed"), MemoryLine("registration", left + 11, "published"))
    case = case_of(requests_of(2176), Budget(FREE_MI300X, lines, BLOCKS, POOL_MI300X, captures))
    solution = solved(case)
    assert solution.binds is Limit.GRAPHS
    assert 8 <= solution.max_num_seqs < 32
    (how,) = [bound.how for bound in solution.bounds if bound.limit is Limit.GRAPHS]
    assert f"x {captures.bytes_each:,} B" in how
    assert solved(replace(case, most_seqs=8)).max_num_seqs == 8


def test_graphs_that_leave_no_room_for_a_stated_pool_are_refused() -> None:
    case = case_of(requests_of(2176), Budget(POOL_MI300X + 10, (), BLOCKS, POOL_MI300X, Captures(100)))
    problem = refused(case)
    assert problem.field == "spec.decode.kvCacheMemoryBytes"
    assert problem.remedy == f"lower it to {POOL_MI300X + 10 - 200:,} B"


def test_max_num_seqs_is_a_captured_size_where_graphs_are_captured() -> None:
    budget = Budget(100 * GIB, (), PAGES, None, Captures(1))
    for asked, given_seqs in ((8, 1), (24, 4), (40, 8), (72, 16), (136, 24), (8 * 300, 304)):
        case = case_of(replace(requests_of(64), concurrency=asked), budget)
        assert solved(case).max_num_seqs == given_seqs


# what binds


def test_slots_bind_short_requests_and_pages_long_ones() -> None:
    """A slot of 214.3 MiB and a quarter for handoffs is as much as 10,112 tokens of bfloat16 rows."""
    case = case_of(requests_of(1000), Budget(40 * GIB, (), PAGES))
    lanes, slots, pages = stretches(replace(case, most_seqs=100))
    assert [part.binds for part in (lanes, slots, pages)] == [Limit.LANES, Limit.SLOTS, Limit.PAGES]
    assert slots.last_tokens == 5 * PAGES.slot_bytes // 4 // PAGES.page_bytes * 64 == 10_112
    assert pages.last_tokens == 1_048_576
    assert solved(case).binds is Limit.SLOTS
    assert solved(replace(case, workload=requests_of(50_000))).binds is Limit.PAGES


def linear(base_s: float, per_seq_s: float, per_token_s: float = 0.0) -> Timing:
    return Timing(
        lambda seqs, tokens: base_s + seqs * (per_seq_s + tokens * per_token_s), lambda new, cached: new * 1e-3
    )


def test_a_target_tpot_binds_and_says_which_step_it_allows() -> None:
    work = replace(requests_of(1001), tpot_s=0.1)
    case = case_of(work, Budget(80 * GIB, (), PAGES), timing=linear(0.07, 0.001, 1e-6))
    solution = solved(case)
    assert (solution.binds, solution.max_num_seqs) == (Limit.TPOT, 14)  # 70 + 15 x (1 + 1.0005) > 100 ms
    assert not solution.misses
    first, *_ = stretches(case)
    assert (first.binds, first.seqs_at_first, first.seqs_at_last) == (Limit.TPOT, 29, 0)


def test_a_target_that_one_request_misses_is_told_with_the_time_it_takes() -> None:
    work = replace(requests_of(1001), tpot_s=0.05)
    solution = solved(case_of(work, Budget(80 * GIB, (), PAGES), timing=linear(0.07, 0.001)))
    assert (solution.max_num_seqs, solution.binds) == (1, Limit.TPOT)
    (miss,) = solution.misses
    assert (miss.field, miss.got) == ("workload.targets.tpotSeconds", "0.05 s")
    assert "at least 0.071 s, " in miss.expected


def test_a_target_ttft_binds_prefill() -> None:
    work = Workload(fixed(1000), fixed(10), reuse=Fraction(1, 2), ttft_s=2.0)
    case = case_of(work, Budget(80 * GIB, (), PAGES), timing=linear(0.07, 0.0), role=Role.PREFILL)
    assert (solved(case).max_num_seqs, solved(case).binds) == (4, Limit.TTFT)
    (miss,) = solved(replace(case, workload=replace(work, ttft_s=0.4))).misses
    assert "at least 0.5 s, which 500 prompt tokens and 500 reused take" in miss.expected


@pytest.mark.parametrize(("rate", "is_fed"), [(16, True), (Fraction(161, 10), False), (5000, False)])
def test_a_rate_that_prefill_cannot_feed_is_a_miss_of_prefill(rate: Fraction | int, is_fed: bool) -> None:
    """8 lanes, and 500 tokens of a prompt take each of them half a second: 16 prompts a second."""
    work = Workload(fixed(1000), fixed(10), reuse=Fraction(1, 2), tpot_s=0.2, requests_per_second=Fraction(rate))
    case = case_of(work, Budget(80 * GIB, (), PAGES), timing=linear(0.07, 0.0), role=Role.PREFILL)
    misses = solved(case).misses
    assert [miss.field for miss in misses] == ([] if is_fed else ["workload.requestsPerSecond"])
    assert is_fed or "at most 16, what prefill feeds" in misses[0].expected


def test_concurrency_beyond_all_lanes_says_how_many_lanes_it_needs() -> None:
    case = published("mi300x", 97_920)
    solution = solved(replace(case, workload=replace(case.workload, concurrency=100)))
    (miss,) = solution.misses
    assert (miss.field, miss.got) == ("workload.concurrency", "100")
    assert "at most 64: 8 a lane x 8 lanes, where pages bind" in miss.expected
    assert miss.remedy == "use 13 lanes, or lower it"


def test_no_more_is_set_than_is_asked_for() -> None:
    case = published("mi325x", 2176)
    solution = solved(replace(case, workload=replace(case.workload, concurrency=20)))
    assert (solution.max_num_seqs, solution.binds) == (3, Limit.WORKLOAD)


# refusals


def test_the_line_that_does_not_fit_is_named() -> None:
    lines = (MemoryLine("routed experts", 90, "", is_weights=True), MemoryLine("contexts", 20, ""))
    problem = refused(case_of(requests_of(10), Budget(100, lines, PAGES)))
    assert problem.got == "90 B routed experts + 20 B contexts"
    assert problem.expected == (
        "at most 100 B, the memory of a GPU: the line 'contexts' of 20 B does not fit into the 10 B that are left, and "
        "10 B are missing in all"
    )


def test_a_pool_larger_than_what_is_free_is_refused() -> None:
    problem = refused(case_of(requests_of(10), Budget(FREE_MI300X, (), BLOCKS, POOL_MI325X)))
    assert "40,000,000,000 B of pool" in problem.got
    assert problem.remedy == f"lower it to {FREE_MI300X:,} B"


def test_a_gpu_without_room_for_one_request_is_refused() -> None:
    problem = refused(case_of(requests_of(10), Budget(PAGES.slot_bytes, (), PAGES)))
    assert "GPUs with more memory" in problem.remedy


def test_a_stated_pool_of_nothing_says_how_large_it_must_be() -> None:
    problem = refused(case_of(requests_of(10), Budget(FREE_MI300X, (), BLOCKS, 0)))
    assert problem.remedy == f"raise the pool to {4 * BLOCKS.unit_bytes:,} B"


@pytest.mark.parametrize("field", ["lanes", "most_seqs", "max_positions"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_below_one_are_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidSpec, match=f"got {value}, expected at least 1; raise it"):
        replace(published("mi300x", 10), **{field: value})
