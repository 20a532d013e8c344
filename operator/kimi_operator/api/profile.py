"""Spec of a HardwareProfile: what a node class is, what memory is spoken for, and what a pod needs to run there."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kimi_operator.api.base import API_VERSION, ApiModel, Bytes
from kimi_operator.api.deployment import Transport
from kimi_operator.api.meta import ObjectMeta
from kimi_operator.api.pod import EnvVar, Path, Resources, Source

DeviceId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{4}$")]
PositiveCount = Annotated[int, Field(ge=1)]


class Device(StrEnum):
    """Where the ranks compute."""

    CUDA = "cuda"
    """torch's name for AMD GPUs too."""
    CPU = "cpu"


class DType(StrEnum):
    """Numbers in memory, by their name in torch."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Collectives(StrEnum):
    """Backend of torch.distributed; nccl is RCCL on AMD."""

    NCCL = "nccl"
    GLOO = "gloo"


class HostPathType(StrEnum):
    """What must lie at a host path, as in a Pod."""

    DIRECTORY = "Directory"
    FILE = "File"
    CHAR_DEVICE = "CharDevice"
    SOCKET = "Socket"
    ANY = ""


class MatchSpec(ApiModel):
    """How nodes of this class are told from others: PCI device id and memory, never the product name alone."""

    device_ids: tuple[DeviceId, ...] = Field(
        default=(), max_length=16, description="Values of the label amd.com/gpu.device-id."
    )
    vram: Bytes | None = Field(
        default=None, description="Memory of a GPU as the label amd.com/gpu.vram states it (192G means 192 GiB)."
    )


class GpuSpec(ApiModel):
    """The GPU."""

    architecture: str = Field(min_length=1, max_length=32, description="Instruction set, such as gfx942.")
    resource: str = Field(
        default="amd.com/gpu", min_length=1, max_length=253, description="Extended resource of the device plugin."
    )
    per_node: int = Field(ge=1, le=64, description="GPUs of a node.")
    memory: Bytes = Field(description="Memory of a GPU that programs see.")
    hbm_bytes_per_second: int | None = Field(default=None, ge=1, description="Peak memory bandwidth.")


class RuntimeSpec(ApiModel):
    """How the worker computes on this hardware."""

    device: Device = Field(description="cuda or cpu.")
    dtype: DType = Field(description="Type of activations and of weights that are not routed experts.")
    kv_cache_dtype: DType = Field(description="Type of cached MLA rows when spec.precision.kvCache is Auto.")
    collectives: Collectives = Field(description="nccl or gloo.")
    threads_per_rank: int = Field(default=1, ge=1, le=256, description="CPU threads of a rank.")


class FabricSpec(ApiModel):
    """The network between nodes."""

    transport: Transport = Field(
        default=Transport.NIXL, description="Library of the handoff when spec.handoff.transport is Auto."
    )
    fence: Literal["none", "read_back"] = Field(
        default="none", description="read_back where a completed write may not yet be visible remotely (RoCE)."
    )
    nics_per_node: int | None = Field(default=None, ge=1, le=64, description="Network cards of a node for RDMA.")
    nic_bytes_per_second: int | None = Field(default=None, ge=1, description="Peak bandwidth of a card, each way.")


class ReserveSpec(ApiModel):
    """Memory of a GPU that weights and pools cannot have."""

    contexts: Bytes = Field(description="Contexts, libraries and communicators.")
    symmetric_heap: Bytes = Field(default=0, description="Heap of the expert exchange (MORI_SHMEM_HEAP_SIZE).")
    activations: Bytes = Field(description="Peak of activations and workspaces in a step.")
    graphs: Bytes = Field(default=0, description="Captured graphs.")
    staging: Bytes = Field(default=0, description="Buffers of the handoff.")
    margin: Bytes = Field(default=0, description="Left free on purpose.")


class ProfileHostPath(ApiModel):
    """A path of the node that the worker needs."""

    path: Path = Field(description="Path on the node.")
    mount_path: Path | None = Field(default=None, description="Path in the container; the same when absent.")
    type: HostPathType = Field(default=HostPathType.ANY, description="What must lie there.")
    read_only: bool = Field(default=True, description="Whether it is mounted read-only.")


class ProfilePodSpec(ApiModel):
    """What a worker pod needs on this hardware."""

    devices: tuple[Path, ...] = Field(default=(), max_length=16, description="Device files or directories of the node.")
    host_paths: tuple[ProfileHostPath, ...] = Field(default=(), max_length=16, description="More paths of the node.")
    capabilities: tuple[Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Z_]+$")], ...] = Field(
        default=(), max_length=16, description="Linux capabilities; all others are dropped."
    )
    supplemental_groups: tuple[Annotated[int, Field(ge=0, le=2**31)], ...] = Field(
        default=(), max_length=16, description="Groups that may open the devices (render and video on most hosts)."
    )
    env: tuple[EnvVar, ...] = Field(default=(), max_length=64, description="Environment of the ranks.")
    resources: Resources = Field(default_factory=Resources, description="CPU and memory of the worker's container.")
    host_network: bool = Field(default=False, description="Use the node's network, where RDMA needs it.")
    shared_memory: Bytes = Field(default=2**30, description="Size of /dev/shm.")
    startup_budget_seconds: int = Field(
        default=3600, ge=30, le=86_400, description="How long a group may take to load and become ready."
    )


class LimitsSpec(ApiModel):
    """Bounds that the planner keeps to."""

    page_size_tokens: int = Field(default=64, ge=1, le=4096, description="Tokens of a KV page.")
    max_num_seqs: int = Field(
        default=64, ge=1, le=4096, description="Most running requests a lane that the plan chooses by itself."
    )
    context_tokens_per_seq: int = Field(
        default=16_384,
        ge=1,
        le=16_777_216,
        description="Context that the plan sets aside a running request when it chooses maxNumSeqs itself.",
    )
    prefill_batched_tokens: int = Field(
        default=2048, ge=1, le=1_048_576, description="Tokens of one step of a prefill lane."
    )
    decode_batched_tokens: int = Field(
        default=512, ge=1, le=1_048_576, description="Tokens of one step of a decode lane."
    )
    max_queued: int = Field(
        default=64, ge=1, le=65_536, description="Requests that wait in a lane before it answers 429."
    )


class TimeoutsSpec(ApiModel):
    """How long things may take on this hardware."""

    collective_seconds: int = Field(
        default=60, ge=1, le=86_400, description="Longest wait within one step before the group counts as broken."
    )
    drain_seconds: int = Field(
        default=120, ge=1, le=86_400, description="Time for running requests when a pod is asked to go."
    )
    reservation_seconds: int = Field(
        default=120, ge=1, le=86_400, description="How long decode keeps room for a prompt that prefill still computes."
    )


class HardwareProfileSpec(ApiModel):
    """One class of nodes."""

    match: MatchSpec = Field(default_factory=MatchSpec, description="How its nodes are recognised.")
    gpu: GpuSpec = Field(description="The GPU.")
    runtime: RuntimeSpec = Field(description="How the worker computes.")
    fabric: FabricSpec = Field(default_factory=FabricSpec, description="The network between nodes.")
    reserve: ReserveSpec = Field(description="Memory that weights and pools cannot have.")
    pod: ProfilePodSpec = Field(default_factory=ProfilePodSpec, description="What a worker pod needs.")
    limits: LimitsSpec = Field(default_factory=LimitsSpec, description="Bounds of the planner.")
    timeouts: TimeoutsSpec = Field(default_factory=TimeoutsSpec, description="How long things may take.")
    sources: dict[Annotated[str, StringConstraints(max_length=128)], Source] = Field(
        default_factory=dict,
        max_length=64,
        description="Where a figure comes from: path of the field within spec (reserve.contexts) to a sentence.",
    )

    def source(self, path: str) -> str:
        """Where the figure at `path` comes from; says so when nobody stated it."""
        return self.sources.get(path, "no source given")


class HardwareProfile(ApiModel):
    """What a class of nodes is and what a worker pod needs there."""

    api_version: Literal["kimi-operator.io/v1alpha1"] = API_VERSION
    kind: Literal["HardwareProfile"] = "HardwareProfile"
    metadata: ObjectMeta
    spec: HardwareProfileSpec = Field(description="The node class.")
