"""Volumes of a worker pod: settings, checkpoint, scratch, shared memory, and what the hardware profile mounts."""

from __future__ import annotations

from typing import Any

from kimi_operator.api.deployment import Checkpoint
from kimi_operator.api.profile import ProfilePodSpec
from kimi_operator.render.pods import SETTINGS_DIR
from kimi_operator.render.settings import CHECKPOINT_PATH

Volume = dict[str, Any]
Mount = dict[str, Any]

SCRATCH_DIRS = {"run": "/run/kimi", "tmp": "/tmp"}  # noqa: S108 - emptyDirs of the pod
SCRATCH_LIMITS = {"run": "64Mi", "tmp": "16Gi"}


def worker_volumes(checkpoint: Checkpoint, pod: ProfilePodSpec, config_map: str) -> tuple[list[Volume], list[Mount]]:
    """Volumes of the pod, and where its container mounts them."""
    pairs = [
        settings_volume(config_map),
        ({"name": "checkpoint", **_checkpoint(checkpoint)}, _mount("checkpoint", CHECKPOINT_PATH, read_only=True)),
        *scratch_volumes(),
        (
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(pod.shared_memory)}},
            _mount("shm", "/dev/shm"),  # noqa: S108 - an emptyDir of the pod
        ),
        *_devices(pod),
        *_host_paths(pod),
    ]
    return [volume for volume, _ in pairs], [mount for _, mount in pairs]


def settings_volume(config_map: str) -> tuple[Volume, Mount]:
    """The settings file."""
    return {"name": "settings", "configMap": {"name": config_map}}, _mount("settings", SETTINGS_DIR, read_only=True)


def scratch_volumes() -> list[tuple[Volume, Mount]]:
    """Where a pod may write; it ends with the pod, not with a restart of a container."""
    return [
        ({"name": name, "emptyDir": {"sizeLimit": SCRATCH_LIMITS[name]}}, _mount(name, path))
        for name, path in SCRATCH_DIRS.items()
    ]


def _mount(name: str, path: str, *, read_only: bool = False) -> Mount:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


def _checkpoint(checkpoint: Checkpoint) -> Volume:
    if checkpoint.host_path is not None:
        return {"hostPath": {"path": checkpoint.host_path.path, "type": "Directory"}}
    if checkpoint.persistent_volume_claim is not None:
        claim = checkpoint.persistent_volume_claim.claim_name
        return {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    assert checkpoint.image is not None, "the model admits exactly one source"
    return {"image": {"reference": checkpoint.image.reference, "pullPolicy": checkpoint.image.pull_policy}}


def _devices(pod: ProfilePodSpec) -> list[tuple[Volume, Mount]]:
    return [
        ({"name": f"device-{index}", "hostPath": {"path": path}}, _mount(f"device-{index}", path))
        for index, path in enumerate(pod.devices)
    ]


def _host_paths(pod: ProfilePodSpec) -> list[tuple[Volume, Mount]]:
    return [
        (
            {"name": f"host-{index}", "hostPath": {"path": item.path, "type": item.type.value}},
            _mount(f"host-{index}", item.mount_path or item.path, read_only=item.read_only),
        )
        for index, item in enumerate(pod.host_paths)
    ]
