"""Making the outlook of a plan: what binds and where that changes, memory that nothing uses, predicted times. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from msgspec.structs import replace

from kimi_operator.api.deployment import Role
from kimi_operator.cli.figures import with_band
from kimi_operator.cli.manifests import Planned
from kimi_operator.cli.outlook import (
    ContextPoint,
    DecodeSpeed,
    Outlook,
    RoleOutlook,
    Speed,
    assumed_workload,
    shape_of,
)
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Plan
from kimi_operator.planner.budget import Budget, PagePool
from kimi_operator.planner.case import Case, Solution
from kimi_operator.planner.demand import TimingOf, reuse_warnings
from kimi_operator.planner.elsewhere import LOADS
from kimi_operator.planner.feed import MORE_PREFILL
from kimi_operator.planner.objective import Forecast, mean_request
from kimi_operator.planner.predict import (
    PREFILL,
    Capacity,
    CurvePoint,
    Prediction,
    Request,
    curve_of,
    decode_step_ms,
    handoff_ms,
    knee,
    prefill_ms,
)
from kimi_operator.planner.reservation import RESERVATION
from kimi_operator.planner.roofline import DecodeLoad, Setup
from kimi_operator.planner.solve import solve, stretches, unused
from kimi_operator.planner.targets import Verdict, told
from kimi_operator.planner.units import ceil_div, most
from kimi_operator.planner.workload import Workload, check_lengths, fixed
from kimi_operator.profiles.forecast import decode_forecast, forecast_of, timing_of
from kimi_operator.profiles.support import rates_warning

CURVE_POINTS = 28
CONTEXT_POINTS = 40
SHORTEST_CONTEXT = 256


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
    if forecast is not None and stated is None:
        # no request fails that nobody asked for; the plan warns of the longest that may come
        forecast = replace(forecast, reservation_s=None)
    timing = forecast.timing if forecast is not None else _decode_timing(planned, plan, served)
    roles = {role: _role(planned, plan, role, served, timing) for role in Role}
    speed = None
    if forecast is not None and not too_long:
        try:
            speed = _speed(roles[Role.PREFILL], roles[Role.DECODE], served, forecast)
        except ValueError as error:
            no_speed = str(error)
    waits: tuple[Verdict, ...] = ()
    if forecast is not None and speed is not None:
        waits = forecast.queued(roles[Role.PREFILL].shape, roles[Role.PREFILL].groups, speed.at)
    decode_speed = _decode_speed(planned, plan, roles, served) if forecast is None and not too_long else None
    unsure = rates_warning(planned.profile) if speed or decode_speed else None
    said = (*plan.warnings, *reuse_warnings(served.reuse), *([unsure] if unsure else ()))
    misses, doubts = _told(roles, waits)
    nodes = sum(each.groups * each.shape.nodes for each in roles.values())
    crowd = _crowd(speed, roles[Role.PREFILL], served, nodes)
    is_told = any(miss.field in (*LOADS, RESERVATION) for miss in misses)
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
        crowd=() if is_told else tuple(crowd),
        decode_speed=decode_speed,
        forecast=forecast,
    )


def _told(
    roles: Mapping[Role, RoleOutlook], waits: Iterable[Verdict]
) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Why the plan's settings do not meet the workload, or barely."""
    outcomes = [role.at_plan for role in roles.values()]
    misses, doubts = told((each for each in outcomes if isinstance(each, Solution)), waits)
    refused = tuple(each for each in outcomes if isinstance(each, Problem))
    return tuple(dict.fromkeys((*refused, *misses))), doubts


def _forecast(planned: Planned, plan: Plan, workload: Workload) -> tuple[Forecast | None, str]:
    """Times by the profile's own calibration, else by the nearest measurements; or why there are none."""
    try:
        return forecast_of(planned.architecture, planned.profile, plan.kv_cache_dtype, workload), ""
    except InvalidSpec as error:
        return None, str(error)


def _decode_timing(planned: Planned, plan: Plan, workload: Workload) -> TimingOf | None:
    """What bandwidth alone gives; None where nobody stated it."""
    try:
        return timing_of(planned.architecture, planned.profile, plan.kv_cache_dtype, workload)
    except InvalidSpec:
        return None


def _role(planned: Planned, plan: Plan, role: Role, workload: Workload, timing: TimingOf | None) -> RoleOutlook:
    of_role, spec = plan.role(role), planned.deployment.spec.role(role)
    shape = shape_of(planned, role)
    lines = tuple(line for line in of_role.lines if not line.is_pool)
    pool = PagePool(of_role.page_size_tokens, of_role.page_bytes, of_role.slot_bytes, slots=of_role.num_state_slots)
    case = Case(
        workload=workload,
        role=role,
        lanes=of_role.lanes * spec.groups,
        budget=Budget(planned.profile.spec.gpu.memory, lines, pool),
        most_seqs=of_role.max_num_seqs,
        max_positions=max(of_role.max_model_len, 1),
        timing=None if timing is None else timing(shape, spec.groups).of(role),
        longest=planned.deployment.spec.model.max_model_len or 1,
        is_set=True,
    )
    widest = replace(
        case,
        budget=replace(case.budget, design=replace(pool, slots=None)),
        is_set=False,
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
    point = curve_of(sides[0], _of_lane(decode), request, sides[1])
    full, asked = point.running, forecast.clients(point)
    concurrencies = {*_spread(1, max(2, 2 * full), CURVE_POINTS), full, point.held, asked}
    curve = tuple(map(point, sorted(concurrencies)))
    bend = map(point, {*_bend(curve)} - concurrencies)
    curve = tuple(sorted((*curve, *bend), key=lambda each: each.concurrency))
    at = forecast.arriving(next(each for each in curve if each.concurrency == asked))
    alone = request.prefill(forecast.chunk_tokens)
    busy_lanes = min(forecast.busy_lanes(sides[1].setup, prefill.groups), sides[1].busy_lanes(at.held))
    return Speed(
        request=request,
        tpot_alone=decode_step_ms(sides[0].setup, DecodeLoad(1, request.mean_context), forecast.decode),
        prefill=prefill_ms(sides[1].setup, alone, forecast.prefill),
        busy_lanes=busy_lanes,
        prefill_busy=prefill_ms(sides[1].setup, replace(alone, busy_lanes=busy_lanes), forecast.prefill),
        waiting_ttft=forecast.waiting_ttft(prefill.shape, prefill.groups, at),
        arriving_ttft=forecast.arriving_ttft(prefill.shape, prefill.groups),
        handoff=_handoff(sides[1].setup, request.prompt_tokens),
        curve=curve,
        capacity=full,
        knee=knee(curve),
        at=at,
        comes=None
        if workload.requests_per_second is None
        else float(workload.requests_per_second) * request.output_tokens,
    )


def _crowd(speed: Speed | None, prefill: RoleOutlook, workload: Workload, nodes: int) -> Iterator[Problem]:
    """A stated load of which more wait for a lane of prefill than compute on one, where no target says how long."""
    if speed is None or speed.at.binds != PREFILL or workload.concurrency is None or workload.ttft_s is not None:
        return
    waiting = speed.at.concurrency - speed.running - prefill.lanes
    if waiting <= prefill.lanes:
        return
    first = next(point.concurrency for point in speed.curve if point.binds == speed.at.binds)
    expected = (
        f"less than {first:,}, from which on prefill binds: {speed.running:,} decode, {prefill.lanes:,} are in prefill "
        f"and {waiting:,} wait, {with_band(speed.ttft)} to the first token instead of {with_band(speed.prefill_busy)}"
    )
    remedy = f"{MORE_PREFILL}, lower it, or rank other groups and tensorParallel with kimictl plan --search {nodes}"
    yield Problem("workload.concurrency", f"{workload.concurrency:,}", expected, remedy)


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
    load = DecodeLoad(ceil_div(running, decode.groups), request.mean_context)
    return DecodeSpeed(
        request=request,
        running=running,
        tpot=decode_step_ms(setups[Role.DECODE], load, calibration),
        tpot_alone=decode_step_ms(setups[Role.DECODE], replace(load, concurrency=1), calibration),
        handoff=_handoff(setups[Role.PREFILL], request.prompt_tokens),
    )


def _full(decode: RoleOutlook, request: Request) -> int:
    """Such requests that all decode lanes run at once."""
    return _of_lane(decode).running(request)[0] * decode.lanes


def _of_lane(decode: RoleOutlook) -> Capacity:
    plan = decode.plan
    return Capacity(plan.max_num_seqs, plan.num_pages, plan.page_size_tokens, plan.num_state_slots)


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
    pages = ceil_div(context, role.plan.page_size_tokens)
    planned = min(role.plan.max_num_seqs, role.plan.num_pages // pages)
    # the whole request is prompt, so that decode holds exactly this context
    work = Workload(fixed(max(1, context - 1)), fixed(1), reuse=Fraction(0))
    cut = solve(replace(role.widest, workload=work, timing=None))
    return ContextPoint(context, planned * role.lanes, cut.running if isinstance(cut, Solution) else 0)
