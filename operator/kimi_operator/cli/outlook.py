"""A plan under a workload: what binds and where that changes, memory that nothing uses, and predicted times. Pure."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from kimi_operator.api.deployment import Role
from kimi_operator.cli.manifests import Planned
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import MemoryLine, Plan, RolePlan
from kimi_operator.planner.budget import Budget, PagePool
from kimi_operator.planner.case import Case, Solution, Stretch, Timing
from kimi_operator.planner.demand import reuse_warnings
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.objective import Forecast, mean_request
from kimi_operator.planner.predict import (
    Capacity,
    CurvePoint,
    Prediction,
    Request,
    decode_step_ms,
    handoff_ms,
    knee,
    prefill_ms,
    throughput_curve,
)
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad, Setup
from kimi_operator.planner.solve import most, solve, stretches, unused
from kimi_operator.planner.targets import Judged, told
from kimi_operator.planner.workload import Workload, check_lengths, fixed
from kimi_operator.profiles.forecast import decode_forecast, forecast_of
from kimi_operator.profiles.support import rates_warning

POOL_LABELS = {"state slots", "KV pages", "free"}
ASSUMED_OUTPUT_SHARE = 8
"""Without a workload an eighth of the profile's context a request is its answer."""
CURVE_POINTS = 28
TABLE_ROWS = 8
CONTEXT_POINTS = 40
SHORTEST_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class RoleOutlook:
    """One role under the workload."""

    plan: RolePlan
    groups: int
    shape: GroupShape
    case: Case
    """With the plan's maxNumSeqs and its slots."""
    widest: Case
    """With slots cut for as many as would run, up to the profile's limit."""
    at_plan: Solution | Problem
    """What the plan's settings run."""
    best: Solution | Problem
    """What memory and the profile's limit would allow for this workload."""
    stretches: tuple[Stretch, ...]
    unused: tuple[MemoryLine, ...]

    @property
    def lanes(self) -> int:
        """Lanes of all groups."""
        return self.plan.lanes * self.groups


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted times and rates of the workload's mean request."""

    request: Request
    tpot_alone: Prediction
    prefill: Prediction
    """Of a prompt alone in its group."""
    busy_lanes: int
    """Lanes of a prefill group that this load keeps busy; targets are judged beside them."""
    prefill_busy: Prediction
    waiting_ttft: Prediction | None
    """Mean TTFT where prefill binds, so that prompts wait for it."""
    handoff: Prediction | None
    curve: tuple[CurvePoint, ...]
    """The knee, `at` and the capacity are among its points."""
    capacity: int
    """Requests that all decode lanes run at once. More may be under way: the others are in prefill, or wait."""
    knee: CurvePoint
    at: CurvePoint
    """At the concurrency that is asked for, else where all lanes are full."""

    @property
    def running(self) -> int:
        """Requests in decode at once that `tpot` is for: no more than prefill feeds."""
        return self.at.running

    @property
    def tpot(self) -> Prediction:
        """Of the load that is sustained."""
        return self.at.tpot

    @property
    def ttft(self) -> Prediction:
        """Of the load that is asked for, on average, without the handoff."""
        return self.waiting_ttft or self.prefill_busy

    @property
    def rows(self) -> tuple[CurvePoint, ...]:
        """About `TABLE_ROWS` points of the curve, spread over it, with every one that a text names."""
        named = {self.capacity, self.knee.concurrency, self.at.concurrency, self.curve[-1].concurrency}
        step = max(1, len(self.curve) // TABLE_ROWS)
        return tuple(point for i, point in enumerate(self.curve) if i % step == 0 or point.concurrency in named)


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """What bandwidth alone predicts of the workload's mean request, on a chip whose FLOPs nobody stated."""

    request: Request
    running: int
    tpot: Prediction
    tpot_alone: Prediction
    handoff: Prediction | None


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """Requests of all decode lanes at once, every one being so long."""

    context_tokens: int
    planned: int
    cut_for_it: int
    """If slots and pages were cut for this context, within the profile's limit."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Everything that is said about one plan."""

    planned: Planned
    plan: Plan
    workload: Workload
    is_assumed: bool
    """Nobody stated the lengths."""
    prefill: RoleOutlook
    decode: RoleOutlook
    speed: Speed | None
    no_speed: str
    """Why there are no predictions, or none but those of `decode_speed`; empty when there are all."""
    misses: tuple[Problem, ...]
    doubts: tuple[Problem, ...]
    """Targets that are met within the prediction's band alone, where nothing else misses them."""
    decode_speed: DecodeSpeed | None = None
    """Where prefill, and so throughput, cannot be predicted, but a decode step can."""
    forecast: Forecast | None = None
    """Times on any layout of these GPUs; None where they are not known."""
    better: str = ""
    """A layout of the same nodes that gives much more output, and the command that shows it."""

    def role(self, role: Role) -> RoleOutlook:
        """One role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def nodes(self) -> int:
        """Nodes of all groups."""
        return sum(each.groups * each.shape.nodes for each in (self.prefill, self.decode))


def assumed_workload(planned: Planned, plan: Plan) -> Workload:
    """What is assumed where nobody stated lengths: requests of the context that the profile sets aside for each."""
    context = min(planned.profile.spec.limits.context_tokens_per_seq, plan.decode.max_model_len)
    prompt, output = assumed_lengths(context)
    return Workload(fixed(prompt), fixed(output))


def assumed_lengths(context: int) -> tuple[int, int]:
    """Prompt and output tokens of a request of so many."""
    output = max(1, context // ASSUMED_OUTPUT_SHARE)
    return max(1, context - output), output


def look_ahead(planned: Planned, stated: Workload | None, *, is_assumed: bool | None = None) -> Outlook:
    """A plan that fits, under a workload, or under the assumed one.

    Raises InvalidSpec when the workload's lengths are beyond the model.
    """
    plan = planned.plan
    assert isinstance(plan, Plan), "what does not fit has no outlook"
    workload = stated or assumed_workload(planned, plan)
    if problems := check_lengths(workload, planned.architecture.max_positions):
        raise InvalidSpec(problems)
    too_long = check_lengths(workload, plan.decode.max_model_len)
    served = workload.within(plan.decode.max_model_len) if not too_long else workload
    forecast, no_speed = _forecast(planned, plan, served)
    roles = {role: _role(planned, plan, role, served, forecast) for role in Role}
    speed = None
    if forecast is not None and not too_long:
        try:
            speed = _speed(roles[Role.PREFILL], roles[Role.DECODE], served, forecast)
        except ValueError as error:
            no_speed = str(error)
    waits, prefill = None, roles[Role.PREFILL]
    if forecast is not None and speed is not None:
        waits = forecast.queued(prefill.shape, prefill.groups, speed.at)
    decode_speed = _decode_speed(planned, plan, roles, served) if forecast is None and not too_long else None
    unsure = rates_warning(planned.profile) if speed or decode_speed else None
    said = (*plan.warnings, *reuse_warnings(served.reuse), *([unsure] if unsure else ()))
    misses, doubts = _told(roles, waits)
    return Outlook(
        planned=planned,
        plan=replace(plan, warnings=tuple(dict.fromkeys(said))),
        workload=served,
        is_assumed=stated is None if is_assumed is None else is_assumed,
        prefill=roles[Role.PREFILL],
        decode=roles[Role.DECODE],
        speed=speed,
        no_speed=no_speed,
        misses=too_long or misses,
        doubts=doubts,
        decode_speed=decode_speed,
        forecast=forecast,
    )


def _told(roles: Mapping[Role, RoleOutlook], waits: Judged | None) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Why the plan's settings do not meet the workload, or barely."""
    outcomes = [role.at_plan for role in roles.values()]
    misses, doubts = told((each for each in outcomes if isinstance(each, Solution)), waits)
    refused = tuple(each for each in outcomes if isinstance(each, Problem))
    return tuple(dict.fromkeys((*refused, *misses))), doubts


def shape_of(planned: Planned, role: Role) -> GroupShape:
    """Shape of a role's groups."""
    spec = planned.deployment.spec.role(role)
    return GroupShape(spec.nodes_per_group, spec.gpus_per_node, spec.tensor_parallel)


def _forecast(planned: Planned, plan: Plan, workload: Workload) -> tuple[Forecast | None, str]:
    """Times by the profile's own calibration, else by the nearest measurements; or why there are none."""
    try:
        return forecast_of(planned.architecture, planned.profile, plan.kv_cache_dtype, workload), ""
    except InvalidSpec as error:
        return None, str(error)


def _role(planned: Planned, plan: Plan, role: Role, workload: Workload, forecast: Forecast | None) -> RoleOutlook:
    of_role, spec = plan.role(role), planned.deployment.spec.role(role)
    shape = shape_of(planned, role)
    lines = tuple(line for line in of_role.lines if line.label not in POOL_LABELS)
    pool = PagePool(of_role.page_size_tokens, of_role.page_bytes, of_role.slot_bytes, slots=of_role.num_state_slots)
    timing: Timing | None = None if forecast is None else forecast.timing(shape, spec.groups)
    case = Case(
        workload=workload,
        role=role,
        lanes=of_role.lanes * spec.groups,
        budget=Budget(planned.profile.spec.gpu.memory, lines, pool),
        most_seqs=of_role.max_num_seqs,
        max_positions=max(of_role.max_model_len, 1),
        timing=timing,
        longest=planned.deployment.spec.model.max_model_len or 1,
    )
    widest = replace(
        case,
        budget=replace(case.budget, design=replace(pool, slots=None)),
        most_seqs=max(planned.profile.spec.limits.max_num_seqs, of_role.max_num_seqs),
    )
    at_plan = solve(case)
    return RoleOutlook(
        plan=of_role,
        groups=spec.groups,
        shape=shape,
        case=case,
        widest=widest,
        at_plan=at_plan,
        best=solve(widest),
        stretches=stretches(_beside_longest(widest)),
        unused=() if isinstance(at_plan, Problem) else unused(case, at_plan),
    )


def _beside_longest(case: Case) -> Case:
    """The same case, which runs no more than leave the stated maxModelLen its pages: stretches ask for each length."""
    needed = case.budget.design.units(case.longest)
    return replace(case, most_seqs=max(1, most(lambda n: case.budget.num_units(n) >= needed, 1, case.most_seqs)))


def _speed(prefill: RoleOutlook, decode: RoleOutlook, workload: Workload, forecast: Forecast) -> Speed:
    """Raises ValueError when a lane cannot hold one such request."""
    request = mean_request(workload)
    sides = (
        forecast.decode_side(decode.shape, decode.groups),
        forecast.prefill_side(prefill.shape, prefill.groups),
    )
    of_lane = Capacity(decode.plan.max_num_seqs, decode.plan.num_pages, decode.plan.page_size_tokens)
    full = max(1, of_lane.running(request)[0] * decode.lanes)
    asked = workload.running or full
    if workload.requests_per_second is not None:
        # `running` is for a token that takes as long as its target allows; what comes is served sooner
        needed = float(workload.requests_per_second) * request.output_tokens
        asked = 1 + bisect_left(
            range(1, asked),
            needed,
            key=lambda at: throughput_curve(sides[0], of_lane, request, (at,), sides[1])[0].tokens_per_second.value,
        )
    concurrencies = {*_spread(1, max(2, 2 * full), CURVE_POINTS), full, asked}
    curve = throughput_curve(sides[0], of_lane, request, sorted(concurrencies), sides[1])
    bend = throughput_curve(sides[0], of_lane, request, {*_bend(curve)} - concurrencies, sides[1])
    curve = tuple(sorted((*curve, *bend), key=lambda point: point.concurrency))
    at = next(point for point in curve if point.concurrency == asked)
    alone = PrefillLoad(*workload.computed_and_reused(workload.prompt.mean), forecast.chunk_tokens)
    busy_lanes = forecast.busy_lanes(sides[1].setup, prefill.groups)
    return Speed(
        request=request,
        tpot_alone=decode_step_ms(sides[0].setup, DecodeLoad(1, request.mean_context), forecast.decode),
        prefill=prefill_ms(sides[1].setup, alone, forecast.prefill),
        busy_lanes=busy_lanes,
        prefill_busy=prefill_ms(sides[1].setup, replace(alone, busy_lanes=busy_lanes), forecast.prefill),
        waiting_ttft=forecast.waiting_ttft(prefill.shape, prefill.groups, at),
        handoff=_handoff(sides[1].setup, request.prompt_tokens),
        curve=curve,
        capacity=full,
        knee=knee(curve),
        at=at,
    )


def _bend(curve: tuple[CurvePoint, ...]) -> Iterator[int]:
    """The loads about the one from which on more of them no longer pay in proportion, between two points."""
    for before, after in itertools.pairwise(curve):
        if before.binds == "concurrency" and after.binds != "concurrency":
            at = after.tokens_per_second.value / before.tokens_per_second.value * before.concurrency
            yield from (math.floor(at), math.ceil(at))


def _decode_speed(
    planned: Planned, plan: Plan, roles: Mapping[Role, RoleOutlook], workload: Workload
) -> DecodeSpeed | None:
    """None where no bandwidth is stated either, and where a lane cannot hold one such request."""
    decode, request = roles[Role.DECODE], mean_request(workload)
    full = _full(decode, request)
    if full < 1:
        return None
    try:
        one_gpu, calibration = decode_forecast(planned.architecture, planned.profile, plan.kv_cache_dtype)
    except InvalidSpec:
        return None
    setups = {role: replace(one_gpu, shape=each.shape) for role, each in roles.items()}
    running = min(workload.running or full, full)
    load = DecodeLoad(-(-running // decode.groups), request.mean_context)
    return DecodeSpeed(
        request=request,
        running=running,
        tpot=decode_step_ms(setups[Role.DECODE], load, calibration),
        tpot_alone=decode_step_ms(setups[Role.DECODE], replace(load, concurrency=1), calibration),
        handoff=_handoff(setups[Role.PREFILL], request.prompt_tokens),
    )


def _full(decode: RoleOutlook, request: Request) -> int:
    """Such requests that all decode lanes run at once."""
    of_lane = Capacity(decode.plan.max_num_seqs, decode.plan.num_pages, decode.plan.page_size_tokens)
    return of_lane.running(request)[0] * decode.lanes


def _handoff(setup: Setup, tokens: int) -> Prediction | None:
    try:
        return handoff_ms(setup, tokens)
    except ValueError:
        return None


def _spread(least: int, most: int, count: int) -> Iterator[int]:
    """Whole numbers from least to most, evenly spaced by ratio."""
    for i in range(count):
        yield round(least * (most / least) ** (i / (count - 1)))


def contexts(outlook: Outlook) -> tuple[ContextPoint, ...]:
    """Requests that all decode lanes hold at once, against the context of each."""
    role, longest = outlook.decode, outlook.plan.decode.max_model_len
    tokens = sorted({*_spread(min(SHORTEST_CONTEXT, longest), longest, CONTEXT_POINTS)})
    return tuple(_context_point(role, context) for context in tokens)


def _context_point(role: RoleOutlook, context: int) -> ContextPoint:
    pages = -(-context // role.plan.page_size_tokens)
    planned = min(role.plan.max_num_seqs, role.plan.num_pages // pages)
    # the whole request is prompt, so that decode holds exactly this context
    work = Workload(fixed(max(1, context - 1)), fixed(1), reuse=Fraction(0))
    cut = solve(replace(role.widest, workload=work, timing=None))
    return ContextPoint(context, planned * role.lanes, cut.running if isinstance(cut, Solution) else 0)
