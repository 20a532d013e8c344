"""Cutting a GPU's free memory into state slots and KV pages, or saying with the arithmetic why it cannot be cut."""

from __future__ import annotations

from msgspec import Struct

from kimi_operator.api.deployment import KimiDeploymentSpec, Role, Transport
from kimi_operator.api.profile import DType, HardwareProfileSpec, LimitsSpec
from kimi_operator.errors import Problem
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.layout import nearest_layouts
from kimi_operator.planner.memory import (
    ITEMSIZE,
    GroupShape,
    MemoryLine,
    expert_format,
    page_bytes,
    reserve_lines,
    row_bytes,
    slot_bytes,
    weight_lines,
)
from kimi_operator.planner.overflow import find_overflow, nearest_text, nearest_texts
from kimi_operator.planner.units import bytes_text, ceil_div, counted


class Settings(Struct, frozen=True):
    """Inputs with every Auto resolved."""

    architecture: Architecture
    spec: KimiDeploymentSpec
    profile: HardwareProfileSpec
    kv_dtype: DType
    transport: Transport
    longest: int = 1
    """Tokens of a request that a lane of either role must hold: maxModelLen, else the workload's longest."""
    shorten: str = "lower spec.model.maxModelLen to"
    """What makes it shorter."""


class Units(Struct, frozen=True):
    """What pools are cut from and into, on one GPU, in bytes."""

    free: int
    slot_bytes: int
    page_bytes: int
    pages_needed: int
    """Pages of one request of the longest length."""

    @property
    def one_request(self) -> int:
        """The least that makes sense: one longest request, and a slot for the next one's handoff."""
        return num_slots(1) * self.slot_bytes + self.pages_needed * self.page_bytes

    def num_pages(self, max_num_seqs: int) -> int:
        """Whole pages beside the slots of so many running requests."""
        return whole_units(self.free, num_slots(max_num_seqs) * self.slot_bytes, self.page_bytes)

    def holds(self, max_num_seqs: int) -> bool:
        """Whether one longest request fits beside the slots of so many running ones."""
        return self.num_pages(max_num_seqs) >= self.pages_needed


class Room(Struct, frozen=True):
    """The pools of one role."""

    role: Role
    shape: GroupShape
    lines: tuple[MemoryLine, ...]
    units: Units
    max_num_seqs: int
    num_state_slots: int
    num_pages: int


def cut_pools(s: Settings, role: Role, num_seqs: int | None = None) -> Room | Problem:
    """Cut the pools of one role, or say with the arithmetic why they cannot be cut.

    Running requests of a lane are those that the spec states, else `num_seqs`, else as many as have the context that
    the profile sets aside for each.
    """
    role_spec = s.spec.role(role)
    shape = shape_of(s, role)
    units = measure(s, shape)
    if not units.holds(1):
        return _too_small(s, role, shape, units)
    seqs = role_spec.max_num_seqs or num_seqs or seqs_by_context(s.profile.limits, s.spec.model.max_model_len, units)
    if not units.holds(seqs):
        return _too_many(s, role, seqs, units)
    return Room(role, shape, fixed_lines(s, shape), units, seqs, num_slots(seqs), units.num_pages(seqs))


def measure(s: Settings, shape: GroupShape) -> Units:
    """What a layout leaves free, and the sizes of slots and pages in it."""
    page_size = s.profile.limits.page_size_tokens
    return Units(
        free=s.profile.gpu.memory - sum(line.bytes for line in fixed_lines(s, shape)),
        slot_bytes=slot_bytes(s.architecture, shape.tensor_parallel, s.profile.runtime.dtype),
        page_bytes=page_bytes(s.architecture, page_size, s.kv_dtype),
        pages_needed=ceil_div(s.longest, page_size),
    )


def fixed_lines(s: Settings, shape: GroupShape) -> tuple[MemoryLine, ...]:
    """What is spent before any pool: weights and reserves."""
    runtime = s.profile.runtime
    weights = weight_lines(s.architecture, shape, expert_format(runtime), runtime.dtype)
    return weights + reserve_lines(s.profile)


def num_slots(max_num_seqs: int) -> int:
    """Running requests, and a quarter more (at least one) for those that a handoff has reserved."""
    return max_num_seqs + max(1, ceil_div(max_num_seqs, 4))


def whole_units(free: int, fixed: int, unit: int) -> int:
    """Pages or blocks of `unit` bytes that fit beside what is `fixed`; 0 when not even that fits."""
    return max(0, (free - fixed) // unit)


def context_of_each(limits: LimitsSpec, max_model_len: int | None) -> int:
    """Tokens that are set aside a running request: those of the profile, and no more than a request may have."""
    return min(limits.context_tokens_per_seq, max_model_len or limits.context_tokens_per_seq)


def seqs_by_context(limits: LimitsSpec, max_model_len: int | None, units: Units) -> int:
    """As many as have a slot and their context each, beside nothing else; at least one."""
    context_pages = ceil_div(context_of_each(limits, max_model_len), limits.page_size_tokens)
    for seqs in range(limits.max_num_seqs, 1, -1):
        pages = max(units.pages_needed, seqs * context_pages)
        if num_slots(seqs) * units.slot_bytes + pages * units.page_bytes <= units.free:
            return seqs
    return 1


def _too_small(s: Settings, role: Role, shape: GroupShape, units: Units) -> Problem:
    """The GPU cannot hold even one request of the longest length."""
    lines = fixed_lines(s, shape)
    weights = sum(line.bytes for line in lines if line.is_weights)
    reserved = sum(line.bytes for line in lines) - weights
    overflow = find_overflow(s.profile.gpu.memory, (*lines, MemoryLine("one request", units.one_request, "")))
    assert overflow is not None, units
    got = (
        f"{shape}: {bytes_text(weights)} of weights + {bytes_text(reserved)} reserved + "
        f"{bytes_text(units.one_request)} for one request of {counted(s.longest, 'token')} a GPU"
    )
    return Problem(f"spec.{role}", got, str(overflow), _remedy(s, role))


def _remedy(s: Settings, role: Role) -> str:
    # Beside the running requests that the spec asks for, or following this would only bring the next refusal.
    length = longest_served(s)
    remedies = []
    if length > 0:
        remedies.append(f"{s.shorten} {length:,}")
    nearest = _nearest(s, role)
    if nearest is not None or not remedies:
        remedies.append(nearest or nearest_text(None))
    return ", or ".join(remedies)


def _nearest(s: Settings, role: Role) -> str | None:
    """The nearest layout of a role, and of the other where that must change too although it fits."""

    def fits(shape: GroupShape) -> bool:
        return measure(s, shape).holds(1)

    wanted = {each: shape_of(s, each) for each in Role}
    nearest = nearest_layouts(s.architecture, wanted, s.profile.gpu.per_node, fits)
    if nearest is None:
        return None
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    # A role that does not fit says for itself what it needs.
    if nearest[other] == wanted[other] or not fits(wanted[other]):
        return nearest_text(nearest[role])
    return nearest_texts(nearest[role], other, nearest[other])


def longest_served(s: Settings) -> int:
    """Tokens of the longest request that both roles hold beside the slots of stated running ones; 0 or less if none."""
    return min(_longest(s, role) for role in Role)


def _longest(s: Settings, role: Role) -> int:
    units, slots = measure(s, shape_of(s, role)), num_slots(s.spec.role(role).max_num_seqs or 1)
    return (units.free - slots * units.slot_bytes) // units.page_bytes * s.profile.limits.page_size_tokens


def shape_of(s: Settings, role: Role) -> GroupShape:
    """Shape of a role's groups."""
    role_spec = s.spec.role(role)
    return GroupShape(role_spec.nodes_per_group, role_spec.gpus_per_node, role_spec.tensor_parallel)


def _too_many(s: Settings, role: Role, seqs: int, units: Units) -> Problem:
    """One longest request fits, but not beside the slots of all running requests."""
    spare = units.free - units.pages_needed * units.page_bytes
    most = max(n for n in range(1, seqs) if units.holds(n))
    need, length = num_slots(seqs) * units.slot_bytes, longest_served(s)
    shorter = f" or {s.shorten} {length:,}" if length > 0 else ""
    return Problem(
        f"spec.{role}.maxNumSeqs",
        f"{seqs}: {num_slots(seqs)} state slots of {bytes_text(units.slot_bytes)} need {need:,} B a GPU",
        f"at most {spare:,} B, what weights, reserves and one request of {counted(s.longest, 'token')} leave",
        f"lower it to {most}{shorter}",
    )


def pool_lines(s: Settings, room: Room) -> tuple[MemoryLine, ...]:
    slots, pages = room.num_state_slots * room.units.slot_bytes, room.num_pages * room.units.page_bytes
    row, page = row_bytes(s.architecture, ITEMSIZE[s.kv_dtype]), counted(s.profile.limits.page_size_tokens, "token")
    return (
        MemoryLine(
            "state slots",
            slots,
            f"({room.max_num_seqs} running + {room.num_state_slots - room.max_num_seqs} reserved by handoffs) "
            f"x {room.units.slot_bytes:,} B",
        ),
        MemoryLine(
            "KV pages",
            pages,
            f"{counted(room.num_pages, 'page')} x {page} x {row:,} B ({s.kv_dtype})",
        ),
        MemoryLine(
            "free",
            room.units.free - slots - pages,
            f"{room.units.free:,} B - {slots:,} B - {pages:,} B: less than one page",
            stays_free=True,
        ),
    )
