"""`make_plan`: from architecture, spec and hardware profile to limits and pools, or to why it does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_operator.api.deployment import KimiDeploymentSpec, Role, Transport
from kimi_operator.api.profile import DType, ExpertLayout, HardwareProfile
from kimi_operator.errors import Problem
from kimi_operator.planner.architecture import Architecture


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of a GPU's memory."""

    label: str
    bytes: int
    how: str
    """Arithmetic or source, in words."""


@dataclass(frozen=True, slots=True)
class RolePlan:
    """Limits and pools of one role. A lane's pools lie whole (pages) or by heads (slots) on each of its ranks."""

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What the operator runs a deployment with."""

    architecture: str
    profile: str
    kv_cache_dtype: DType
    experts: ExpertLayout
    transport: Transport
    """MORIIO or NIXL, never AUTO."""
    gpus: int
    """GPUs of all groups of both roles."""
    prefill: RolePlan
    decode: RolePlan

    def role(self, role: Role) -> RolePlan:
        """The plan of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why no plan exists; each problem names a field, its value, what is needed and the nearest remedy."""

    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


def make_plan(architecture: Architecture, spec: KimiDeploymentSpec, profile: HardwareProfile) -> Plan | Infeasible:
    """Plan both roles. Pure; never raises for what a user can write in a valid spec and profile."""
    raise NotImplementedError
