"""Which events wake which deployment, and which wake nobody."""

from __future__ import annotations

from typing import Any

import pytest
from kimi_operator.handlers import Inbox
from kimi_operator.queue import WorkQueue
from kimi_operator.store import Listing, ResourceKey, Store

K3, OTHER = ResourceKey("ns", "k3"), ResourceKey("ns", "other")


class Marks:
    """Stands where the queue stands and notes what is marked."""

    def __init__(self) -> None:
        self.seen: list[tuple[ResourceKey, bool]] = []

    def add(self, key: ResourceKey, delay_s: float = 0.0, *, fresh: bool = False) -> None:
        self.seen.append((key, fresh))

    def take(self) -> list[tuple[ResourceKey, bool]]:
        taken, self.seen = self.seen, []
        return taken


def deployment(name: str, version: int, generation: int = 1, **fields: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": str(version), "generation": generation}
    return {"kind": "KimiDeployment", "metadata": metadata, **fields}


def pod(version: int, phase: str, owner: str = "k3") -> dict[str, Any]:
    labels = {"kimi-operator.io/deployment": owner}
    metadata = {"name": "p", "namespace": "ns", "uid": "p", "resourceVersion": str(version), "labels": labels}
    return {"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": phase}}


@pytest.fixture
def marks() -> Marks:
    return Marks()


@pytest.fixture
def inbox(marks: Marks) -> Inbox:
    queue: WorkQueue[ResourceKey] = marks  # type: ignore[assignment]
    box = Inbox(Store(), queue)
    box.take("ADDED", deployment("k3", 1))
    box.take("ADDED", deployment("other", 2))
    assert marks.take() == [(K3, True), (OTHER, True)]
    return box


def test_a_new_spec_comes_fresh_and_an_own_status_write_not_at_all(inbox: Inbox, marks: Marks) -> None:
    inbox.take("MODIFIED", deployment("k3", 3, generation=1, status={"a": 1}))
    assert marks.take() == []
    inbox.take("MODIFIED", deployment("k3", 4, generation=2))
    assert marks.take() == [(K3, True)]
    inbox.take("DELETED", deployment("k3", 5, generation=2))
    assert [key for key, _ in marks.take()] == [K3]


def test_a_child_wakes_its_deployment_when_something_changed(inbox: Inbox, marks: Marks) -> None:
    inbox.take("ADDED", pod(10, "Pending"))
    inbox.take("MODIFIED", pod(11, "Pending"))
    inbox.take("MODIFIED", pod(12, "Running"))
    inbox.take("MODIFIED", pod(11, "Pending"))
    inbox.take("DELETED", pod(13, "Running"))
    assert marks.take() == [(K3, False)] * 3


def test_a_child_that_is_relabelled_wakes_both_deployments(inbox: Inbox, marks: Marks) -> None:
    inbox.take("ADDED", pod(10, "Running"))
    marks.take()
    inbox.take("MODIFIED", pod(11, "Running", owner="other"))
    assert sorted(marks.take()) == [(K3, False), (OTHER, False)]


def test_a_node_wakes_everybody_and_its_heartbeat_nobody(inbox: Inbox, marks: Marks) -> None:
    def node(version: int, ready: str, heartbeat: str) -> dict[str, Any]:
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": "x", "lastHeartbeatTime": heartbeat}
        metadata = {"name": "n", "uid": "n", "resourceVersion": str(version)}
        return {"kind": "Node", "metadata": metadata, "spec": {}, "status": {"conditions": [condition]}}

    inbox.take("ADDED", node(20, "True", "1"))
    assert len(marks.take()) == 2
    inbox.take("MODIFIED", node(21, "True", "2"))
    assert marks.take() == []
    inbox.take("MODIFIED", node(22, "Unknown", "3"))
    assert {key for key, _ in marks.take()} == {K3, OTHER}


def test_a_listing_wakes_those_whose_events_were_missed(inbox: Inbox, marks: Marks) -> None:
    inbox.take("ADDED", pod(10, "Running"))
    marks.take()
    inbox.take_listing("Pod", Listing([], version=30))
    assert marks.take() == [(K3, False)]
    inbox.take_listing("Pod", Listing([], version=31))
    assert marks.take() == []
