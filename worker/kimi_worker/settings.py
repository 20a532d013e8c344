"""The worker's settings: read once from the mounted file, validated with units, frozen."""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

Port = Annotated[int, Field(ge=1, le=65535)]
LOOPBACK = "127.0.0.1"


class SettingsError(Exception):
    """The settings file or the pod's environment is wrong; the message names the field."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(Section):
    checkpoint: Path
    """Folder with config.json, the safetensors index and the tokenizer."""
    served_name: str
    max_model_len: PositiveInt
    """Prompt and output tokens of one request together."""


class ParallelSettings(Section):
    nodes_per_group: PositiveInt = 1
    ranks_per_node: PositiveInt = 1
    tensor_parallel: PositiveInt = 1

    @property
    def world_size(self) -> int:
        return self.nodes_per_group * self.ranks_per_node

    @property
    def lanes_per_node(self) -> int:
        return self.ranks_per_node // self.tensor_parallel

    @model_validator(mode="after")
    def _lanes_stay_in_a_pod(self) -> "ParallelSettings":
        if self.ranks_per_node % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} does not divide ranks_per_node {self.ranks_per_node}; "
                "a lane must not cross pods"
            )
        return self


class RuntimeSettings(Section):
    device: Annotated[str, Field(pattern="^(cpu|cuda)$")] = "cpu"
    """`cuda` is also ROCm's name in torch."""
    dtype: Annotated[str, Field(pattern="^(float32|bfloat16)$")] = "float32"
    kv_cache_dtype: Annotated[str, Field(pattern="^(float32|bfloat16)$")] = "float32"
    collectives: Annotated[str, Field(pattern="^(gloo|nccl)$")] = "gloo"
    threads_per_rank: PositiveInt = 1


class LimitSettings(Section):
    """All per lane."""

    max_num_seqs: PositiveInt
    max_queued: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 512
    num_pages: PositiveInt
    page_size_tokens: PositiveInt = 64
    num_state_slots: PositiveInt

    @model_validator(mode="after")
    def _every_running_request_has_a_slot(self) -> "LimitSettings":
        if self.num_state_slots < self.max_num_seqs:
            raise ValueError(f"num_state_slots {self.num_state_slots} is below max_num_seqs {self.max_num_seqs}")
        return self

    @model_validator(mode="after")
    def _every_running_request_gets_a_token(self) -> "LimitSettings":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}"
            )
        return self


class PeerSettings(Section):
    """Where a decode pod finds the prefill lanes, to check that they can write into it."""

    service: str = ""
    """Name of the prefill pods' headless service; empty: nothing is checked before a request."""
    port: Port = 29600
    lanes_per_pod: PositiveInt = 1


class HandoffSettings(Section):
    transport: Annotated[str, Field(pattern="^(nixl|moriio)$")] = "nixl"
    reservation_timeout_s: PositiveFloat = 120.0
    """From reservation to Ready; afterwards the request fails and the reservation is quarantined."""
    write_timeout_s: PositiveFloat = 120.0
    """From posting a transfer's writes to the last completion. Above timeouts.collective_s: ranks take part between
    steps, and a step may last that long."""
    silence_s: PositiveFloat = 15.0
    """A peer with open transfers whose process answers no pings for about so long is lost. Long steps do not count."""
    peers: PeerSettings = PeerSettings()
    fence: Annotated[str, Field(pattern="^(none|read_back)$")] = "none"
    """`read_back`: read a few bytes of every written region before telling decode, where completion is only local."""

    @model_validator(mode="after")
    def _local_completion_needs_a_fence(self) -> "HandoffSettings":
        if self.transport == "moriio" and self.fence == "none":
            raise ValueError("transport moriio completes locally, before the bytes are seen; set fence to read_back")
        return self


class PortSettings(Section):
    address: Annotated[str, Field(min_length=1)] = "0.0.0.0"  # noqa: S104 - a pod's network is its own
    """Where the API listens; all addresses by default."""
    api: Port = 8000
    rendezvous: Port = 29500
    coordinator: Port = 29501
    handoff: Port = 29600
    """First of `lanes_per_node` consecutive ports."""


class TimeoutSettings(Section):
    group_start_s: PositiveFloat = 600.0
    collective_s: PositiveFloat = 60.0
    drain_s: PositiveFloat = 120.0


class ServiceSettings(Section):
    headless: str = ""
    """Name of the role's headless service; empty: the group is this machine alone."""
    namespace: str = "default"


class FaultSettings(Section):
    """For tests only: bring back known bugs to show that the checks see them."""

    notify_before_writes_land: bool = False
    keep_recycled_state: bool = False


class WorkerSettings(Section):
    deployment: str
    role: Role
    model: ModelSettings
    parallel: ParallelSettings = ParallelSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    limits: LimitSettings
    handoff: HandoffSettings = HandoffSettings()
    ports: PortSettings = PortSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    service: ServiceSettings = ServiceSettings()
    faults: FaultSettings = FaultSettings()

    @model_validator(mode="after")
    def _no_step_breaks_a_handoff(self) -> "WorkerSettings":
        if self.role is not Role.BOTH and self.handoff.write_timeout_s <= self.timeouts.collective_s:
            raise ValueError(
                f"handoff.write_timeout_s {self.handoff.write_timeout_s:g} is not above timeouts.collective_s "
                f"{self.timeouts.collective_s:g}: a step that is allowed to be that long would break off writes"
            )
        return self

    @model_validator(mode="after")
    def _one_request_fits(self) -> "WorkerSettings":
        need = -(-self.model.max_model_len // self.limits.page_size_tokens)
        if need > self.limits.num_pages:
            raise ValueError(
                f"limits.num_pages {self.limits.num_pages} x {self.limits.page_size_tokens} tokens cannot hold one "
                f"request of model.max_model_len {self.model.max_model_len}; it needs {need} pages"
            )
        return self


def standalone_settings(
    checkpoint: Path, port: int, longest: int, *, host: str = LOOPBACK, served_name: str | None = None
) -> WorkerSettings:
    """One rank that does everything, for development and as the comparison of a disaggregated service.

    `longest`: the tokens that the checkpoint can hold; the model is named after the checkpoint's folder by default.
    """
    name = served_name or checkpoint.resolve().name or "model"
    max_model_len, max_num_seqs, page_size_tokens = min(8192, longest), 8, 64
    return WorkerSettings(
        deployment="standalone",
        role=Role.BOTH,
        model=ModelSettings(checkpoint=checkpoint, served_name=name, max_model_len=max_model_len),
        limits=LimitSettings(
            max_num_seqs=max_num_seqs,
            num_pages=max_num_seqs * -(-max_model_len // page_size_tokens),
            page_size_tokens=page_size_tokens,
            num_state_slots=max_num_seqs,
        ),
        ports=PortSettings(address=host, api=port),
    )


class RouterSettings(Section):
    deployment: str
    served_name: str
    port: Port = 8000
    prefill_service: str
    decode_service: str
    worker_port: Port = 8000
    poll_interval_s: PositiveFloat = 0.5
    lost_after_s: PositiveFloat = 15.0
    """A pod that has not answered for so long is lost, and with it the requests that it was answering."""
    retries: Annotated[int, Field(ge=0)] = 3
    drain_s: PositiveFloat = 120.0
    """From the signal to end: for running streams to end."""
    max_held_bytes: PositiveInt = 2**28
    """Bodies of all requests whose answers have not begun."""


class PodIdentity(Section):
    """Who this pod is, from the environment that the operator renders."""

    pod_name: str = "local-0"
    pod_ip: str = "127.0.0.1"
    group: str = "0"
    generation: PositiveInt = 1
    run_dir: Path = Path("/run/kimi")
    """Sockets of the pod's processes and the mark of its first run; an emptyDir."""
    termination_log: Path = Path("/dev/termination-log")

    @property
    def ordinal(self) -> int:
        """Index of the pod within its StatefulSet."""
        return int(self.pod_name.rpartition("-")[2])

    @property
    def group_name(self) -> str:
        """Name of the pod's StatefulSet."""
        return self.pod_name.rpartition("-")[0]


SettingsT = TypeVar("SettingsT", bound=Section)


def read_settings(path: Path, kind: type[SettingsT]) -> SettingsT:
    """Read and validate a settings file. Raises SettingsError that names file and field."""
    try:
        return kind.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}; mount it or set KIMI_SETTINGS") from error
    except json.JSONDecodeError as error:
        raise SettingsError(f"settings file {path}: not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or kind.__name__
        raise SettingsError(f"settings file {path}: {field}: {first['msg']} (got {first['input']!r:.200})") from error


def settings_path() -> Path:
    return Path(os.environ.get("KIMI_SETTINGS", "/etc/kimi/worker.json"))


def pod_identity() -> PodIdentity:
    """Read the pod's identity from the environment. Raises SettingsError."""
    names = {
        "pod_name": "POD_NAME",
        "pod_ip": "POD_IP",
        "group": "KIMI_GROUP",
        "generation": "KIMI_GROUP_GENERATION",
        "run_dir": "KIMI_RUN_DIR",
        "termination_log": "KIMI_TERMINATION_LOG",
    }
    try:
        identity = PodIdentity.model_validate(
            {field: os.environ[name] for field, name in names.items() if name in os.environ}
        )
        _ = identity.ordinal
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(
            f"environment {names[str(first['loc'][0])]}: {first['msg']} (got {first['input']!r})"
        ) from error
    except ValueError as error:
        raise SettingsError(
            f"environment POD_NAME: must end in -<ordinal> (got {os.environ.get('POD_NAME')!r})"
        ) from error
    return identity


def child_environment(settings: WorkerSettings, identity: PodIdentity) -> dict[str, str]:
    """The environment of the pod's other processes: this one's, and what libraries read before our code runs."""
    threads = str(settings.runtime.threads_per_rank)
    extra = {"KIMI_RUN_DIR": str(identity.run_dir), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    extra |= {"NIXL_LOG_LEVEL": os.environ.get("NIXL_LOG_LEVEL", "WARN")}
    if settings.runtime.device == "cpu":
        # A process that may be cut off must have no way in but its connections: no shared memory.
        extra |= {"UCX_TLS": os.environ.get("UCX_TLS", "tcp,self")}
    return {**os.environ, **extra}
