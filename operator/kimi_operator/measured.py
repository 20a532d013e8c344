"""Pure: where what the workers report is not what was planned for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kimi_operator.api.deployment import Role
from kimi_operator.api.status import MeasuredPools, PlanStatus, RolePlanStatus
from kimi_operator.look import Look
from kimi_operator.planner.units import bytes_text
from kimi_operator.render.names import GroupKey

DRIFT = 0.02
"""By this fraction a figure may differ from its plan before it is said: pools and weights of their own plan, free
memory of the GPU's memory, since little is meant to stay free."""


class Measured(Enum):
    """What was measured."""

    POOL = "pool"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Drift:
    """One figure of a group that differs by more than DRIFT."""

    key: GroupKey
    what: Measured
    label: str
    have: int
    planned: int
    whole: int
    """What the difference is a part of."""
    more_is_worse: bool = False

    @property
    def is_worse(self) -> bool:
        """Whether it leaves less than was planned."""
        return self.have > self.planned if self.more_is_worse else self.have < self.planned

    def __str__(self) -> str:
        have, planned = f"{self.have}", f"{self.planned}"
        if self.what is Measured.MEMORY:
            have, planned = bytes_text(self.have), bytes_text(self.planned)
        share = f"{(self.have - self.planned) / self.whole:+.1%}" if self.whole else "nothing"
        of = f" of its {bytes_text(self.whole)}" if self.whole not in (0, self.planned) else ""
        return f"{self.key.role} group {self.key.group}: {have} {self.label}, planned {planned} ({share}{of})"


def find_drifts(look: Look) -> list[Drift]:
    """Every figure of the groups at the planned revision that is off; others run another plan."""
    if look.plan is None:
        return []
    return [
        drift
        for key, measured in sorted(look.measured.items())
        if look.is_updated(key)
        for drift in _figures(key, measured, look.plan)
        if abs(drift.have - drift.planned) > DRIFT * drift.whole
    ]


def _figures(key: GroupKey, measured: MeasuredPools, plan: PlanStatus) -> Iterator[Drift]:
    role: RolePlanStatus = plan.prefill if key.role is Role.PREFILL else plan.decode
    for label, have, planned in (
        ("KV pages a lane", measured.num_pages, role.num_pages),
        ("state slots a lane", measured.num_state_slots, role.num_state_slots),
        ("maxNumSeqs a lane", measured.max_num_seqs, role.max_num_seqs),
    ):
        yield Drift(key, Measured.POOL, label, have, planned, planned)
    if role.weights_bytes is not None and measured.weights_bytes:
        have, planned = measured.weights_bytes, role.weights_bytes
        yield Drift(key, Measured.MEMORY, "of weights a GPU", have, planned, planned, more_is_worse=True)
    if role.free_bytes is not None and plan.gpu_memory_bytes and measured.free_bytes is not None:
        yield Drift(key, Measured.MEMORY, "free on a GPU", measured.free_bytes, role.free_bytes, plan.gpu_memory_bytes)
