"""What shows that a group is broken: one pod that ended, went away or lost its node ends the whole group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kimi_operator.observe import GroupSeen, NodeSeen, PodSeen

NODE_GRACE_S = 60.0
"""How long a node may be NotReady, where the operator's settings say nothing else."""
SCHEDULING_S = 5.0
"""A pod that got its node later than this after it was made had to wait for one."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take before they count as failures, in seconds."""

    start_s: float = 3600.0
    """From the start of a container to ready; also how long a group may stay unready after it was ready."""
    node_s: float = NODE_GRACE_S
    """How long a node may be NotReady. The cluster's own grace period has passed before that."""


class Cause(Enum):
    """What a restart is due to; it says what the restart costs."""

    FAILURE = "failure"
    """The group broke: nothing is left to drain, and the budget pays."""
    LEAVING = "leaving"
    """Somebody took a pod away while all of them worked: the whole group drains, and nobody is to blame."""
    SHORTAGE = "shortage"
    """A pod waited in vain for a peer that had no node: nothing to drain, and the group is not to blame."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a group counts as broken, and the pod that shows it."""

    pod: str
    message: str
    cause: Cause = Cause.FAILURE


@dataclass(frozen=True, slots=True)
class Scene:
    """What surrounds the groups at the moment of a decision."""

    nodes: Mapping[str, NodeSeen]
    now_s: float
    """Seconds since 1970."""

    def node_of(self, pod: PodSeen) -> NodeSeen | None:
        """The node that a pod runs on, if it is known."""
        return self.nodes.get(pod.node or "")


def find_failure(group: GroupSeen, replicas: int, scene: Scene, patience: Patience) -> Evidence | None:
    """The first sign that the group's present generation cannot serve as it is; None while it runs or starts."""
    pods = group.current
    for sign in (_ended, _restarted, _finished):
        for pod in pods:
            if (message := sign(pod)) is not None:
                return Evidence(pod.name, message, _blame(pod, pods))
    # A pod that is told to leave while all work comes last but for the waits: any other sign is one of a loss.
    return (
        _replaced(pods)
        or _missing(pods, replicas)
        or _node_lost(pods, scene, patience)
        or _leaving(pods, scene)
        or _never_ready(pods, patience, scene.now_s)
    )


def next_deadline_s(group: GroupSeen, scene: Scene, patience: Patience) -> float | None:
    """When, without any event, one of the waits of `find_failure` would run out; None when nothing is waited for."""
    deadlines = [_ready_deadline_s(pod, patience) for pod in group.current if not pod.ready]
    deadlines += [_node_deadline_s(scene.node_of(pod), patience) for pod in group.current]
    return min((at for at in deadlines if at is not None and at > scene.now_s), default=None)


def _ended(pod: PodSeen) -> str | None:
    # A container that ended and was not restarted yet. The last words stay in `ended` after a restart too.
    return str(pod.ended) if pod.ended is not None and pod.restarts == 0 and not _is_drained(pod) else None


def _restarted(pod: PodSeen) -> str | None:
    # Ranks of a container that is restarted in place cannot rejoin: the worker waits there for the group's restart.
    if pod.restarts == 0:
        return None
    return str(pod.ended) if pod.ended is not None else f"its container was restarted {pod.restarts} times"


def _finished(pod: PodSeen) -> str | None:
    if pod.phase not in ("Failed", "Succeeded") or _is_drained(pod):
        return None
    return f"the pod {pod.phase.lower()}: {pod.status_message}"


def _is_drained(pod: PodSeen) -> bool:
    """Whether it was told to leave and ended as it should."""
    return pod.deleting and pod.restarts == 0 and pod.ended is not None and pod.ended.exit_code == 0


def _blame(broken: PodSeen, pods: tuple[PodSeen, ...]) -> Cause:
    """A pod that was never ready and ended before the last of its peers had a node has waited for that peer."""
    ended_s = broken.ended.at_s if broken.ended is not None else None
    if ended_s is None or any(pod.was_ready for pod in pods):
        return Cause.FAILURE
    late = [pod for pod in pods if pod.scheduled_s is not None and pod.scheduled_s - pod.created_s > SCHEDULING_S]
    return Cause.SHORTAGE if any((pod.scheduled_s or 0.0) > ended_s for pod in late) else Cause.FAILURE


def _leaving(pods: tuple[PodSeen, ...], scene: Scene) -> Evidence | None:
    going = next((pod for pod in pods if pod.deleting), None)
    if going is None:
        return None
    homes = [scene.node_of(pod) for pod in pods]
    works = all(home is None or home.ready for home in homes)
    return Evidence(going.name, "the pod was deleted", Cause.LEAVING if works else Cause.FAILURE)


def _replaced(pods: tuple[PodSeen, ...]) -> Evidence | None:
    """A pod made after its peers were ready: its StatefulSet replaced one that had been part of the group."""
    for formed in pods:
        if not formed.was_ready:
            continue
        # While ready, the group has formed at the latest then. After a loss only its own start is known; a pod
        # that was never ready and came after that start is no part of what formed.
        formed_s = formed.ready_changed_s if formed.ready else formed.started_s
        for pod in pods:
            if formed_s is not None and pod.created_s > formed_s + 1.0 and (formed.ready or not pod.was_ready):
                return Evidence(pod.name, f"the pod was replaced while {formed.name} was running")
    return None


def _missing(pods: tuple[PodSeen, ...], replicas: int) -> Evidence | None:
    if len(pods) >= replicas or not any(pod.was_ready for pod in pods):
        return None
    return Evidence(pods[0].name, f"{replicas - len(pods)} of the group's {replicas} pods are gone")


def _node_lost(pods: tuple[PodSeen, ...], scene: Scene, patience: Patience) -> Evidence | None:
    for pod in pods:
        node = scene.node_of(pod)
        deadline_s = _node_deadline_s(node, patience)
        if node is not None and (node.out_of_service or (deadline_s is not None and scene.now_s >= deadline_s)):
            state = "out of service" if node.out_of_service else "NotReady"
            return Evidence(pod.name, f"its node {node.name} is {state}")
    return None


def _never_ready(pods: tuple[PodSeen, ...], patience: Patience, now_s: float) -> Evidence | None:
    for pod in pods:
        deadline_s = None if pod.ready else _ready_deadline_s(pod, patience)
        if deadline_s is not None and now_s >= deadline_s:
            what = "lost readiness and did not regain it" if pod.was_ready else "was not ready"
            return Evidence(pod.name, f"the pod {what} within {patience.start_s:.0f} s")
    return None


def _ready_deadline_s(pod: PodSeen, patience: Patience) -> float | None:
    if pod.started_s is None:
        return None
    since_s = max(pod.started_s, pod.ready_changed_s or 0.0) if pod.was_ready else pod.started_s
    return since_s + patience.start_s


def _node_deadline_s(node: NodeSeen | None, patience: Patience) -> float | None:
    if node is None or node.ready or node.ready_changed_s is None:
        return None
    return node.ready_changed_s + patience.node_s
