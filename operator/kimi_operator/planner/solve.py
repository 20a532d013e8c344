"""MAX_NUM_SEQS, KV pool and longest request of a lane, solved for a workload; and what binds, from which context on.

The rule for lengths that vary: the workload's longest request must run beside others that each hold what a mean request
ends with, or what those that run hold on average where that is more: a few long answers fill most places. With one
length that is exact; with several, a lane that draws worse than this preempts its youngest request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache

from kimi_operator.api.deployment import Role
from kimi_operator.errors import Problem
from kimi_operator.planner.budget import Budget, PoolDesign
from kimi_operator.planner.case import Bound, Case, Limit, Solution, Stretch, Timing
from kimi_operator.planner.feed import MORE_PREFILL, fed_per_s, more_lanes
from kimi_operator.planner.memory import MemoryLine
from kimi_operator.planner.targets import judged
from kimi_operator.planner.units import binding, bytes_text, ceil_div, counted, most
from kimi_operator.planner.workload import Lengths, fixed

MOST_SEQS = 4096
"""The most that limits.maxNumSeqs may be."""
_SPREAD = 128
SURE_SHARE = 0.5
"""Of what prefill feeds: in replays of prompts of many lengths its lanes wait for each other for up to half of it."""


def solve(case: Case) -> Solution | Problem:
    """Solve a case, or say with the arithmetic why the longest request does not fit. Exact in bytes."""
    problem = _refusal(case)
    if problem is not None:
        return problem
    bounds = tuple(_bounds(case))
    tightest = min(bounds, key=lambda bound: bound.max_num_seqs)
    hard = min(bound.max_num_seqs for bound in bounds if bound.limit is not Limit.WORKLOAD)
    seqs, captures = max(1, tightest.max_num_seqs), case.budget.captures
    if captures is not None:
        seqs = captures.padded(seqs, max(1, hard))
    units = case.budget.num_units(seqs)
    verdicts = tuple(judged(case, seqs))
    longest, mean = case.budget.design.longest(units), case.budget.design.units(sum(case.workload.mean_lengths))
    return Solution(
        max_num_seqs=seqs,
        running=seqs * case.lanes,
        num_units=units,
        num_slots=case.budget.design.num_slots(seqs),
        held=units // mean,
        pool_bytes=case.budget.pool(seqs),
        max_model_len=min(longest, case.max_positions),
        binds=tightest.limit,
        pool_binds=Limit.MEMORY if case.budget.pool_bytes is None else Limit.SETTING,
        length_binds=Limit.PAGES if longest < case.max_positions else Limit.MODEL,
        bounds=bounds,
        misses=(*_misses(case, seqs, tightest.limit), *(miss for each in verdicts for miss in each.misses)),
        doubts=(*(doubt for each in verdicts for doubt in each.doubts), *_barely_fed(case)),
    )


def stretches(case: Case) -> tuple[Stretch, ...]:
    """What binds at each context up to the longest request, the workload's own lengths and demand left aside.

    Exact where memory binds after lanes; where two limits take turns around one context, one change is shown.
    """
    last = min(case.budget.design.longest(case.budget.num_units(1)), case.max_positions)
    found, first = [], 1
    while first <= last:
        stretch = _stretch(case, first, last)
        found.append(stretch)
        first = stretch.last_tokens + 1
    return tuple(found)


def _stretch(case: Case, first: int, last: int) -> Stretch:
    binds, seqs = _at_context(case, first)
    reach = most(lambda tokens: _at_context(case, tokens)[0] is binds, first, last)
    return Stretch(first, reach, binds, seqs, _at_context(case, reach)[1])


def unused(case: Case, solution: Solution) -> tuple[MemoryLine, ...]:
    """Memory of a GPU that these settings pay for and the workload never touches; lines of 0 bytes are left out.

    What is kept for features that the bundled worker lacks counts too; the reserve, left free on purpose, does not.
    """
    budget, seqs, design = case.budget, solution.max_num_seqs, case.budget.design
    outside = budget.outside(seqs)
    idle = solution.num_units - _need(case, case.requests, case.held)(seqs)
    tail = solution.pool_bytes - design.fixed_bytes(seqs) - solution.num_units * design.unit_bytes
    lines = (
        MemoryLine(
            "outside the pool",
            outside,
            f"{budget.free:,} B free - {solution.pool_bytes:,} B of pool - {budget.graphs_bytes(seqs):,} B of graphs: "
            f"{outside // design.unit_bytes:,} more {design.unit}",
        ),
        MemoryLine("pool's remainder", tail, f"less than one of its {design.unit_bytes:,} B {design.unit}"),
        MemoryLine(
            f"idle {design.unit}",
            idle * design.unit_bytes,
            f"{idle:,} of {solution.num_units:,} {design.unit}: {seqs} running requests of this workload fill the rest",
        ),
    )
    kept = tuple(line for line in budget.lines if line.stays_free and not line.is_margin)
    return tuple(line for line in lines + kept if line.bytes)


def _need(case: Case, requests: Lengths, held: int = 0) -> Callable[[int], int]:
    """Running requests -> pages or blocks that they take: the longest request beside mean ones, of `held` at least."""
    design, number = case.budget.design, len(requests.points)
    longest, total = _longest_and_total(design, requests)
    each = max(total, design.units(held) * number) if held > requests.mean else total
    return lambda seqs: longest + ceil_div((seqs - 1) * each, number)


@lru_cache(maxsize=1024)
def _longest_and_total(design: PoolDesign, requests: Lengths) -> tuple[int, int]:
    """Pages or blocks of the longest request, and of one request of each length together."""
    return design.units(requests.longest), sum(design.units(tokens) for tokens in requests.points)


def _bounds(case: Case) -> Iterator[Bound]:
    """Every limit on MAX_NUM_SEQS; of equal ones the first is named."""
    yield _lanes_bound(case)
    if case.budget.captures is not None and case.budget.pool_bytes is not None:
        yield _graphs_bound(case)
    yield _memory_bound(case, case.requests, case.held)
    if case.timing is not None and not case.is_set:
        yield from _time_bounds(case, case.timing)
    running = case.workload.running
    if running is not None and case.role is Role.DECODE:
        yield Bound(
            Limit.WORKLOAD, ceil_div(running, case.lanes), f"{running:,} at once over {counted(case.lanes, 'lane')}"
        )


def _lanes_bound(case: Case) -> Bound:
    """What a lane may run, its slots beside the pages of the longest request."""
    seqs = most(lambda n: case.budget.holds(case.longest_request, n), 1, case.most_seqs)
    if seqs == case.most_seqs:
        whose = "its maxNumSeqs" if case.is_set else "the profile's limit"
        return Bound(Limit.LANES, seqs, f"{counted(case.lanes, 'lane')}, each at most {seqs}, {whose}")
    how = f"a request of {counted(case.longest_request, 'token')}, prompt and answer, must fit beside the slots of all"
    return Bound(Limit.LANES, seqs, how)


def _graphs_bound(case: Case) -> Bound:
    budget, room = case.budget, case.budget.free - case.budget.pool(1)
    assert budget.captures is not None
    seqs = most(lambda n: budget.outside(n) >= 0, 1, MOST_SEQS)
    sizes, each = len(budget.captures.sizes(seqs + 1)), budget.captures.bytes_each
    refused = f"; {seqs + 1} would capture {sizes} sizes x {each:,} B" if seqs < MOST_SEQS else ""
    return Bound(Limit.GRAPHS, seqs, f"{room:,} B are left for them{refused}")


def _memory_bound(case: Case, requests: Lengths, held: int = 0) -> Bound:
    """What pool and state slots hold, named after what one more request would spend most on."""
    budget, design, need = case.budget, case.budget.design, _need(case, requests, held)
    seqs = most(lambda n: budget.num_units(n) >= need(n), 1, MOST_SEQS)
    state = design.units(0) * design.unit_bytes
    # Slots of handoffs and captured graphs come one for several requests: spread, so that the name does not flicker.
    spent = {
        Limit.SLOTS: ceil_div(design.fixed_bytes(2 * _SPREAD) - design.fixed_bytes(_SPREAD), _SPREAD) + state,
        Limit.PAGES: (need(seqs + 1) - need(max(1, seqs))) * design.unit_bytes - state,
    }
    if budget.pool_bytes is None:
        spent[Limit.GRAPHS] = ceil_div(budget.graphs_bytes(_SPREAD), _SPREAD)
    how = f"{budget.num_units(max(1, seqs)):,} {design.unit}; one more request spends "
    how += ", ".join(f"{bytes_text(amount)} on {limit}" for limit, amount in spent.items() if amount)
    return Bound(max(spent, key=lambda limit: spent[limit]), seqs, how)


def _time_bounds(case: Case, timing: Timing) -> Iterator[Bound]:
    work = case.workload
    if case.role is Role.DECODE and work.tpot_s is not None:
        yield _tpot_bound(timing, min(work.mean_context, case.max_positions), work.tpot_s)
    if case.role is Role.PREFILL and work.ttft_s is not None:
        target, (computed, reused) = work.ttft_s, work.computed_and_reused(work.prompt.mean)
        one_s = timing.prefill_s(computed, reused)
        seqs = most(lambda n: n * one_s <= target, 1, MOST_SEQS)
        how = f"prompts of {counted(computed, 'token')} and {reused:,} reused take {one_s:.3f} s each on a lane"
        yield Bound(Limit.TTFT, seqs, how)


def _tpot_bound(timing: Timing, context: int, target_s: float) -> Bound:
    seqs = most(lambda n: timing.decode_step_s(n, context) <= target_s, 1, MOST_SEQS)
    step_s = timing.decode_step_s(max(1, seqs), context)
    return Bound(
        Limit.TPOT,
        seqs,
        f"a step of {counted(max(1, seqs), 'request')} of {counted(context, 'token')} takes {step_s * 1e3:.1f} ms",
    )


def _at_context(case: Case, tokens: int) -> tuple[Limit, int]:
    """What binds, and how many run, when every request holds so many tokens."""
    bounds = [Bound(Limit.LANES, case.most_seqs, "")]
    if case.budget.captures is not None and case.budget.pool_bytes is not None:
        bounds.append(_graphs_bound(case))
    bounds.append(_memory_bound(case, fixed(tokens)))
    if case.timing is not None and case.workload.tpot_s is not None and case.role is Role.DECODE and not case.is_set:
        bounds.append(_tpot_bound(case.timing, tokens, case.workload.tpot_s))
    tightest = min(bounds, key=lambda bound: bound.max_num_seqs)
    return tightest.limit, tightest.max_num_seqs


def _refusal(case: Case) -> Problem | None:
    budget, field = case.budget, f"spec.{case.role}"
    if (overflow := budget.overflow()) is not None:
        got = " + ".join(f"{bytes_text(each.bytes)} {each.label}" for each in budget.lines if each.bytes)
        remedy = "use more GPUs a group, a larger tensorParallel, or GPUs with more memory"
        return Problem(field, got, str(overflow), remedy)
    if budget.outside(1) < 0:
        got = f"{budget.pool(1):,} B of pool and {budget.graphs_bytes(1):,} B of captured graphs"
        lower = budget.free - budget.graphs_bytes(1)
        remedy = f"lower it to {lower:,} B" if lower > 0 else "capture fewer graphs"
        return Problem(f"{field}.kvCacheMemoryBytes", got, f"at most {budget.free:,} B, what is free", remedy)
    longest, units = case.longest_request, budget.num_units(1)
    if budget.holds(longest, 1):
        return None
    got = f"a request of {counted(longest, 'token')}: {budget.design.units(longest):,} {budget.design.unit}"
    expected = f"at most {units:,}, which {bytes_text(max(0, budget.pool(1)))} of pool hold beside one request's state"
    return Problem(f"{field} longest request", got, expected, _shorten(budget, longest, units))


def _shorten(budget: Budget, longest: int, num_units: int) -> str:
    held = budget.design.longest(num_units)
    remedies = [f"lower it to {counted(held, 'token')}"] if held else []
    needed = budget.design.fixed_bytes(1) + budget.design.units(longest) * budget.design.unit_bytes
    if budget.pool_bytes is not None and needed <= budget.free - budget.graphs_bytes(1):
        remedies.append(f"raise the pool to {needed:,} B")
    return " or ".join(remedies) or "use more GPUs a group, or GPUs with more memory"


def _misses(case: Case, seqs: int, limit: Limit) -> Iterator[Problem]:
    work, timing = case.workload, case.timing
    has_room = work.running is None or work.running <= seqs * case.lanes or _serves_rate(case, seqs)
    if case.role is Role.DECODE and work.running is not None and not has_room:
        field, got = "workload.concurrency", f"{work.running:,}"
        if work.requests_per_second is not None:
            rate = float(work.requests_per_second)
            field, got = (
                "workload.requestsPerSecond",
                f"{rate:g}, which needs {counted(work.running, 'request')} at once",
            )
        binds = binding("maxNumSeqs" if limit is Limit.LANES else limit)
        expected = f"at most {seqs * case.lanes:,}: {seqs} a lane x {counted(case.lanes, 'lane')}, where {binds}"
        yield Problem(field, got, expected, more_lanes(work.running, seqs))
    if timing is None:
        return
    if case.role is Role.PREFILL and work.requests_per_second is not None:
        rate, fed = float(work.requests_per_second), fed_per_s(work, timing, case.lanes)
        if rate > fed:
            expected = f"at most {fed:.3g}, what prefill feeds: beyond, ever more prompts wait"
            yield Problem("workload.requestsPerSecond", f"{rate:g}", expected, f"{MORE_PREFILL}, or lower it")


def _serves_rate(case: Case, seqs: int) -> bool:
    """Whether so many requests a lane are answered as fast as a rate brings more: steps may be below the target."""
    work, timing = case.workload, case.timing
    if timing is None or work.requests_per_second is None:
        return False
    step_s = timing.decode_step_s(seqs, min(work.mean_context, case.max_positions))
    return case.lanes * seqs >= work.requests_per_second * work.output.mean * Fraction(step_s)


def _barely_fed(case: Case) -> Iterator[Problem]:
    """A rate that prefill feeds only while the lanes of a group keep step."""
    work, timing = case.workload, case.timing
    if case.role is not Role.PREFILL or timing is None or work.requests_per_second is None:
        return
    rate, fed = float(work.requests_per_second), fed_per_s(work, timing, case.lanes)
    sure = SURE_SHARE * fed
    if sure < rate <= fed:
        expected = (
            f"at most {sure:.3g} to be sure: prefill feeds {fed:.3g} while the lanes of a group keep step, and less"
        )
        expected += " as they wait for each other, which kimictl replay counts"
        yield Problem("workload.requestsPerSecond", f"{rate:g}", expected, f"{MORE_PREFILL}, or lower it")
