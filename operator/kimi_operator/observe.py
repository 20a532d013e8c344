"""Pure: raw objects of the API in, one typed picture of a KimiDeployment's groups, router and nodes out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import structlog

from kimi_operator.api.base import GROUP
from kimi_operator.api.deployment import Role
from kimi_operator.render.names import (
    ANNOTATION_RESTARTED_AT,
    LABEL_GENERATION,
    LABEL_GROUP,
    LABEL_REVISION,
    LABEL_ROLE,
    GroupKey,
)
from kimi_operator.store import Document, controller_of
from kimi_operator.times import parse_time

ANNOTATION_RESTARTS = f"{GROUP}/restarts"
"""Restarts of the group after failures, from the first start on."""
ANNOTATION_STREAK = f"{GROUP}/restarts-in-a-row"
"""Restarts without a stable time in between; the budget counts these."""
ANNOTATION_FAILURE = f"{GROUP}/last-failure"
"""JSON {time, pod, message}: why the group was last restarted."""
OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service"
SIGNALLED = 128
"""An exit code is this plus the signal's number when a signal ended the container."""
LOG_TAIL = 300
"""Characters of a log that are told."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended."""

    reason: str
    exit_code: int
    message: str
    """The worker's last words, from /dev/termination-log."""
    at_s: float | None = None

    def __str__(self) -> str:
        how = f"ended with exit code {self.exit_code} ({self.reason or 'no reason given'})"
        words = self.message.strip()
        if words and self.exit_code > SIGNALLED:
            # Killed processes have no last words: these are the end of the log, cut anywhere.
            last = words.rpartition("\n")[2]
            return f"{how}; its log ends: {last[-LOG_TAIL:]}"
        return words or how


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One pod of a group or of the router. Times in seconds since 1970."""

    name: str
    uid: str
    generation: int
    revision: str
    created_s: float
    node: str | None = None
    ip: str | None = None
    deleting: bool = False
    phase: str = "Pending"
    ready: bool = False
    ready_changed_s: float | None = None
    """When it last became ready or stopped being so."""
    started_s: float | None = None
    """Since when the main container of this pod runs."""
    restarts: int = 0
    """Of the main container."""
    ended: Ended | None = None
    """How the main container last ended, if it ever did."""
    waiting: tuple[str, str] | None = None
    """Reason and message of a container, main or init, that cannot start."""
    init_ended: Ended | None = None
    """How an init container last failed."""
    unschedulable: str | None = None
    """The scheduler's words while it finds no node."""
    scheduled_s: float | None = None
    """When it was given its node."""
    status_message: str = ""
    """What the kubelet says about the pod as a whole, such as why it was evicted."""
    mount_failure: str = ""
    """What the kubelet says about a volume that it cannot mount."""

    @property
    def was_ready(self) -> bool:
        """Whether it was ready at some time since its container started.

        Ready turns False when the pod is created and does not change again until the pod is ready: a later change to
        False is the loss of something it had.
        """
        if self.ready:
            return True
        return self.started_s is not None and (self.ready_changed_s or 0.0) > self.started_s + 1.0


@dataclass(frozen=True, slots=True)
class FailureSeen:
    """Why a group was last restarted, as noted on its StatefulSet."""

    time: str
    pod: str
    message: str


@dataclass(frozen=True, slots=True)
class GroupSeen:
    """A group's StatefulSet and the pods that it owns."""

    key: GroupKey
    uid: str
    owner_uid: str
    """Of the controller; another one's StatefulSet must not be touched."""
    generation: int
    revision: str
    replicas: int
    restarted_s: float | None = None
    restarts: int = 0
    streak: int = 0
    failure: FailureSeen | None = None
    deleting: bool = False
    creation_failure: str = ""
    """Why pods that are missing cannot be made."""
    pods: tuple[PodSeen, ...] = ()

    @property
    def current(self) -> tuple[PodSeen, ...]:
        """Pods of the group's present generation."""
        return tuple(pod for pod in self.pods if pod.generation == self.generation)

    @property
    def stale(self) -> tuple[PodSeen, ...]:
        """Pods of other generations: made from a template that has been replaced since."""
        return tuple(pod for pod in self.pods if pod.generation != self.generation)


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """The router's Deployment."""

    desired: int = 0
    ready: int = 0
    updated: int = 0
    settled: bool = False
    """The Deployment's controller has acted on its latest spec."""
    refused: str = ""
    """Why its pods cannot be made."""
    pods: tuple[PodSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node, as far as groups depend on it."""

    name: str
    ready: bool = True
    ready_changed_s: float | None = None
    out_of_service: bool = False
    """A person has declared that the node is off: its pods may be removed by force."""
    schedulable: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Allocatable extended resources."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One snapshot of what a KimiDeployment has in the cluster."""

    groups: Mapping[GroupKey, GroupSeen]
    router: RouterSeen
    nodes: Mapping[str, NodeSeen]


def observe(
    children: Iterable[Document], nodes: Iterable[Document], failures: Mapping[str, str] | None = None
) -> Observed:
    """Read a deployment's children (everything with its label) and the cluster's nodes.

    `failures`: by uid, what events say of pods that hang before their containers are made, and of StatefulSets that
    miss pods.
    """
    children = list(children)
    failures = failures or {}
    pods = [child for child in children if child["kind"] == "Pod"]
    groups = [
        _group(child, pods, failures) for child in children if child["kind"] == "StatefulSet" and _has_group(child)
    ]
    routers = [child for child in children if child["kind"] == "Deployment"]
    return Observed(
        groups={group.key: group for group in groups},
        router=_router(routers[0], pods) if routers else RouterSeen(),
        nodes={node.name: node for node in map(read_node, nodes)},
    )


def read_node(node: Document) -> NodeSeen:
    """One node."""
    spec, status = node.get("spec", {}), node.get("status", {})
    taints = spec.get("taints") or ()
    ready = _condition(status, "Ready")
    blocking = [taint for taint in taints if taint.get("effect") in ("NoSchedule", "NoExecute")]
    return NodeSeen(
        name=node["metadata"]["name"],
        ready=ready.get("status") == "True",
        ready_changed_s=parse_time(ready.get("lastTransitionTime")),
        out_of_service=any(taint["key"] == OUT_OF_SERVICE_TAINT for taint in taints),
        schedulable=not spec.get("unschedulable") and not blocking,
        labels=node["metadata"].get("labels", {}),
        gpus={name: int(amount) for name, amount in status.get("allocatable", {}).items() if str(amount).isdigit()},
    )


def read_pod(pod: Document) -> PodSeen:
    """One pod; its first container is the one that counts."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    labels = metadata.get("labels", {})
    names = [container["name"] for container in spec.get("containers", ())]
    statuses = status.get("containerStatuses", ())
    main = next((one for one in statuses if one["name"] in names[:1]), statuses[0] if statuses else {})
    inits = status.get("initContainerStatuses", ())
    ready = _condition(status, "Ready")
    scheduled = _condition(status, "PodScheduled")
    return PodSeen(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=_count(LABEL_GENERATION, labels.get(LABEL_GENERATION), 0),
        revision=labels.get(LABEL_REVISION, ""),
        created_s=parse_time(metadata.get("creationTimestamp")) or 0.0,
        node=spec.get("nodeName"),
        ip=status.get("podIP"),
        deleting=bool(metadata.get("deletionTimestamp")),
        phase=status.get("phase", "Pending"),
        ready=ready.get("status") == "True",
        ready_changed_s=parse_time(ready.get("lastTransitionTime")),
        started_s=parse_time(main.get("state", {}).get("running", {}).get("startedAt")),
        restarts=main.get("restartCount", 0),
        ended=_ended(main),
        waiting=next(filter(None, map(_waiting, [*inits, *statuses])), None),
        init_ended=next((end for end in map(_ended, inits) if end and end.exit_code), None),
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else None,
        scheduled_s=parse_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        status_message=status.get("message", "") or status.get("reason", ""),
    )


def gpus_in_use(pods: Iterable[Document], resource: str) -> dict[str, int]:
    """GPUs that the pods hold, by node."""
    used: dict[str, int] = {}
    for pod in pods:
        node = pod.get("spec", {}).get("nodeName")
        if not node or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            continue
        for container in pod["spec"].get("containers", ()):
            limits = container.get("resources", {}).get("limits") or {}
            used[node] = used.get(node, 0) + int(limits.get(resource, 0))
    return used


def _group(stateful_set: Document, pods: list[Document], failures: Mapping[str, str]) -> GroupSeen:
    metadata, spec = stateful_set["metadata"], stateful_set["spec"]
    template = spec["template"]["metadata"]["labels"]
    annotations = metadata.get("annotations", {})
    uid = metadata["uid"]
    return GroupSeen(
        key=GroupKey(Role(metadata["labels"][LABEL_ROLE]), int(metadata["labels"][LABEL_GROUP])),
        uid=uid,
        owner_uid=controller_of(stateful_set).get("uid", ""),
        generation=_count(LABEL_GENERATION, template.get(LABEL_GENERATION), 1),
        revision=template.get(LABEL_REVISION, ""),
        replicas=spec.get("replicas", 1),
        restarted_s=_time(annotations.get(ANNOTATION_RESTARTED_AT)),
        restarts=_count(ANNOTATION_RESTARTS, annotations.get(ANNOTATION_RESTARTS), 0),
        streak=_count(ANNOTATION_STREAK, annotations.get(ANNOTATION_STREAK), 0),
        failure=_failure(annotations.get(ANNOTATION_FAILURE)),
        deleting=bool(metadata.get("deletionTimestamp")),
        creation_failure=failures.get(uid, ""),
        pods=tuple(
            replace(read_pod(pod), mount_failure=failures.get(pod["metadata"]["uid"], ""))
            for pod in pods
            if controller_of(pod).get("uid") == uid
        ),
    )


def _router(deployment: Document, pods: list[Document]) -> RouterSeen:
    metadata, status = deployment["metadata"], deployment.get("status", {})
    return RouterSeen(
        desired=deployment["spec"].get("replicas", 1),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        settled=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        refused=_condition(status, "ReplicaFailure").get("message", ""),
        pods=tuple(read_pod(pod) for pod in pods if pod["metadata"]["labels"].get(LABEL_ROLE) == "router"),
    )


def _has_group(stateful_set: Document) -> bool:
    labels = stateful_set["metadata"].get("labels", {})
    return labels.get(LABEL_ROLE) in tuple(Role) and labels.get(LABEL_GROUP, "").isdigit()


# Anybody may edit labels and annotations: what cannot be read is taken as absent, and written anew with the next stamp.


def _count(name: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,9}", text):
        _note_unreadable(name, text)
        return default
    return int(text)


def _time(text: str | None) -> float | None:
    try:
        return parse_time(text)
    except ValueError:
        _note_unreadable(ANNOTATION_RESTARTED_AT, str(text))
        return None


def _failure(text: str | None) -> FailureSeen | None:
    if text is None:
        return None
    try:
        noted = json.loads(text)
        # As long as the status can hold.
        return FailureSeen(str(noted["time"])[:64], str(noted["pod"])[:253], str(noted["message"])[:2048])
    except (ValueError, KeyError, TypeError):
        _note_unreadable(ANNOTATION_FAILURE, text)
        return None


@lru_cache(maxsize=256)
def _note_unreadable(name: str, text: str) -> None:
    """Said once: the same look is taken again and again."""
    log.warning("annotation_unreadable", name=name, got=text[:200])


def _condition(status: Document, kind: str) -> Mapping[str, Any]:
    return next((one for one in status.get("conditions", ()) if one["type"] == kind), {})


def _ended(container: Document) -> Ended | None:
    for state in (container.get("state", {}), container.get("lastState", {})):
        if (end := state.get("terminated")) is not None:
            at_s = parse_time(end.get("finishedAt"))
            return Ended(end.get("reason", ""), end.get("exitCode", 0), end.get("message", ""), at_s)
    return None


def _waiting(container: Document) -> tuple[str, str] | None:
    waiting = container.get("state", {}).get("waiting")
    # The two plain stages of every start say nothing.
    if waiting is None or waiting.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return None
    return waiting["reason"], waiting.get("message", "")
