"""What the operator knows of the cluster: the last version of each watched object, trimmed, found by owner. No I/O."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kimi_operator.render.names import LABEL_DEPLOYMENT

_SHARED_LENGTH = 80

Document = Mapping[str, Any]
"""One object of the Kubernetes API as parsed JSON; never changed in place."""


class ResourceKey(NamedTuple):
    """A KimiDeployment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ObjectKey(NamedTuple):
    """Any object; the namespace of a cluster-scoped one is empty."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a kind at one moment of the API server, given by its version."""

    documents: list[Document]
    version: int


def key_of(document: Document) -> ObjectKey:
    """The key of a document that has a kind."""
    metadata = document["metadata"]
    return ObjectKey(document["kind"], metadata.get("namespace", ""), metadata["name"])


def owner_of(document: Document) -> ResourceKey | None:
    """The KimiDeployment that an object belongs to: itself, or the one its label names."""
    metadata = document["metadata"]
    if document["kind"] == "KimiDeployment":
        return ResourceKey(metadata["namespace"], metadata["name"])
    name = metadata.get("labels", {}).get(LABEL_DEPLOYMENT)
    return ResourceKey(metadata["namespace"], name) if name and metadata.get("namespace") else None


def controller_of(document: Document) -> Mapping[str, Any]:
    """The reference to the object's controller; empty when it has none."""
    references: list[Document] = document["metadata"].get("ownerReferences", ())
    return next((reference for reference in references if reference.get("controller")), {})


class Store:
    """The last version of each object. Watches and answers may come in any order: older versions are dropped."""

    def __init__(self) -> None:
        self._objects: dict[ObjectKey, Document] = {}
        self._by_owner: dict[ResourceKey, set[ObjectKey]] = defaultdict(set)
        self._by_kind: dict[str, set[ObjectKey]] = defaultdict(set)

    def get(self, key: ObjectKey) -> Document | None:
        """The last version of one object, or None."""
        return self._objects.get(key)

    def of_kind(self, kind: str) -> list[Document]:
        """All objects of a kind, by name."""
        return [self._objects[key] for key in sorted(self._by_kind.get(kind, ()))]

    def of_owner(self, owner: ResourceKey) -> list[Document]:
        """A KimiDeployment's own document and everything that carries its label, by kind and name."""
        return [self._objects[key] for key in sorted(self._by_owner.get(owner, ()))]

    def put(self, document: Document) -> bool:
        """Keep a version unless a newer one is known. True when something but the version's number changed."""
        trimmed = trim(document)
        key = key_of(trimmed)
        known = self._objects.get(key)
        if known is not None and _version(trimmed) < _version(known):
            return False
        if known is not None and owner_of(known) != owner_of(trimmed):
            self._unlink(key, known)
        self._objects[key] = trimmed
        self._by_kind[key.kind].add(key)
        if (owner := owner_of(trimmed)) is not None:
            self._by_owner[owner].add(key)
        return known is None or _content(known) != _content(trimmed)

    def remove(self, document: Document) -> bool:
        """Forget an object that was deleted, unless another of the same name has taken its place. True when known."""
        key = key_of(document)
        known = self._objects.get(key)
        if known is None or known["metadata"].get("uid") != document["metadata"].get("uid"):
            return False
        self._unlink(key, known)
        del self._objects[key]
        self._by_kind[key.kind].discard(key)
        return True

    def replace_kind(self, kind: str, listing: Listing) -> list[Document]:
        """Take a full listing of a kind; what is not in it is gone, unless it is newer than the listing.

        Returns what appeared, changed or went.
        """
        listed = {key_of(document) for document in listing.documents}
        missing = [self._objects[key] for key in self._by_kind.get(kind, set()) - listed]
        gone = [document for document in missing if _version(document) <= listing.version]
        changed = [document for document in listing.documents if self.put(document)]
        for document in gone:
            self.remove(document)
        return changed + gone

    def _unlink(self, key: ObjectKey, document: Document) -> None:
        owner = owner_of(document)
        if owner is None:
            return
        self._by_owner[owner].discard(key)
        if not self._by_owner[owner]:
            del self._by_owner[owner]


def trim(document: Document) -> Document:
    """What this operator reads of an object: watches deliver whole ones, and ten thousand pods must fit."""
    if document["kind"] == "Pod":
        document = _trim_pod(document)
    elif document["kind"] == "Node":
        document = _trim_node(document)
    elif document["kind"] in _STATUS_READ:
        status = _pick(document.get("status", {}), _STATUS_READ[document["kind"]])
        if "conditions" in status:
            refusals = [one for one in status["conditions"] if one["type"] == "ReplicaFailure"]
            status["conditions"] = [_pick(one, ("type", "status", "message")) for one in refusals]
        document = {**document, "status": status}
    metadata = {name: value for name, value in document["metadata"].items() if name != "managedFields"}
    shared: Document = _shared({**document, "metadata": metadata})
    return shared


def _shared(value: Any) -> Any:
    """The same content, in which equal short strings are one object: documents are alike in nearly all of theirs."""
    if isinstance(value, Mapping):
        return {sys.intern(name): _shared(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shared(inner) for inner in value]
    return sys.intern(value) if type(value) is str and len(value) <= _SHARED_LENGTH else value


_STATUS_READ: dict[str, tuple[str, ...]] = {
    "StatefulSet": (),
    "Service": (),
    "PodDisruptionBudget": (),
    "Deployment": ("readyReplicas", "updatedReplicas", "observedGeneration", "conditions"),
}
"""Children's status is their controllers' business: what is not read must not wake anyone when it changes."""

_POD_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "labels",
    "creationTimestamp",
    "deletionTimestamp",
    "ownerReferences",
)
_POD_STATUS = (
    "phase",
    "podIP",
    "conditions",
    "containerStatuses",
    "initContainerStatuses",
    "reason",
    "message",
    "startTime",
)
_CONTAINER_STATUS = ("name", "ready", "restartCount", "state", "lastState")


def _trim_pod(pod: Document) -> Document:
    status = {name: value for name, value in pod.get("status", {}).items() if name in _POD_STATUS}
    for kind in ("containerStatuses", "initContainerStatuses"):
        if kind in status:
            status[kind] = [_pick(container, _CONTAINER_STATUS) for container in status[kind]]
    spec = pod.get("spec", {})
    containers = [{"name": one["name"], "resources": one.get("resources", {})} for one in spec.get("containers", ())]
    return {
        "kind": "Pod",
        "metadata": _pick(pod["metadata"], _POD_METADATA),
        "spec": {"nodeName": spec.get("nodeName"), "containers": containers},
        "status": status,
    }


def _trim_node(node: Document) -> Document:
    spec, status = node.get("spec", {}), node.get("status", {})
    ready = [
        _pick(condition, ("type", "status", "lastTransitionTime"))
        for condition in status.get("conditions", ())
        if condition["type"] == "Ready"
    ]
    # Capacity that moves by itself (memory, ephemeral storage) is not read, so that heartbeats change nothing here.
    allocatable = {name: amount for name, amount in status.get("allocatable", {}).items() if "/" in name}
    return {
        "kind": "Node",
        "metadata": _pick(node["metadata"], ("name", "uid", "resourceVersion", "labels")),
        "spec": {"taints": spec.get("taints", []), "unschedulable": spec.get("unschedulable", False)},
        "status": {"conditions": ready, "allocatable": allocatable},
    }


def _pick(document: Document, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: document[name] for name in names if name in document}


def _version(document: Document) -> int:
    # Versions of one resource are ordered numbers (KEP-5504). 0 where there is none: a document made in a test.
    return int(document["metadata"].get("resourceVersion", "0"))


def _content(document: Document) -> dict[str, Any]:
    metadata = {name: value for name, value in document["metadata"].items() if name != "resourceVersion"}
    return {**document, "metadata": metadata}
