"""Status of a KimiDeployment: what the operator last saw. Fast-changing numbers belong in metrics, not here."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints

from kimi_operator.api.base import ApiModel
from kimi_operator.api.conditions import ConditionType, Reason

Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, StringConstraints(max_length=1024)]
ShortText = Annotated[str, StringConstraints(max_length=253)]
Time = Annotated[str, StringConstraints(max_length=64)]
ONE_VALUE: dict[str, JsonValue] = {"x-kubernetes-map-type": "atomic"}
"""Has one writer and is replaced as a whole: otherwise the API server tracks an owner for each field below it."""


class StatusModel(ApiModel):
    """Status may have been written by a newer operator: what is unknown is left unread."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """One condition, as in the API conventions."""

    type: ConditionType = Field(description="What the condition is about.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Reason = Field(description="Why, in one word of a fixed vocabulary.")
    message: Annotated[str, StringConstraints(max_length=4096)] = Field(
        default="", description="Why, in a sentence with numbers."
    )
    observed_generation: Count = Field(description="Generation of the spec that this was seen for.")
    last_transition_time: Time = Field(description="When status last changed (RFC 3339).")


class GroupState(StrEnum):
    """Where a group is in its life."""

    PENDING = "Pending"
    STARTING = "Starting"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"


class Failure(StatusModel):
    """Why a group was last restarted or given up."""

    time: Time = Field(description="When it was seen (RFC 3339).")
    pod: ShortText = Field(default="", description="Pod that failed first.")
    message: Annotated[str, StringConstraints(max_length=2048)] = Field(description="What the pod said last.")


class MeasuredFabric(StatusModel):
    """What the decode pods of a group report about test writes between their lanes and those of prefill."""

    peers: Count = Field(description="Pairs of a decode pod and a prefill lane.")
    verified: Count = Field(description="Pairs whose pattern was written, and read back equal.")
    error: Text = Field(default="", description="What the first pod that failed says, after its name.")

    @property
    def is_verified(self) -> bool:
        """Whether there are peers and all of them are reached."""
        return not self.error and self.verified >= self.peers > 0


class MeasuredPools(StatusModel):
    """What the workers of a group report once loaded; the smallest lane counts."""

    num_pages: Count = Field(description="KV pages of a lane.")
    num_state_slots: Count = Field(description="State slots of a lane.")
    max_num_seqs: Count = Field(description="Running requests a lane.")
    weights_bytes: Count = Field(description="Weights of a GPU, in bytes; of the fullest pod.")
    free_bytes: Count | None = Field(
        default=None,
        description="Left of a GPU once its largest steps have run, in bytes; of the fullest pod. Absent where the "
        "device cannot tell.",
    )
    fabric: MeasuredFabric | None = Field(
        default=None, description="Test writes; absent of prefill groups, into which nobody writes."
    )


class GroupStatus(StatusModel):
    """One group of ranks."""

    index: Count = Field(description="Index of the group within its role.")
    state: GroupState = Field(description="Pending, Starting, Ready, Draining or Failed.")
    generation: Count = Field(description="Counts the starts of the group from 1.")
    restarts: Count = Field(default=0, description="Restarts since the group was first started.")
    revision: ShortText = Field(default="", description="Revision that its pods run.")
    ready_pods: Count = Field(default=0, description="Pods that are ready.")
    last_failure: Failure | None = Field(default=None, description="Why it was last restarted.")
    next_restart_time: Time | None = Field(default=None, description="When back-off ends (RFC 3339).")
    measured: MeasuredPools | None = Field(default=None, description="Real pools, as the workers report them.")


class RoleStatus(StatusModel):
    """One role, counted in groups."""

    desired: Count = Field(default=0, description="Groups asked for.")
    current: Count = Field(default=0, description="Groups that exist.")
    ready: Count = Field(default=0, description="Groups ready at the current revision.")
    updated: Count = Field(default=0, description="Groups at the current revision.")
    summary: ShortText = Field(default="", description="ready/desired, for the printer column.")
    revision: ShortText = Field(default="", description="Revision that groups of this role should run.")
    selector: ShortText = Field(default="", description="Label selector of this role's pods.")
    blocked: Text = Field(default="", description="What keeps groups from starting, in words.")
    groups: tuple[GroupStatus, ...] = Field(default=(), max_length=64, description="Each group.")


class MemoryLineStatus(StatusModel):
    """One line of a GPU's memory: label, bytes, and where the number comes from."""

    label: ShortText = Field(description="What lies there.")
    bytes: int = Field(description="Bytes a GPU.")
    how: Text = Field(default="", description="Arithmetic or source.")


class RolePlanStatus(StatusModel):
    """What the planner derived for a role."""

    ranks: Count = Field(description="Ranks of a group; also the size of expert parallelism.")
    lanes: Count = Field(description="Lanes of a group.")
    experts_per_rank: Count = Field(description="Routed experts of a layer that a rank holds.")
    max_num_seqs: Count = Field(description="Running requests a lane.")
    max_num_batched_tokens: Count = Field(description="Tokens of one step of a lane.")
    max_model_len: Count = Field(description="Longest prompt plus answer, in tokens.")
    num_pages: Count = Field(description="KV pages of a lane.")
    page_size_tokens: Count = Field(description="Tokens of a page.")
    num_state_slots: Count = Field(description="State slots of a lane, those reserved by handoffs included.")
    weights_bytes: Count | None = Field(default=None, description="Weights of a GPU, in bytes.")
    free_bytes: Count | None = Field(
        default=None, description="Left of a GPU while the workers run, in bytes: what no line of the plan spends."
    )
    kv_pool: ShortText = Field(default="", description="Pages and slots of a GPU together, for the printer column.")
    binds: Text = Field(default="", description="What limits concurrency, and from which context on.")
    lines: tuple[MemoryLineStatus, ...] = Field(default=(), max_length=32, description="Memory of a GPU, line by line.")


class PlanStatus(StatusModel):
    """The plan, with its inputs beside it."""

    architecture: ShortText = Field(description="Architecture that was planned for.")
    profile: ShortText = Field(description="Hardware profile that was used.")
    profile_version: ShortText = Field(default="", description="Hash over the profile's content.")
    gpus: Count = Field(description="GPUs of all groups together.")
    gpu_memory_bytes: Count | None = Field(default=None, description="Memory of a GPU, from the profile, in bytes.")
    kv_cache_dtype: ShortText = Field(description="Type of cached MLA rows.")
    experts: ShortText = Field(description="How routed experts lie in memory.")
    transport: ShortText = Field(description="Library of the handoff.")
    workload: Text = Field(default="", description="Lengths that were planned for; empty where none are stated.")
    warnings: tuple[Text, ...] = Field(default=(), max_length=16, description="What to know beside the plan.")
    prefill: RolePlanStatus = Field(description="Plan of the prefill role.")
    decode: RolePlanStatus = Field(description="Plan of the decode role.")


class RouterStatus(StatusModel):
    """The router's pods."""

    desired: Count = Field(default=0, description="Pods asked for.")
    ready: Count = Field(default=0, description="Pods that are ready.")


class KimiDeploymentStatus(StatusModel):
    """What the operator last saw and decided."""

    observed_generation: Count = Field(default=0, description="Generation of the spec that this status answers.")
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=32,
        description="Conditions, one a type.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    revision: ShortText = Field(default="", description="Revision of the whole: changes when any pod must change.")
    plan: PlanStatus | None = Field(
        default=None,
        description="What the planner derived; absent when nothing fits.",
        json_schema_extra=ONE_VALUE,
    )
    prefill: RoleStatus = Field(default_factory=RoleStatus, description="Prefill groups.", json_schema_extra=ONE_VALUE)
    decode: RoleStatus = Field(default_factory=RoleStatus, description="Decode groups.", json_schema_extra=ONE_VALUE)
    router: RouterStatus = Field(default_factory=RouterStatus, description="Router pods.")
    url: ShortText = Field(default="", description="Where the OpenAI API answers, inside the cluster.")
