"""Spec of a KimiDeployment: what a user asks for. Values that the planner derives never appear here."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from kimi_operator.api.base import API_VERSION, ApiModel, immutable, rule, rules
from kimi_operator.api.meta import ObjectMeta
from kimi_operator.api.pod import Name, Path, PodTemplate
from kimi_operator.api.status import KimiDeploymentStatus
from kimi_operator.api.workload import WorkloadSpec

MAX_GROUPS = 64
MAX_SIZE = 64
"""Of each number that a group's shape is made of."""


MAX_NAME_LENGTH = 40
"""Labels hold 63: `-prefill-<group>` and the StatefulSet controller's `-<10 characters>` come after the name."""
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
ONE_SOURCE = "exactly one of hostPath, persistentVolumeClaim and image"


EXPERTS = {"kimi-k3": 896, "kimi-k3-tiny": 8}
MAX_POSITIONS = {"kimi-k3": 1_048_576, "kimi-k3-tiny": 8192}
"""Of the built-in architectures, for rules that the API server checks; a test holds them against the architectures."""


class Role(StrEnum):
    """What a group of ranks does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Transport(StrEnum):
    """Library that moves pages and state from prefill to decode."""

    MORIIO = "MoRIIO"
    NIXL = "NIXL"


class TransportChoice(StrEnum):
    """A transport, or the hardware profile's."""

    AUTO = "Auto"
    MORIIO = "MoRIIO"
    NIXL = "NIXL"


class KvPrecision(StrEnum):
    """How cached MLA rows lie in memory, or as the hardware profile says."""

    AUTO = "Auto"
    BF16 = "BF16"
    FP32 = "FP32"


class HostPath(ApiModel):
    """A directory that lies on every node that runs a worker."""

    path: Path = Field(description="Absolute path of the directory that holds config.json.")


class PersistentVolumeClaim(ApiModel):
    """A claim in the deployment's namespace that many nodes can mount read-only."""

    claim_name: Name = Field(description="Name of the claim.")


class ImageVolume(ApiModel):
    """An OCI image or artifact that holds the checkpoint at its root."""

    reference: str = Field(min_length=1, max_length=512, description="Reference of the image, best with a digest.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When the kubelet pulls."
    )


class Checkpoint(ApiModel):
    """Where the weights are: exactly one of the sources. Mounted read-only."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "[has(self.hostPath), has(self.persistentVolumeClaim), has(self.image)].filter(x, x).size() == 1",
                ONE_SOURCE,
            )
        )
    )

    host_path: HostPath | None = Field(default=None, description="A directory on each node.")
    persistent_volume_claim: PersistentVolumeClaim | None = Field(default=None, description="A volume claim.")
    image: ImageVolume | None = Field(default=None, description="An OCI image volume (Kubernetes 1.33 or later).")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = (self.host_path, self.persistent_volume_claim, self.image)
        if sum(source is not None for source in sources) != 1:
            raise ValueError(ONE_SOURCE)
        return self


def _of_architecture(table: dict[str, int], path: str, check: str) -> str:
    """CEL: whether `check` holds of the architecture's number, written `#`; unknown architectures pass."""
    literal = "{" + ", ".join(f"'{name}': {number}" for name, number in table.items()) + "}"
    return f"!({path} in {literal}) || " + check.replace("#", f"{literal}[{path}]")


def _listed(table: dict[str, int]) -> str:
    return ", ".join(f"{number:,} of {name}" for name, number in table.items())


def _unless_out_of_bounds(sizes: tuple[str, ...], check: str) -> str:
    """CEL: `check` where all of these sizes are within their bounds.

    The API server also evaluates rules over values that the schema has refused: they have been told of by then, and
    dividing by zero or multiplying beyond an integer would add a message that explains nothing.
    """
    return f"[{', '.join(sizes)}].exists(n, n < 1 || n > {MAX_SIZE}) || {check}"


def _ranks_divide_experts(role: str) -> dict[str, Any]:
    """Rule of the spec: routed experts are shared evenly among a group's ranks."""
    sizes = (f"self.{role}.nodesPerGroup", f"self.{role}.gpusPerNode")
    divides = _of_architecture(EXPERTS, "self.model.architecture", f"# % ({' * '.join(sizes)}) == 0")
    return rule(
        _unless_out_of_bounds(sizes, divides),
        f"nodesPerGroup x gpusPerNode must divide the routed experts ({_listed(EXPERTS)}); change one of them",
        field_path=f".{role}.nodesPerGroup",
    )


class ModelSpec(ApiModel):
    """Which model is served, and under which name."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.maxModelLen) || "
                + _of_architecture(MAX_POSITIONS, "self.architecture", "self.maxModelLen <= #"),
                f"at most the positions that the model was made for: {_listed(MAX_POSITIONS)}; lower it",
                field_path=".maxModelLen",
            )
        )
    )

    architecture: str = Field(
        default="kimi-k3",
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description="Name of a built-in architecture: kimi-k3 or kimi-k3-tiny. Cannot change.",
        json_schema_extra=immutable("model.architecture"),
    )
    checkpoint: Checkpoint = Field(description="Where the weights are: exactly one source.")
    served_name: Annotated[str, StringConstraints(min_length=1, max_length=128)] = Field(
        default="kimi-k3",
        description="Name of the model in the OpenAI API. Cannot change.",
        json_schema_extra=immutable("model.servedName"),
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Longest prompt plus answer, in tokens; the plan's limit when absent.",
    )


class HardwareSpec(ApiModel):
    """What the pods run on."""

    profile: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        description="Name of a HardwareProfile; found from the labels of the cluster's GPU nodes when absent.",
    )


class PrecisionSpec(ApiModel):
    """How numbers lie in memory. Both roles always use the same."""

    kv_cache: KvPrecision = Field(
        default=KvPrecision.AUTO, description="Cached MLA rows; Auto takes the hardware profile's type."
    )


class RoleSpec(ApiModel):
    """One role: how many groups, and the shape of each. A group is one expert-parallel set of ranks."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                _unless_out_of_bounds(
                    ("self.gpusPerNode", "self.tensorParallel"), "self.gpusPerNode % self.tensorParallel == 0"
                ),
                "tensorParallel must divide gpusPerNode: a lane never crosses a node; set a divisor",
                field_path=".tensorParallel",
            )
        )
    )

    groups: int = Field(default=1, ge=1, le=MAX_GROUPS, description="Number of groups.")
    nodes_per_group: int = Field(
        default=2,
        ge=1,
        le=MAX_SIZE,
        description="Nodes of a group, one pod each. Cannot change.",
        json_schema_extra=immutable("nodesPerGroup"),
    )
    gpus_per_node: int = Field(
        default=8,
        ge=1,
        le=MAX_SIZE,
        description="GPUs of each pod, one rank each. Cannot change.",
        json_schema_extra=immutable("gpusPerNode"),
    )
    tensor_parallel: int = Field(
        default=2,
        ge=1,
        le=MAX_SIZE,
        description="Ranks that share one lane's attention; divides gpusPerNode. Cannot change.",
        json_schema_extra=immutable("tensorParallel"),
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, le=4096, description="Running requests a lane; the plan's choice when absent."
    )
    template: PodTemplate = Field(default_factory=PodTemplate, description="What to set on the pods.")


class HandoffSpec(ApiModel):
    """How pages and state move from prefill to decode."""

    transport: TransportChoice = Field(default=TransportChoice.AUTO, description="Auto takes the hardware profile's.")


class RouterSpec(ApiModel):
    """The front door: an OpenAI API in front of all lanes."""

    replicas: int = Field(default=1, ge=1, le=32, description="Number of router pods.")
    template: PodTemplate = Field(default_factory=PodTemplate, description="What to set on the pods.")


class RolloutSpec(ApiModel):
    """How a change of the pods reaches them."""

    paused: bool = Field(default=False, description="While true, running groups keep their revision.")


class KimiDeploymentSpec(ApiModel):
    """A disaggregated Kimi service: prefill groups, decode groups and a router."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.prefill.tensorParallel == self.decode.tensorParallel",
                "prefill and decode must have the same tensorParallel: a prefill rank writes straight into the memory "
                "of its decode peer",
                field_path=".decode.tensorParallel",
            ),
            *(_ranks_divide_experts(role.value) for role in Role),
        )
    )

    model: ModelSpec = Field(description="Which model is served.")
    hardware: HardwareSpec = Field(default_factory=HardwareSpec, description="What the pods run on.")
    precision: PrecisionSpec = Field(default_factory=PrecisionSpec, description="How numbers lie in memory.")
    workload: WorkloadSpec | None = Field(
        default=None,
        description="What the service is asked to do: maxNumSeqs and pools are solved for it where a role states none.",
    )
    prefill: RoleSpec = Field(description="Groups that compute prompts.")
    decode: RoleSpec = Field(description="Groups that generate tokens.")
    handoff: HandoffSpec = Field(default_factory=HandoffSpec, description="How state moves between them.")
    router: RouterSpec = Field(default_factory=RouterSpec, description="The front door.")
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How changes reach the pods.")
    restart_budget: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Restarts of a group, without ten minutes of Ready in between, before it is left Failed.",
    )
    suspend: bool = Field(default=False, description="While true, no pods run; everything else stays.")

    def role(self, role: Role) -> RoleSpec:
        """The spec of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


class KimiDeployment(ApiModel):
    """A Kimi model served from separate prefill and decode groups."""

    api_version: Literal["kimi-operator.io/v1alpha1"] = API_VERSION
    kind: Literal["KimiDeployment"] = "KimiDeployment"
    metadata: ObjectMeta
    spec: KimiDeploymentSpec = Field(description="What is asked for.")
    status: KimiDeploymentStatus | None = Field(default=None, description="What the operator last saw.")

    @field_validator("metadata")
    @classmethod
    def _name_leaves_room(cls, metadata: ObjectMeta) -> ObjectMeta:
        if len(metadata.name) > MAX_NAME_LENGTH or not re.fullmatch(NAME_PATTERN, metadata.name):
            raise ValueError(
                f"a name of at most {MAX_NAME_LENGTH} lower-case letters, digits and hyphens that starts with a letter "
                f"(pods and their labels add up to 22 characters), not {metadata.name!r}"
            )
        return metadata
