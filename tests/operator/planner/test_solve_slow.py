"""The solver beside a slow count of bytes and pages that it must agree with, and what must hold for every case."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_operator.api.deployment import Role
from kimi_operator.api.profile import DType
from kimi_operator.errors import Problem
from kimi_operator.planner.budget import BlockPool, Budget, Captures, PagePool, PoolDesign
from kimi_operator.planner.case import Case, Solution, Timing
from kimi_operator.planner.memory import MemoryLine, page_bytes, slot_bytes
from kimi_operator.planner.solve import solve, stretches, unused
from kimi_operator.planner.unified import block_layout
from kimi_operator.planner.workload import Lengths, Workload, empirical, fixed, log_normal, uniform
from kimi_operator.profiles import architecture
from msgspec.structs import replace

GIB = 2**30
K3, TINY = architecture("kimi-k3"), architecture("kimi-k3-tiny")
PAGES = PagePool(64, page_bytes(K3, 64, DType.BFLOAT16), slot_bytes(K3, 2, DType.BFLOAT16))


# a slow count that the solver must agree with


def slow_holds(case: Case, requests: Lengths, seqs: int, held: int = 0, whole: int = 0) -> bool:
    """Whether so many run: memory is taken piece by piece, on as many like GPUs as there are lengths.

    On them, each length runs (seqs - 1) times and the longest once a GPU, so that means need no fractions.
    """
    budget, design = case.budget, case.budget.design
    left = budget.memory
    for line in budget.lines:
        left -= line.bytes
    if budget.captures is not None:
        for size in range(1, 513):
            if size <= 2 * seqs and (size in (1, 2, 4) or (size % 8 == 0 and (size <= 256 or size % 16 == 0))):
                left -= budget.captures.bytes_each
    if budget.pool_bytes is not None:
        if budget.pool_bytes > left:
            return False
        left = budget.pool_bytes
    if isinstance(design, PagePool):
        for _ in range(seqs):
            left -= design.slot_bytes
        for _ in range(max(1, (seqs + 3) // 4)):
            left -= design.slot_bytes
    units = 0
    while left >= design.unit_bytes:
        left -= design.unit_bytes
        units += 1
    gpus = len(requests.points)
    others = list(requests.points)
    if held > sum(others) / gpus:
        others = max(others, [held] * gpus, key=lambda each: sum(slow_units(design, tokens) for tokens in each))
    running = [requests.longest] * gpus + [tokens for tokens in others for _ in range(seqs - 1)]
    return slow_units(design, whole) <= units and sum(slow_units(design, each) for each in running) <= gpus * units


def slow_held(case: Case) -> int:
    """Tokens that a place of a decode lane holds on average: each answer is counted once for every step it takes."""
    if case.role is Role.PREFILL:
        return 0
    steps = [Fraction(2 * step + 1, 2) for answer in case.workload.output.points for step in range(answer)]
    return min(math.ceil(case.workload.prompt.mean + sum(steps) / len(steps)), case.max_positions)


def slow_units(design: PoolDesign, tokens: int) -> int:
    held, per_unit = 0, design.page_size_tokens if isinstance(design, PagePool) else design.layout.block_tokens
    units = 0
    while held < tokens:
        held += per_unit
        units += 1
    return units if isinstance(design, PagePool) else units * design.layout.row_groups + design.layout.state_groups


def slow_seqs(case: Case, requests: Lengths, most: int, held: int = 0, whole: int = 0) -> int:
    return max((seqs for seqs in range(1, most + 1) if slow_holds(case, requests, seqs, held, whole)), default=0)


def slow_in_time(case: Case) -> int:
    """Most requests whose step meets the target, and one at least."""
    work, seqs = case.workload, 1
    if case.role is Role.PREFILL or work.tpot_s is None or case.timing is None:
        return case.most_seqs
    tokens = slow_held(case)
    while seqs < case.most_seqs and case.timing.decode_step_s(seqs + 1, tokens) <= work.tpot_s:
        seqs += 1
    return seqs


def random_lengths(rng: random.Random) -> Lengths:
    short, long = sorted(rng.randint(1, 400) for _ in range(2))
    kinds = (
        fixed(long),
        uniform(short, long),
        log_normal(short, long),
        empirical(tuple(rng.randint(1, long) for _ in range(rng.randint(1, 6)))),
    )
    return rng.choice(kinds)


def random_case(rng: random.Random) -> Case:
    tensor_parallel = rng.choice((1, 2, 4))
    dtype = DType.FLOAT32
    page_size = rng.choice((1, 4, 16, 64))
    design = rng.choice(
        (
            PagePool(page_size, page_bytes(TINY, page_size, dtype), slot_bytes(TINY, tensor_parallel, dtype)),
            BlockPool(block_layout(TINY, tensor_parallel, 4, 4)),
        )
    )
    memory = rng.randint(0, 3_000_000)
    lines = tuple(MemoryLine(f"line {i}", rng.randint(0, 200_000), "") for i in range(rng.randint(0, 3)))
    pool = rng.choice((None, None, rng.randint(0, 2_000_000)))
    captures = rng.choice((None, None, Captures(rng.randint(0, 200_000))))
    output = rng.choice((fixed(rng.randint(1, 50)), random_lengths(rng), log_normal(10, 300)))
    return Case(
        workload=Workload(
            random_lengths(rng),
            output,
            tpot_s=rng.choice((None, rng.uniform(0.01, 0.2))),
            concurrency=rng.choice((None, rng.randint(1, 60))),
        ),
        role=rng.choice(tuple(Role)),
        lanes=rng.randint(1, 4),
        budget=Budget(memory, lines, design, pool, captures),
        most_seqs=rng.randint(1, 24),
        max_positions=rng.choice((300, 1000)),
        timing=Timing(lambda seqs, tokens: 0.01 + 0.005 * seqs + 1e-5 * seqs * tokens, lambda new, cached: 1e-3 * new),
    )


@pytest.mark.parametrize("seed", range(300))
def test_the_solver_agrees_with_the_slow_count(seed: int) -> None:
    case = random_case(random.Random(seed))
    # prefill, too, must have room for a prompt and its whole answer beside the slots of all
    whole = case.workload.within(case.max_positions).decode_tokens.longest
    most = slow_seqs(case, case.requests, case.most_seqs, slow_held(case), whole)
    solution = solve(case)
    if isinstance(solution, Problem):
        assert most == 0, str(solution)
        return
    most = min(most, slow_in_time(case))
    running = case.workload.running
    wanted = most
    if running is not None and case.role is Role.DECODE:
        wanted = min(most, (running + case.lanes - 1) // case.lanes)
    if case.budget.captures is None:
        assert solution.max_num_seqs == wanted
    else:
        sizes = [size for size in range(1, most + 1) if size in (1, 2, 4) or size % 8 == 0]
        assert solution.max_num_seqs == next((size for size in sizes if size >= wanted), sizes[-1])
    one = replace(case, most_seqs=solution.max_num_seqs)
    assert slow_holds(one, fixed(solution.max_model_len), 1)
    assert sum(line.bytes < 0 for line in unused(case, solution)) == 0


def slow_binding(case: Case, tokens: int) -> tuple[str, int]:
    """Without a stated pool, captures and times."""
    design = case.budget.design
    held = slow_seqs(case, fixed(tokens), case.most_seqs + 1)
    if held >= case.most_seqs:
        return "lanes", case.most_seqs
    if isinstance(design, PagePool):
        state, rows = design.slot_bytes * 1.25, slow_units(design, tokens) * design.page_bytes
    else:
        state, rows = design.layout.state_groups, slow_units(design, tokens) - design.layout.state_groups
    return ("slots" if state >= rows else "pages"), held


@pytest.mark.parametrize("seed", range(40))
def test_stretches_agree_with_the_slow_count_at_every_context(seed: int) -> None:
    rng = random.Random(seed)
    case = replace(random_case(rng), most_seqs=rng.randint(1, 6), max_positions=100, timing=None)
    budget = replace(case.budget, memory=rng.randint(0, 500_000), pool_bytes=None, captures=None, lines=())
    case = replace(case, budget=budget)
    found = stretches(case)
    assert [part.first_tokens for part in found[1:]] == [part.last_tokens + 1 for part in found[:-1]]
    last = found[-1].last_tokens if found else 0
    assert not slow_holds(case, fixed(last + 1), 1) or last == case.max_positions
    for part in found:
        for tokens in range(part.first_tokens, part.last_tokens + 1):
            binds, seqs = slow_binding(case, tokens)
            assert part.binds == binds, tokens
            assert part.seqs_at_last <= seqs <= part.seqs_at_first
        assert slow_binding(case, part.last_tokens)[1] == part.seqs_at_last


# order


def cases() -> Iterator[tuple[int, Case]]:
    for seed in range(120):
        yield seed, random_case(random.Random(seed))


def seqs_or_zero(case: Case) -> int:
    solution = solve(case)
    return solution.max_num_seqs if isinstance(solution, Solution) else 0


def test_more_memory_never_runs_fewer_requests_in_a_smaller_pool() -> None:
    """At an equal MAX_NUM_SEQS the longest request grows too; a larger one takes slots from it."""
    for seed, case in cases():
        more = replace(case, budget=replace(case.budget, memory=case.budget.memory + 1 + seed * 1000))
        less, greater = solve(case), solve(more)
        if isinstance(less, Problem):
            continue
        assert isinstance(greater, Solution), seed
        assert greater.max_num_seqs >= less.max_num_seqs, seed
        if case.budget.captures is None:
            assert greater.pool_bytes >= less.pool_bytes, seed
        if greater.max_num_seqs == less.max_num_seqs:
            assert greater.max_model_len >= less.max_model_len, seed


def test_longer_prompts_never_run_more_requests() -> None:
    for seed, case in cases():
        prompt, rng = case.workload.prompt, random.Random(seed)
        points = [point + rng.randint(0, 30) for point in prompt.points]
        longer = Lengths(tuple(sorted(points)), max(*points, prompt.longest + rng.randint(0, 30)), "longer")
        assert seqs_or_zero(replace(case, workload=replace(case.workload, prompt=longer))) <= seqs_or_zero(case), seed


def test_more_concurrency_never_sets_fewer_requests() -> None:
    for seed, case in cases():
        counts = [
            seqs_or_zero(replace(case, workload=replace(case.workload, concurrency=concurrency)))
            for concurrency in (*range(1, 40), None)
        ]
        assert counts == sorted(counts), seed


def test_solving_with_what_was_solved_changes_nothing() -> None:
    for seed, case in cases():
        solution = solve(case)
        if isinstance(solution, Solution):
            again = solve(replace(case, most_seqs=solution.max_num_seqs))
            assert isinstance(again, Solution), seed
            assert (again.max_num_seqs, again.num_units) == (solution.max_num_seqs, solution.num_units), seed


@settings(max_examples=60)
@given(free_gib=st.integers(1, 100), tokens=st.integers(2, 200_000), seqs=st.integers(1, 64))
def test_nothing_is_spent_twice(free_gib: int, tokens: int, seqs: int) -> None:
    """Slots, pages that run and what is unused make up the memory, to the byte."""
    case = Case(
        Workload(fixed(tokens - 1), fixed(1)), Role.DECODE, 8, Budget(free_gib * GIB, (), PAGES), seqs, 1_048_576
    )
    solution = solve(case)
    if isinstance(solution, Solution):
        used = solution.max_num_seqs * PAGES.units(tokens) * PAGES.page_bytes + PAGES.fixed_bytes(solution.max_num_seqs)
        assert used + sum(line.bytes for line in unused(case, solution)) == free_gib * GIB
