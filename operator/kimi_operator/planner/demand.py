"""What a deployment's `spec.workload` makes of its plan: running requests of each lane, and targets that are missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.deployment import Role
from kimi_operator.api.profile import DType
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.budget import Budget, PagePool
from kimi_operator.planner.case import Case, Solution, Timing
from kimi_operator.planner.elsewhere import layout_of, load_on, same_demand, with_remedies, with_room
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.pools import Room, Settings, num_slots
from kimi_operator.planner.solve import solve
from kimi_operator.planner.space import longest_request
from kimi_operator.planner.targets import TTFT
from kimi_operator.planner.workload import Workload, check_lengths, workload_of

FIELD = "spec.workload"

TimingOf = Callable[[GroupShape, int], Timing]
Speed = Callable[[DType, Workload], TimingOf]
"""Times of a workload by shape and groups, with cached rows of a type. Raises InvalidSpec when too little is known."""


class Demand(Struct, frozen=True):
    """A workload that the model can serve, and how fast the hardware is where that matters."""

    workload: Workload
    timing: TimingOf | None
    warnings: tuple[str, ...] = ()

    def too_long(self, s: Settings) -> tuple[Problem, ...]:
        """Lengths that the model could serve, but not under the stated maxModelLen."""
        return check_lengths(self.workload, longest_of(s), FIELD, "spec.model.maxModelLen")


def read_demand(s: Settings, speed: Speed | None) -> Demand | None:
    """What the spec asks for, None when it does not say. Raises InvalidSpec for what the model cannot serve.

    Where nothing predicts times, targets are left aside with a warning.
    """
    if s.spec.workload is None:
        return None
    workload = workload_of(s.spec.workload, FIELD)
    if problems := check_lengths(workload, s.architecture.max_positions, FIELD):
        raise InvalidSpec(problems)
    workload = workload.within(longest_of(s))
    warnings = tuple(reuse_warnings(workload.reuse))
    try:
        if speed is not None:
            return Demand(workload, speed(s.kv_dtype, workload), warnings)
        reason = "nothing predicts times here"
    except InvalidSpec as error:
        reason = str(error)
    if workload.ttft_s is not None or workload.tpot_s is not None:
        warnings = (*warnings, f"{FIELD}.targets are left aside: {reason}")
    return Demand(workload, None, warnings)


def reuse_warnings(share: Fraction | float) -> Iterator[str]:
    """That times with such a reuse are of an engine that keeps prompts, which the bundled worker does not."""
    if share:
        yield (
            "the bundled worker keeps no prefix cache and computes whole prompts: prefill, TTFT and throughput look "
            f"better than it gives with reuse of {float(share):.0%}; state 0 to see its own"
        )


def holding(s: Settings, workload: Workload) -> Settings:
    """Settings whose pools must hold the workload's longest request, where the spec states no maxModelLen."""
    if s.spec.model.max_model_len is not None:
        return s
    shorten = "lower the workload's longest request to"
    if workload.decode_tokens.has_tail:
        shorten = "shorten the workload's tail, or cut it by spec.model.maxModelLen, to"
    return replace(s, longest=workload.decode_tokens.longest, shorten=shorten)


def solve_role(s: Settings, room: Room, demand: Demand) -> Solution | Problem:
    """Running requests of a lane for the workload; at most what the user or the profile allows.

    `room` is the role cut by any rule: what is spent before the pools, and the sizes of pages and slots, stay. What
    the user states is judged with its own slots, which are set aside however few requests run.
    """
    stated = s.spec.role(room.role).max_num_seqs
    return solve(_case(s, room, demand, slots=None if stated is None else num_slots(stated)))


def _case(s: Settings, room: Room, demand: Demand, slots: int | None) -> Case:
    """With so many slots cut already; None cuts them for the running requests that are found."""
    role_spec, units, size = s.spec.role(room.role), room.units, s.profile.limits.page_size_tokens
    pool = PagePool(size, units.page_bytes, units.slot_bytes, slots=slots)
    return Case(
        workload=demand.workload,
        role=room.role,
        lanes=room.shape.lanes * role_spec.groups,
        budget=Budget(s.profile.gpu.memory, room.lines, pool),
        most_seqs=role_spec.max_num_seqs or s.profile.limits.max_num_seqs,
        max_positions=longest_of(s),
        timing=None if demand.timing is None else demand.timing(room.shape, role_spec.groups).of(room.role),
        longest=s.longest,
        is_set=slots is not None,
    )


def binds_text(demand: Demand, solution: Solution) -> str:
    """What binds under the workload, with the arithmetic."""
    how = next(bound.how for bound in solution.bounds if bound.limit is solution.binds)
    return f"{solution.binds} for {lengths_text(demand.workload)}: {solution.max_num_seqs} a lane; {how}"


def lengths_text(workload: Workload) -> str:
    """Lengths as a person would write them."""
    return f"prompts of {workload.prompt}, answers of {workload.output}"


def shortfalls(s: Settings, room: Room, demand: Demand, solution: Solution) -> Iterator[Problem]:
    """What of the workload these settings do not meet or barely."""
    misses = with_remedies(solution.misses, same_demand(s, demand.workload, demand.timing), s.spec)
    if room.role is Role.DECODE:
        is_stated, field = s.spec.role(room.role).max_num_seqs is not None, f"spec.{room.role}.maxNumSeqs"
        best = _best(s, room, demand) if is_stated else solution
        load = load_on(demand.workload, layout_of(s.spec), demand.timing)
        misses = with_room(misses, solution, best, field, load)
    for problem in (*misses, *solution.doubts, *_unpredicted(s, room, demand)):
        of_workload = problem.field.startswith("workload.")
        yield replace(problem, field=f"spec.{problem.field}") if of_workload else problem


def _unpredicted(s: Settings, room: Room, demand: Demand) -> Iterator[Problem]:
    """A target TTFT where steps of decode have times and prompts have none."""
    target_s = demand.workload.ttft_s
    if room.role is not Role.PREFILL or target_s is None or demand.timing is None:
        return
    if demand.timing(room.shape, s.spec.prefill.groups).of(room.role) is None:
        expected = "times of prompts to hold it against, which need gpu.bf16FlopsPerSecond of the HardwareProfile"
        yield Problem(TTFT, f"{target_s:g} s", expected, "it is left aside: state them in a profile of your own")


def unfilled(s: Settings, room: Room, demand: Demand, solution: Solution) -> Problem | None:
    """A setting of the user's that the workload cannot fill."""
    stated, holds = s.spec.role(room.role).max_num_seqs, _held(solution)
    if stated is None or holds >= stated:
        return None
    freed = solve(_case(s, room, demand, slots=None))
    assert isinstance(freed, Solution), freed
    expected = f"at most {_held(freed)}, which memory holds of this workload at once"
    beside = f"beside the slots of {stated} it holds {holds}, and the youngest requests are preempted"
    remedy = f"lower it: {beside} and computed again"
    return Problem(f"spec.{room.role}.maxNumSeqs", str(stated), expected, remedy)


def _best(s: Settings, room: Room, demand: Demand) -> Solution:
    """What would run, were maxNumSeqs left to the plan."""
    best = solve(replace(_case(s, room, demand, slots=None), most_seqs=s.profile.limits.max_num_seqs))
    assert isinstance(best, Solution), best
    return best


def _held(solution: Solution) -> int:
    """Requests of the workload that a lane's memory holds at once."""
    return min(bound.max_num_seqs for bound in solution.bounds if bound.limit.is_memory)


def longest_of(s: Settings) -> int:
    """Tokens that a request may have."""
    return longest_request(s.architecture, s.spec.model.max_model_len)
