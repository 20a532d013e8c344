"""Cutting a GPU's free memory into state slots and KV pages, or saying with the arithmetic why it cannot be cut."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_operator.api.deployment import KimiDeploymentSpec, Role, RoleSpec, Transport
from kimi_operator.api.profile import Device, DType, HardwareProfileSpec
from kimi_operator.errors import Problem
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.layout import nearest_layout
from kimi_operator.planner.memory import (
    ITEMSIZE,
    ExpertFormat,
    GroupShape,
    MemoryLine,
    page_bytes,
    reserve_lines,
    row_bytes,
    slot_bytes,
    weight_lines,
)
from kimi_operator.planner.tensors import Tensor
from kimi_operator.planner.units import bytes_text


@dataclass(frozen=True, slots=True)
class Settings:
    """Inputs with every Auto resolved."""

    architecture: Architecture
    tensors: tuple[Tensor, ...]
    spec: KimiDeploymentSpec
    profile: HardwareProfileSpec
    kv_dtype: DType
    transport: Transport

    @property
    def expert_format(self) -> ExpertFormat:
        """How the worker holds routed experts on this device."""
        if self.profile.runtime.device is Device.CUDA:
            return ExpertFormat.MXFP4
        # A CPU takes longer to decode a weight than to multiply with it: the worker decodes them once, at load.
        return ExpertFormat.FLOAT32 if self.profile.runtime.dtype is DType.FLOAT32 else ExpertFormat.BFLOAT16


@dataclass(frozen=True, slots=True)
class Room:
    """A GPU of one role before its pools are cut, and the number of requests they are cut for."""

    role: Role
    shape: GroupShape
    lines: tuple[MemoryLine, ...]
    free: int
    max_num_seqs: int
    num_state_slots: int
    slot_bytes: int
    num_pages: int
    page_bytes: int


def cut_pools(s: Settings, role: Role) -> Room | Problem:
    """Cut the pools of one role, or say with the arithmetic why they cannot be cut."""
    role_spec, a, limits = s.spec.role(role), s.architecture, s.profile.limits
    shape = GroupShape(role_spec.nodes_per_group, role_spec.gpus_per_node, role_spec.tensor_parallel)
    lines = fixed_lines(s, shape)
    free = s.profile.gpu.memory - sum(line.bytes for line in lines)
    slot = slot_bytes(a, shape.tensor_parallel, s.profile.runtime.dtype)
    page = page_bytes(a, limits.page_size_tokens, s.kv_dtype)
    pages_needed = -(-(s.spec.model.max_model_len or limits.page_size_tokens) // limits.page_size_tokens)
    if free < 2 * slot + pages_needed * page:
        return _too_small(s, role, shape, (free, slot, page, pages_needed))
    seqs = role_spec.max_num_seqs or _choose_seqs(s, free - pages_needed * page, slot, page)
    slots = num_slots(seqs)
    pages = (free - slots * slot) // page
    if pages < pages_needed:
        return _too_many(role, role_spec, (free - pages_needed * page, slot, slots))
    return Room(role, shape, lines, free, seqs, slots, slot, pages, page)


def fixed_lines(s: Settings, shape: GroupShape) -> tuple[MemoryLine, ...]:
    """What is spent before any pool: weights and reserves."""
    weights = weight_lines(s.architecture, s.tensors, shape, s.expert_format, s.profile.runtime.dtype)
    return weights + reserve_lines(s.profile)


def num_slots(max_num_seqs: int) -> int:
    """Running requests, and a quarter more (at least one) for those that a handoff has reserved."""
    return max_num_seqs + max(1, -(-max_num_seqs // 4))


def _choose_seqs(s: Settings, spare: int, slot: int, page: int) -> int:
    """As many as have a slot and the profile's context each; `spare` is free above one request of the longest."""
    limits = s.profile.limits
    context_pages = -(-limits.context_tokens_per_seq // limits.page_size_tokens)
    for seqs in range(limits.max_num_seqs, 1, -1):
        if num_slots(seqs) * slot + (seqs - 1) * context_pages * page <= spare:
            return seqs
    return 1


def _too_small(s: Settings, role: Role, shape: GroupShape, need: tuple[int, int, int, int]) -> Problem:
    """The GPU cannot hold even one request of the longest length."""
    free, slot, page, pages_needed = need
    weights = sum(line.bytes for line in fixed_lines(s, shape) if line.is_weights)
    reserved = sum(line.bytes for line in fixed_lines(s, shape) if not line.is_weights)
    have = s.profile.gpu.memory
    got = (
        f"{shape}: {bytes_text(weights)} of weights + {bytes_text(reserved)} reserved + "
        f"{bytes_text(2 * slot + pages_needed * page)} for one request a GPU"
    )
    fits = nearest_layout(
        s.architecture,
        shape,
        s.profile.gpu.per_node,
        lambda other: (
            sum(line.bytes for line in fixed_lines(s, other))
            + 2 * slot_bytes(s.architecture, other.tensor_parallel, s.profile.runtime.dtype)
            + pages_needed * page
            <= have
        ),
    )
    longest = (free - 2 * slot) // page * s.profile.limits.page_size_tokens
    if longest > 0:
        remedy = f"lower spec.model.maxModelLen to {longest:,}"
        remedy += f", or use the nearest layout that fits: {fits}" if fits else ""
    elif fits:
        remedy = f"use the nearest layout that fits: {fits}"
    else:
        remedy = "no layout of up to 64 nodes fits; choose a profile with more memory a GPU or lower its reserves"
    return Problem(f"spec.{role}", got, f"at most {bytes_text(have)}, the memory of a GPU", remedy)


def _too_many(role: Role, role_spec: RoleSpec, need: tuple[int, int, int]) -> Problem:
    """One longest request fits, but not beside the slots of all running requests."""
    spare, slot, slots = need
    affordable = max(
        seqs for seqs in range(1, role_spec.max_num_seqs or 2) if seqs == 1 or num_slots(seqs) * slot <= spare
    )
    return Problem(
        f"spec.{role}.maxNumSeqs",
        f"{role_spec.max_num_seqs}: {slots} state slots of {bytes_text(slot)} need {bytes_text(slots * slot)} a GPU",
        f"at most {bytes_text(spare)}, what weights, reserves and one request of maxModelLen leave",
        f"lower it to {affordable} or lower spec.model.maxModelLen",
    )


def pool_lines(s: Settings, room: Room) -> tuple[MemoryLine, ...]:
    slots, pages = room.num_state_slots * room.slot_bytes, room.num_pages * room.page_bytes
    row = row_bytes(s.architecture, ITEMSIZE[s.kv_dtype])
    return (
        MemoryLine(
            "state slots",
            slots,
            f"({room.max_num_seqs} running + {room.num_state_slots - room.max_num_seqs} reserved by handoffs) "
            f"x {room.slot_bytes:,} B",
        ),
        MemoryLine(
            "KV pages",
            pages,
            f"{room.num_pages:,} pages x {s.profile.limits.page_size_tokens} tokens x {row:,} B ({s.kv_dtype})",
        ),
        MemoryLine("free", room.free - slots - pages, "less than one page"),
    )
