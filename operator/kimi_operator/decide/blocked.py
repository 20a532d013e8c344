"""Why pods of a group do not start, in one reason of the vocabulary and the words of who refused them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kimi_operator.api.conditions import Reason
from kimi_operator.observe import PodSeen
from kimi_operator.render.settings import CHECKPOINT_PATH

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
# How a worker's last words begin when they are about the checkpoint: with the file that was checked before the start,
# or with the process that met the error and the error's type. A pod's name may stand before them. Whatever else
# speaks of weights (memory that ran out while they were loaded) is another matter.
_CHECKPOINT_WORDS = re.compile(
    rf"^(?:[a-z0-9.-]+: )?(?:{CHECKPOINT_PATH}/|[a-z]+(?: \d+)?: (?:CheckpointError|ConfigError|TokenizerError): )"
)
# The kubelet names the volume by the name that the pod gives it.
_CHECKPOINT_VOLUME = re.compile(r'volume "checkpoint"|unmounted volumes=\[[^\]]*\bcheckpoint\b')
_NO_ROOM = re.compile(r"\bInsufficient \S|\banti-affinity\b|\bToo many pods\b")
_POD_SECURITY = "violates PodSecurity"
_PRIVILEGED = "label the namespace pod-security.kubernetes.io/enforce=privileged"


@dataclass(frozen=True, slots=True)
class Blocked:
    """One reason for a group that does not start, with the pod that shows it."""

    pod: str
    """Empty when there is no pod to show."""
    reason: Reason
    message: str


def find_blocked(pods: Iterable[PodSeen], creation_failure: str = "") -> Blocked | None:
    """The first pod that something keeps from starting; None while all go the way of every start.

    `creation_failure`: why the StatefulSet's controller could not make the pods that are missing.
    """
    if creation_failure:
        remedy = f"; {_PRIVILEGED}" if _POD_SECURITY in creation_failure else ""
        return Blocked("", Reason.PODS_REFUSED, f"{creation_failure}{remedy}")
    return next(filter(None, map(_blocked, pods)), None)


def is_about_checkpoint(words: str) -> bool:
    """Whether the last words of a worker are about its checkpoint; the name of its pod may stand before them."""
    return bool(_CHECKPOINT_WORDS.search(words))


def unschedulable_reason(words: str) -> Reason:
    """What the scheduler's words are about. The only claim that a worker may have is that of its checkpoint."""
    if "persistentvolumeclaim" in words.lower():
        return Reason.WEIGHTS_MISSING
    return Reason.INSUFFICIENT_CAPACITY if _NO_ROOM.search(words) else Reason.UNSCHEDULABLE


def _blocked(pod: PodSeen) -> Blocked | None:
    if pod.unschedulable is not None:
        return Blocked(pod.name, unschedulable_reason(pod.unschedulable), f"{pod.name}: {pod.unschedulable}")
    if pod.mount_failure:
        missing = _CHECKPOINT_VOLUME.search(pod.mount_failure)
        reason = Reason.WEIGHTS_MISSING if missing else Reason.PODS_NOT_READY
        return Blocked(pod.name, reason, f"{pod.name} on node {pod.node}: {pod.mount_failure}")
    if pod.init_ended is not None:
        return Blocked(pod.name, Reason.PODS_NOT_READY, f"{pod.name}: {pod.init_ended}")
    if pod.waiting is None:
        return None
    why, message = pod.waiting
    reason = Reason.IMAGE_UNAVAILABLE if why in _IMAGE_REASONS else Reason.PODS_NOT_READY
    return Blocked(pod.name, reason, f"{pod.name}: {why}: {message}")
