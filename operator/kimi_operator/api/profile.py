"""Spec of a HardwareProfile: what a node class is, what memory is spoken for, and what a pod needs to run there."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from kimi_operator.api.base import API_VERSION, ApiModel, Bytes, dump, fields_at, rule, rules
from kimi_operator.api.calibration import CalibrationSpec
from kimi_operator.api.contradictions import contradictions
from kimi_operator.api.deployment import Transport
from kimi_operator.api.meta import ObjectMeta
from kimi_operator.api.pod import EnvVar, Path, Resources, Source
from kimi_operator.errors import InvalidSpec, Problem

DeviceId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{4}$", max_length=4)]
# Far above any hardware: a larger figure is a slip of the keyboard.
BytesPerSecond = Annotated[int, Field(ge=1, le=10**15)]
FlopsPerSecond = Annotated[int, Field(ge=1, le=10**18)]


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


def _bytes(field: str) -> str:
    """CEL: a field of bytes, which may be a number or a text, as a quantity."""
    return f"quantity(string({field}))"


class ComputePartition(StrEnum):
    """Into how many GPUs a card's compute dies are split, as AMD names it."""

    SPX = "SPX"
    """One: the whole card."""
    DPX = "DPX"
    TPX = "TPX"
    QPX = "QPX"
    CPX = "CPX"
    """One a compute die."""


class MemoryPartition(StrEnum):
    """Into how many ranges a card's memory is split, as AMD names it."""

    NPS1 = "NPS1"
    NPS2 = "NPS2"
    NPS4 = "NPS4"
    NPS8 = "NPS8"


class Basis(StrEnum):
    """How well a figure is known."""

    MEASURED = "Measured"
    """On this hardware."""
    REPORTED = "Reported"
    """By the node itself: a label, a capacity."""
    DATA_SHEET = "DataSheet"
    """What the vendor states."""
    DERIVED = "Derived"
    """Computed from figures of this hardware that are known."""
    PUBLISHED = "Published"
    """By others, about this hardware; not verified, or their figures differ."""
    CARRIED = "Carried"
    """Measured or published for another chip, and taken over from it."""
    ASSUMED = "Assumed"
    """Chosen; nobody measured it."""

    @property
    def caveat(self) -> str:
        """What to say beside a figure that nobody measured on this hardware; empty when it is known."""
        return _CAVEATS.get(self, "")


_CAVEATS = {
    Basis.PUBLISHED: "not verified",
    Basis.CARRIED: "not measured on this hardware",
    Basis.ASSUMED: "not measured",
}


class WorkerSupport(StrEnum):
    """What the bundled worker promises on this hardware."""

    TARGET = "Target"
    """It is made for it."""
    UNTESTED = "Untested"
    """Nothing in it is known to fail there, and nobody ran it: plans are made, with a warning."""
    UNSUPPORTED = "Unsupported"
    """It cannot run there: deployments are refused."""


Note = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class WorkerSpec(ApiModel):
    """What the bundled worker can and cannot do on this hardware."""

    support: WorkerSupport = Field(description="Target, Untested (warned about) or Unsupported (refused).")
    works: tuple[Note, ...] = Field(default=(), max_length=16, description="What is known to work.")
    lacks: tuple[Note, ...] = Field(default=(), max_length=16, description="What is missing, unused or unknown.")


class MatchSpec(ApiModel):
    """How nodes of this class are told from others: PCI device id and memory, never the product name alone."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.vram) || (has(self.deviceIds) && self.deviceIds.size() > 0)",
                "vram alone matches no node; state deviceIds too",
            ),
            rule(
                "!has(self.virtualDeviceIds) || "
                "(has(self.deviceIds) && self.virtualDeviceIds.all(v, self.deviceIds.exists(d, d == v)))",
                "virtualDeviceIds must be among deviceIds",
            ),
        )
    )

    device_ids: tuple[DeviceId, ...] = Field(
        default=(), max_length=16, description="Values of the label amd.com/gpu.device-id."
    )
    virtual_device_ids: tuple[DeviceId, ...] = Field(
        default=(), max_length=16, description="Those of deviceIds that are virtual functions (SR-IOV)."
    )
    vram: Bytes | None = Field(
        default=None, description="Memory of a GPU as the label amd.com/gpu.vram states it (192G means 192 GiB)."
    )


class CardSpec(ApiModel):
    """The card as its vendor states it, which a GPU is the whole of or a partition of."""

    memory: Bytes = Field(description="Memory of the card.")
    compute_units: int = Field(ge=1, le=4096, description="Compute units that are switched on.")
    compute_dies: int = Field(ge=1, le=64, description="Compute dies (XCDs); CPX makes a GPU of each.")


class PartitionSpec(ApiModel):
    """Which part of its card a GPU is."""

    compute: ComputePartition = Field(default=ComputePartition.SPX, description="SPX is the whole card.")
    memory: MemoryPartition = Field(default=MemoryPartition.NPS1, description="NPS1 is one range of memory.")

    @property
    def is_whole(self) -> bool:
        """Whether a GPU is a whole card."""
        return self == PartitionSpec()

    def __str__(self) -> str:
        """As AMD's node labeller writes it: cpx_nps4."""
        return f"{self.compute}_{self.memory}".lower()


class GpuSpec(ApiModel):
    """The GPU: what one rank computes on. A partition of a card counts as a GPU of its own."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.card) || !has(self.computeUnits) || self.computeUnits <= self.card.computeUnits",
                "computeUnits of a GPU cannot be more than those of its card",
            ),
            rule(
                f"!has(self.card) || {_bytes('self.memory')}.compareTo({_bytes('self.card.memory')}) <= 0",
                "memory of a GPU cannot be more than that of its card",
            ),
            rule(
                "has(self.card) || !has(self.partition) || !has(self.partition.compute) || "
                "self.partition.compute == 'SPX'",
                "a partition needs card, the memory and compute units that it is a part of",
            ),
        )
    )

    architecture: str = Field(min_length=1, max_length=32, description="Instruction set, such as gfx942.")
    resource: str = Field(
        default="amd.com/gpu", min_length=1, max_length=253, description="Extended resource of the device plugin."
    )
    per_node: int = Field(ge=1, le=64, description="GPUs of a node.")
    memory: Bytes = Field(description="Memory of a GPU that programs see.")
    hbm_bytes_per_second: BytesPerSecond | None = Field(default=None, description="Peak memory bandwidth.")
    bf16_flops_per_second: FlopsPerSecond | None = Field(
        default=None, description="Peak of dense bfloat16 matrix products, in operations a second."
    )
    compute_units: int | None = Field(default=None, ge=1, le=4096, description="Compute units of a GPU.")
    card: CardSpec | None = Field(default=None, description="The card that a GPU is the whole or a part of.")
    partition: PartitionSpec = Field(
        default_factory=PartitionSpec, description="Which part of its card a GPU is; the whole when absent."
    )


class RuntimeSpec(ApiModel):
    """How the worker computes on this hardware."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.device != 'cpu' || self.collectives == 'gloo'", "collectives on a cpu need gloo")
        )
    )

    device: Device = Field(description="cuda or cpu.")
    dtype: DType = Field(description="Type of activations and of weights that are not routed experts.")
    kv_cache_dtype: DType = Field(description="Type of cached MLA rows when spec.precision.kvCache is Auto.")
    collectives: Collectives = Field(description="nccl or gloo.")
    threads_per_rank: int = Field(default=1, ge=1, le=256, description="CPU threads of a rank.")


class FabricSpec(ApiModel):
    """The network between nodes."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            # The API server tries the empty default before it fills in the fields.
            rule(
                "!has(self.transport) || self.transport != 'MoRIIO' || (has(self.fence) && self.fence == 'read_back')",
                "transport MoRIIO completes before the bytes are seen; set fence to read_back",
            )
        )
    )

    transport: Transport = Field(
        default=Transport.NIXL, description="Library of the handoff when spec.handoff.transport is Auto."
    )
    fence: Literal["none", "read_back"] = Field(
        default="none", description="read_back where a completed write may not yet be visible remotely (RoCE)."
    )
    nics_per_node: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Network cards of a node for RDMA. Fewer than GPUs are shared by them; without it each has one.",
    )
    nic_bytes_per_second: BytesPerSecond | None = Field(default=None, description="Peak bandwidth of a card, each way.")


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
        description="Context that the plan sets aside a running request when it chooses maxNumSeqs itself; no more "
        "than spec.model.maxModelLen.",
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


_Value = TypeVar("_Value")
FieldPath = Annotated[str, StringConstraints(max_length=128)]
_SECTIONS = ("match", "gpu", "runtime", "fabric", "reserve", "pod", "limits", "timeouts")


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int | str]]:
    """Numbers and quantities below a field; texts, switches and lists are no figures."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}")
        return
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and path.startswith("pod.resources.")):
        yield path, value


def _of_field_or_section(table: dict[str, _Value], path: str) -> _Value | None:
    """What stands at a path or at the nearest section above it."""
    while path not in table and "." in path:
        path = path.rpartition(".")[0]
    return table.get(path)


_RESERVES = ("contexts", "symmetricHeap", "activations", "graphs", "staging", "margin")
_RESERVED = "quantity('0')" + "".join(f".add({_bytes(f'self.reserve.{name}')})" for name in _RESERVES)


class HardwareProfileSpec(ApiModel):
    """One class of nodes."""

    model_config = ConfigDict(
        # built at once: a HardwareProfile takes it over, and would be built first and without it otherwise
        defer_build=False,
        json_schema_extra=rules(
            # The label is rounded to whole GiB.
            rule(
                "!has(self.match) || !has(self.match.vram) || "
                f"{_bytes('self.gpu.memory')}.compareTo({_bytes('self.match.vram')}.add(quantity('512Mi'))) <= 0",
                "gpu.memory cannot be more than match.vram",
            ),
            # On a CPU gpu.memory is a budget that somebody chose, and the plan says what does not fit it.
            rule(
                f"self.runtime.device == 'cpu' || {_RESERVED}.compareTo({_bytes('self.gpu.memory')}) < 0",
                "reserves must leave some of gpu.memory to weights and pools",
            ),
        ),
    )

    match: MatchSpec = Field(default_factory=MatchSpec, description="How its nodes are recognised.")
    gpu: GpuSpec = Field(description="The GPU.")
    runtime: RuntimeSpec = Field(description="How the worker computes.")
    fabric: FabricSpec = Field(default_factory=FabricSpec, description="The network between nodes.")
    reserve: ReserveSpec = Field(description="Memory that weights and pools cannot have.")
    pod: ProfilePodSpec = Field(default_factory=ProfilePodSpec, description="What a worker pod needs.")
    limits: LimitsSpec = Field(default_factory=LimitsSpec, description="Bounds of the planner.")
    timeouts: TimeoutsSpec = Field(default_factory=TimeoutsSpec, description="How long things may take.")
    calibration: CalibrationSpec | None = Field(
        default=None, description="Measured speed, as `kimictl profile calibrate` prints it; built-in data when absent."
    )
    worker: WorkerSpec | None = Field(
        default=None, description="What the bundled worker can do here; follows from gpu.architecture when absent."
    )
    sources: dict[FieldPath, Source] = Field(
        default_factory=dict,
        max_length=64,
        description="Where a figure comes from: path of the field within spec (reserve.contexts) to a sentence.",
    )
    basis: dict[FieldPath, Basis] = Field(
        default_factory=dict,
        max_length=64,
        description="How well a figure is known: path of the field within spec to Measured, Reported, DataSheet, "
        "Derived, Published, Carried or Assumed. The last three were not measured on this hardware.",
    )

    def source(self, path: str) -> str:
        """Where the figure at `path` comes from, and whether it was measured here; says so when nobody stated it."""
        source = _of_field_or_section(self.sources, path)
        if source is None:
            return "no source given"
        basis = self.basis_of(path)
        return f"{source} ({basis.caveat})" if basis is not None and basis.caveat else source

    def basis_of(self, path: str) -> Basis | None:
        """How well the figure at `path` is known; None when the profile does not say."""
        return _of_field_or_section(self.basis, path)

    def figures(self) -> dict[str, int | str]:
        """Every number that this profile states, by its path: memory, rates, reserves, limits, times."""
        document = dump(self)
        return {path: value for section in _SECTIONS for path, value in _numbers(document.get(section, {}), section)}

    def unstated(self) -> list[str]:
        """Fields that `basis` speaks of and that have no value, or no figure in them."""
        figures = self.figures()
        unknown = [path for path in self.basis if not any(f"{each}.".startswith(f"{path}.") for each in figures)]
        document = dump(self) if unknown else {}
        return [path for path in unknown if _is_field(path) and isinstance(_at(document, path), dict | None)]

    def unmeasured(self) -> dict[str, str]:
        """Figures that nobody measured on this hardware, each with what is known of it."""
        return {path: self.source(path) for path in self.figures() if (b := self.basis_of(path)) is None or b.caveat}


class HardwareProfile(ApiModel):
    """What a class of nodes is and what a worker pod needs there."""

    api_version: Literal["kimi-operator.io/v1alpha1"] = API_VERSION
    kind: Literal["HardwareProfile"] = "HardwareProfile"
    metadata: ObjectMeta
    spec: HardwareProfileSpec = Field(description="The node class.")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        """Raises InvalidSpec, which passes through pydantic as it is, so that every problem keeps its field."""
        name, spec = self.metadata.name, self.spec
        basis, unstated = spec.basis, spec.unstated()
        missing = tuple(_missing(f"HardwareProfile {name}: spec", path, basis[path]) for path in unstated)
        # of these basis is right, and the field is what is wrong
        rest = spec.model_copy(update={"basis": {path: basis[path] for path in basis if path not in unstated}})
        if problems := (*missing, *contradictions(name, rest)):
            raise InvalidSpec(problems)
        return self


def _is_field(path: str) -> bool:
    names = path.split(".")
    return all(name in fields_at(HardwareProfileSpec, names[:i]) for i, name in enumerate(names))


def _at(document: Any, path: str) -> Any:
    """What stands at a path; None where nothing does."""
    for name in path.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _missing(where: str, path: str, basis: Basis) -> Problem:
    return Problem(
        f"{where}.{path}", "nothing", f"a value: basis says {basis} of it", "set it, or remove it from basis"
    )
