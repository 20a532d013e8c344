"""`make_plan`: from architecture, spec and hardware profile to limits and pools, or to why it does not fit."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.deployment import (
    KimiDeploymentSpec,
    KvPrecision,
    Role,
    Transport,
    TransportChoice,
)
from kimi_operator.api.profile import Device, DType, HardwareProfile, HardwareProfileSpec
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.case import Solution
from kimi_operator.planner.demand import (
    Demand,
    Speed,
    binds_text,
    holding,
    lengths_text,
    read_demand,
    shortfalls,
    solve_role,
    unfilled,
)
from kimi_operator.planner.layout import check_layout
from kimi_operator.planner.memory import ExpertFormat, MemoryLine, expert_format
from kimi_operator.planner.pools import Room, Settings, cut_pools, pool_lines, shape_of
from kimi_operator.planner.reservation import late_longest
from kimi_operator.planner.units import counted
from kimi_operator.planner.workload import Workload, fixed

_KV_DTYPES = {KvPrecision.BF16: DType.BFLOAT16, KvPrecision.FP32: DType.FLOAT32}

MAY_SHRINK = (
    "; the plan chose as many as have limits.contextTokensPerSeq each: with more memory it may choose more and leave "
    "fewer KV pages; set maxNumSeqs to keep both as they are"
)
"""All memory is used, so pages cannot rise with it at every step where the running requests do too."""


class RolePlan(Struct, frozen=True):
    """Limits and pools of one role. A lane's pages lie whole on each of its ranks, its slots by heads."""

    role: Role
    ranks: int
    """Ranks of a group; also the size of expert parallelism."""
    lanes: int
    experts_per_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size_tokens: int
    page_bytes: int
    num_state_slots: int
    slot_bytes: int
    lines: tuple[MemoryLine, ...]
    """Everything on one GPU, pools and what stays free included; sums to the GPU's memory."""
    binds: str
    """What limits concurrency, and from which context on."""


class Plan(Struct, frozen=True):
    """What the operator runs a deployment with."""

    architecture: str
    profile: str
    dtype: DType
    """Activations, and weights that are no routed experts."""
    kv_cache_dtype: DType
    experts: ExpertFormat
    transport: Transport
    gpus: int
    """GPUs of all groups of both roles."""
    prefill: RolePlan
    decode: RolePlan
    workload: str = ""
    """Lengths that were planned for; empty where none are stated."""
    warnings: tuple[str, ...] = ()
    """What to say beside the plan, such as targets that it misses."""
    misses: tuple[str, ...] = ()
    """Of the warnings, those of what its workload misses, or barely meets."""

    def role(self, role: Role) -> RolePlan:
        """The plan of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


class Infeasible(Struct, frozen=True):
    """Why no plan exists; each problem names a field, its value, what is needed and the nearest remedy."""

    problems: tuple[Problem, ...]
    is_wrong: bool = False
    """Sizes that contradict the model, the profile's nodes or each other: no memory would make a plan of them."""

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


class _Cut(Struct, frozen=True):
    """The pools of a role, and how they were solved; None where no workload is stated."""

    room: Room
    solution: Solution | None


def make_plan(
    architecture: Architecture, spec: KimiDeploymentSpec, profile: HardwareProfile, speed: Speed | None = None
) -> Plan | Infeasible:
    """Plan both roles. Pure; never raises for what a user can write in a valid spec and profile.

    With spec.workload, running requests of a lane are solved for it; its targets need `speed`, the predictions. What
    is stated is served or refused: model.maxModelLen, or else the workload's longest request, is held by both roles.
    Beyond that nothing is promised: slots are filled first, so more memory may buy running requests and leave fewer
    pages, and with them a shorter longest request. A role whose running requests the plan chooses says so.
    """
    settings, problems = _settings(architecture, spec, profile.spec)
    problems += check_layout(architecture, spec, profile.spec)
    demand = None
    try:
        demand = read_demand(settings, speed)
    except InvalidSpec as error:
        problems += error.problems
    if problems:
        return Infeasible(problems, is_wrong=True)
    if demand is not None:
        if too_long := demand.too_long(settings):
            return Infeasible(too_long)
        settings = holding(settings, demand.workload)
    cuts = [_cut(settings, role, demand) for role in Role]
    problems = tuple(cut for cut in cuts if isinstance(cut, Problem))
    if problems:
        return Infeasible(problems)
    plan = _plan(settings, profile, [cut for cut in cuts if isinstance(cut, _Cut)], demand)
    late = None if speed is None else _late(settings, plan, speed)
    return plan if late is None else replace(plan, warnings=(*plan.warnings, str(late)))


def _late(s: Settings, plan: Plan, speed: Speed) -> Problem | None:
    """Why the longest request that the plan admits may come to nothing; None where nothing predicts times."""
    prompt = fixed(max(1, plan.prefill.max_model_len - 1))
    try:
        timing = speed(s.kv_dtype, Workload(prompt, fixed(1), concurrency=1))
    except InvalidSpec:
        return None
    of_prefill = timing(shape_of(s, Role.PREFILL), 1).of(Role.PREFILL)
    return None if of_prefill is None else late_longest(plan.prefill.max_model_len, of_prefill)


def _cut(s: Settings, role: Role, demand: Demand | None) -> _Cut | Problem:
    room = cut_pools(s, role)
    if isinstance(room, Problem) or demand is None:
        return room if isinstance(room, Problem) else _Cut(room, None)
    # Pools that are cut hold the longest request, and the solver asks no more of them.
    solution = solve_role(s, room, demand)
    assert isinstance(solution, Solution), solution
    solved = cut_pools(s, role, solution.max_num_seqs)
    assert isinstance(solved, Room), solved
    return _Cut(solved, solution)


def _settings(
    a: Architecture, spec: KimiDeploymentSpec, profile: HardwareProfileSpec
) -> tuple[Settings, tuple[Problem, ...]]:
    runtime, problems = profile.runtime, []
    choice = spec.handoff.transport
    transport = profile.fabric.transport if choice is TransportChoice.AUTO else Transport(choice.value)
    if transport is Transport.MORIIO and runtime.device is Device.CPU:
        problems.append(
            Problem(
                "spec.handoff.transport", "MoRIIO", "NIXL on a profile whose runtime.device is cpu", "set NIXL or Auto"
            )
        )
    return Settings(a, spec, profile, kv_dtype_of(spec, profile), transport, spec.model.max_model_len or 1), tuple(
        problems
    )


def kv_dtype_of(spec: KimiDeploymentSpec, profile: HardwareProfileSpec) -> DType:
    """What cached MLA rows are kept in: as the deployment says, else as the profile does."""
    return _KV_DTYPES.get(spec.precision.kv_cache, profile.runtime.kv_cache_dtype)


def _plan(s: Settings, profile: HardwareProfile, cuts: list[_Cut], demand: Demand | None) -> Plan:
    limits, a, rooms = s.profile.limits, s.architecture, [cut.room for cut in cuts]
    shared = min(room.num_pages for room in rooms) * limits.page_size_tokens
    max_model_len = s.spec.model.max_model_len or min(shared, a.max_positions)
    plans = {cut.room.role: _role_plan(s, cut, max_model_len, demand) for cut in cuts}
    gpus = sum(s.spec.role(room.role).groups * room.shape.ranks for room in rooms)
    warnings, misses = _said(s, cuts, demand)
    return Plan(
        architecture=a.name,
        profile=profile.metadata.name,
        dtype=s.profile.runtime.dtype,
        kv_cache_dtype=s.kv_dtype,
        experts=expert_format(s.profile.runtime),
        transport=s.transport,
        gpus=gpus,
        prefill=plans[Role.PREFILL],
        decode=plans[Role.DECODE],
        workload=lengths_text(demand.workload) if demand else "",
        warnings=warnings,
        misses=misses,
    )


def _said(s: Settings, cuts: list[_Cut], demand: Demand | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to say of a workload, and of that what it misses."""
    if demand is None:
        return (), ()
    solved = [(cut.room, demand, cut.solution) for cut in cuts if cut.solution is not None]
    misses = tuple(str(problem) for each in solved for problem in shortfalls(s, *each))
    too_many = (unfilled(s, *each) for each in solved)
    return (*demand.warnings, *misses, *(str(problem) for problem in too_many if problem is not None)), misses


def _role_plan(s: Settings, cut: _Cut, max_model_len: int, demand: Demand | None) -> RolePlan:
    limits, a, room = s.profile.limits, s.architecture, cut.room
    budget = limits.prefill_batched_tokens if room.role is Role.PREFILL else limits.decode_batched_tokens
    context = room.num_pages * limits.page_size_tokens // room.max_num_seqs
    return RolePlan(
        role=room.role,
        ranks=room.shape.ranks,
        lanes=room.shape.lanes,
        experts_per_rank=a.num_experts // room.shape.ranks,
        max_num_seqs=room.max_num_seqs,
        max_num_batched_tokens=max(budget, room.max_num_seqs),
        max_model_len=max_model_len,
        num_pages=room.num_pages,
        page_size_tokens=limits.page_size_tokens,
        page_bytes=room.units.page_bytes,
        num_state_slots=room.num_state_slots,
        slot_bytes=room.units.slot_bytes,
        lines=room.lines + pool_lines(s, room),
        binds=binds_text(demand, cut.solution) if demand and cut.solution else _binds(s, room, context, max_model_len),
    )


def _binds(s: Settings, room: Room, context: int, max_model_len: int) -> str:
    seqs = f"maxNumSeqs ({room.max_num_seqs} a lane, {room.max_num_seqs * room.shape.lanes} a group)"
    where = (
        "at every context"
        if context >= max_model_len
        else f"up to {counted(context, 'token')} a request, KV pages above"
    )
    grows = s.spec.role(room.role).max_num_seqs is None and room.max_num_seqs < s.profile.limits.max_num_seqs
    return f"{seqs} binds {where}{MAY_SHRINK if grows else ''}"
