"""The values that a status is made of: one look at a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import GroupState, MeasuredPools, PlanStatus
from kimi_operator.decide.groups import GroupDecision, GroupWanted
from kimi_operator.observe import Observed
from kimi_operator.render.names import GroupKey


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a spec is not acted on, or an object was not taken."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Look:
    """Everything that a status is made of."""

    name: str
    namespace: str
    generation: int
    now_s: float
    seen: Observed
    previous: Mapping[str, Any] = field(default_factory=dict)
    """The status as it stands, for its transition times."""
    refusal: Refusal | None = None
    """The spec is not acted on; what runs goes on."""
    apply_refusal: Refusal | None = None
    """The API server did not take an object."""
    delay: Refusal | None = None
    """The API server did not answer, or not yet: what could not be done is tried again."""
    plan: PlanStatus | None = None
    wanted: Sequence[GroupWanted] = ()
    decisions: Mapping[GroupKey, GroupDecision] = field(default_factory=dict)
    measured: Mapping[GroupKey, MeasuredPools] = field(default_factory=dict)
    revision: str = ""
    revisions: Mapping[Role, str] = field(default_factory=dict)
    desired: Mapping[Role, int] = field(default_factory=dict)
    """Groups that the spec asks for, by role."""
    router_replicas: int = 0
    shortage: str | None = None
    foreign_hardware: str = ""
    """What is wrong with nodes that pods run on, by their labels."""
    is_paused: bool = False
    is_suspended: bool = False

    def of(self, role: Role) -> list[GroupDecision]:
        """The decisions of a role, by index."""
        return [self.decisions[key] for key in sorted(self.decisions) if key.role is role]

    def is_updated(self, key: GroupKey) -> bool:
        """Whether a group exists at the revision that it should have."""
        wanted = {group.key: group.revision for group in self.wanted}
        seen = self.seen.groups.get(key)
        return seen is not None and seen.revision == wanted.get(key)

    def is_ready(self, key: GroupKey) -> bool:
        """Whether a group serves at the revision that it should have."""
        return self.decisions[key].state is GroupState.READY and self.is_updated(key)
