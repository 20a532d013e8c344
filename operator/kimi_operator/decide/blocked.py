"""Why pods of a group do not start, in one reason of the vocabulary and the words of who refused them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kimi_operator.api.conditions import Reason
from kimi_operator.observe import PodSeen

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
# The worker names the file it could not use; all of these words belong to the checkpoint.
_CHECKPOINT = re.compile(r"checkpoint|safetensors|config\.json|tiktoken|weight", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Blocked:
    """One reason for a group that does not start, with the pod that shows it."""

    pod: str
    reason: Reason
    message: str


def find_blocked(pods: Iterable[PodSeen]) -> Blocked | None:
    """The first pod that something keeps from starting; None while all go the way of every start."""
    return next(filter(None, map(_blocked, pods)), None)


def is_about_checkpoint(message: str) -> bool:
    """Whether the last words of a worker, or of the kubelet about a volume, concern the checkpoint."""
    return bool(_CHECKPOINT.search(message))


def _blocked(pod: PodSeen) -> Blocked | None:
    if pod.unschedulable is not None:
        return Blocked(pod.name, Reason.INSUFFICIENT_CAPACITY, f"{pod.name}: {pod.unschedulable}")
    if pod.mount_failure:
        reason = Reason.WEIGHTS_MISSING if is_about_checkpoint(pod.mount_failure) else Reason.PODS_NOT_READY
        return Blocked(pod.name, reason, f"{pod.name} on node {pod.node}: {pod.mount_failure}")
    if pod.init_ended is not None:
        said = str(pod.init_ended)
        reason = Reason.WEIGHTS_MISSING if is_about_checkpoint(said) else Reason.PODS_NOT_READY
        return Blocked(pod.name, reason, f"{pod.name}: {said}")
    if pod.waiting is None:
        return None
    why, message = pod.waiting
    reason = Reason.IMAGE_UNAVAILABLE if why in _IMAGE_REASONS else Reason.PODS_NOT_READY
    return Blocked(pod.name, reason, f"{pod.name}: {why}: {message}")
