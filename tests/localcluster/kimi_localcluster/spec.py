"""What a cluster consists of: the values that `up` takes, addresses derived from them, and the nodes' GPU labels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_localcluster.errors import LocalClusterError

DEFAULT_NAME = "kimi"
DEFAULT_IMAGES = ("ghcr.io/kimi-operator/operator:0.1.0", "ghcr.io/kimi-operator/worker:0.1.0")
PAUSE_IMAGE = "localhost/pause:1"
MAX_NODES = 32

# Every cluster has network namespaces of its own, so two clusters may use the same addresses.
BRIDGE = "kc0"
CONTROL_IP = "172.30.0.1"
API_SERVER = f"https://{CONTROL_IP}:6443"
NODE_PREFIX_LENGTH = 24
POD_NETWORK = "10.244.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What AMD's labeller reports of a card, besides its memory."""

    product_name: str
    vram: str
    num_compute_units: int


# Keyed by PCI device id (vendor 1002). SIMDs: four a compute unit on CDNA.
GPU_MODELS = {
    "74a0": GpuModel("AMD_Instinct_MI300A", "128G", 228),
    "74a1": GpuModel("AMD_Instinct_MI300X_OAM", "192G", 304),
    "74b5": GpuModel("AMD_Instinct_MI300X_VF", "192G", 304),
    "74a2": GpuModel("AMD_Instinct_MI308X_OAM", "192G", 80),
    "74a5": GpuModel("AMD_Instinct_MI325X", "256G", 304),
    "74b9": GpuModel("AMD_Instinct_MI325X_VF", "256G", 304),
    "75a0": GpuModel("AMD_Instinct_MI350X", "288G", 256),
    "75a3": GpuModel("AMD_Instinct_MI355X", "288G", 256),
}


def check_name(name: str) -> None:
    """Raise LocalClusterError unless it can name a cluster: files and control groups are named, and removed, by it."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise LocalClusterError(
            f"cluster name {name!r}: expected at most 40 lower-case letters, digits and inner dashes"
        )


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Input of `up`. Raises LocalClusterError for values that no cluster can have."""

    name: str = DEFAULT_NAME
    num_nodes: int = 4
    gpus_per_node: int = 8
    device_id: str = "74a1"
    vram: str = "192G"
    images: tuple[str, ...] = DEFAULT_IMAGES
    folders: tuple[tuple[str, str], ...] = ()
    """Folders of this machine that every node shows at another path: (here, on the node)."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise LocalClusterError(f"nodes: got {self.num_nodes}, expected 1 to {MAX_NODES}")
        if not 0 <= self.gpus_per_node <= 64:
            raise LocalClusterError(f"gpus: got {self.gpus_per_node}, expected 0 to 64 a node")
        if not re.fullmatch(r"[0-9a-f]{4}", self.device_id):
            raise LocalClusterError(f"device-id: got {self.device_id!r}, expected four hex digits such as 74a1")
        if not re.fullmatch(r"[1-9][0-9]*G", self.vram):
            raise LocalClusterError(f"vram: got {self.vram!r}, expected whole GiB as AMD's labeller writes it: 192G")
        for here, there in self.folders:
            if not Path(here).is_dir():
                raise LocalClusterError(f"folder {here!r} for the nodes' {there}: not a folder on this machine")
            if len(Path(there).parts) < 3 or not Path(there).is_absolute():
                raise LocalClusterError(f"folder on the nodes {there!r}: expected an absolute path such as /opt/models")

    @property
    def node_names(self) -> list[str]:
        return [f"node{index}" for index in range(self.num_nodes)]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> ClusterSpec:
        return cls.from_json(json.loads(path.read_text()))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ClusterSpec:
        folders = tuple((here, there) for here, there in values["folders"])
        return cls(**{**values, "images": tuple(values["images"]), "folders": folders})


def node_ip(index: int) -> str:
    return f"172.30.0.{10 + index}"


def pod_cidr(index: int) -> str:
    return f"10.244.{index}.0/24"


def default_vram(device_id: str) -> str:
    """Memory label of a known card; 192G for others."""
    return GPU_MODELS[device_id].vram if device_id in GPU_MODELS else "192G"


def gpu_labels(spec: ClusterSpec) -> dict[str, str]:
    """Labels that AMD's GPU operator and its node labeller put on a node; none without GPUs.

    A card that is not in GPU_MODELS gets the labels that are known: device id, memory and family.
    """
    if spec.gpus_per_node == 0:
        return {}
    values = {
        "device-id": spec.device_id,
        "vram": spec.vram,
        "family": "AI",
        "driver-version": "6.14.14",
        "compute-memory-partition": "spx_nps1",
        "compute-partitioning-supported": "true",
        "memory-partitioning-supported": "true",
    }
    if model := GPU_MODELS.get(spec.device_id):
        values["product-name"] = model.product_name
        values["cu-count"] = str(model.num_compute_units)
        values["simd-count"] = str(4 * model.num_compute_units)
    labels = {f"amd.com/gpu.{key}": value for key, value in values.items()}
    for key in ("device-id", "vram", "family", "product-name", "cu-count", "simd-count"):
        if key in values:
            labels[f"beta.amd.com/gpu.{key}"] = values[key]
            labels[f"beta.amd.com/gpu.{key}.{values[key]}"] = str(spec.gpus_per_node)
    labels["feature.node.kubernetes.io/amd-gpu"] = "true"
    return labels
