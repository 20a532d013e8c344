"""The store keeps the last version of everything; drift says whether it must be written; leftovers what must go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kimi_operator.decide.leftovers import find_leftovers
from kimi_operator.drift import ANNOTATION_APPLIED, Accepted, covers, with_hash
from kimi_operator.observe import observe
from kimi_operator.render.names import LABEL_DEPLOYMENT
from kimi_operator.store import Listing, ResourceKey, Store, key_of

OWNER = ResourceKey("ns", "k3")


def config_map(name: str, version: int = 1, uid: str = "u", **metadata: Any) -> dict[str, Any]:
    """A child of ns/k3."""
    base = {
        "name": name,
        "namespace": "ns",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {LABEL_DEPLOYMENT: "k3"},
    }
    return {"kind": "ConfigMap", "metadata": base | metadata, "data": {"a": "1"}}


def node(version: int, ready: str = "True", heartbeat: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": ready,
        "lastHeartbeatTime": heartbeat,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"conditions": [condition], "allocatable": {"amd.com/gpu": "8", "memory": str(version)}}
    return {
        "kind": "Node",
        "metadata": {"name": "n", "uid": "n", "resourceVersion": str(version)},
        "spec": {},
        "status": status,
    }


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = Store()
    assert store.put(config_map("a", 7, data="new"))
    assert not store.put(config_map("a", 3, data="old"))
    assert store.of_owner(OWNER)[0]["metadata"]["data"] == "new"


def test_a_heartbeat_is_no_change_and_a_lost_node_is() -> None:
    store = Store()
    assert store.put(node(1))
    assert not store.put(node(2, heartbeat="2026-01-01T00:00:40Z"))
    assert store.put(node(3, ready="Unknown"))


def test_deletion_of_a_predecessor_leaves_its_successor() -> None:
    store = Store()
    store.put(config_map("a", 5, uid="second"))
    assert not store.remove(config_map("a", 4, uid="first"))
    assert store.of_owner(OWNER)
    assert store.remove(config_map("a", 6, uid="second"))
    assert not store.of_owner(OWNER)


def test_a_listing_drops_what_is_gone_but_nothing_that_came_after_it() -> None:
    store = Store()
    for name, version in (("gone", 3), ("kept", 4), ("later", 20)):
        store.put(config_map(name, version))
    touched = store.replace_kind("ConfigMap", Listing([config_map("kept", 4), config_map("new", 9)], version=10))
    assert [one["metadata"]["name"] for one in store.of_owner(OWNER)] == ["kept", "later", "new"]
    assert sorted(one["metadata"]["name"] for one in touched) == ["gone", "new"]


def test_an_object_that_changes_its_owner_is_found_at_the_new_one_only() -> None:
    store = Store()
    store.put(config_map("a", 1))
    store.put(config_map("a", 2, labels={LABEL_DEPLOYMENT: "other"}))
    assert not store.of_owner(OWNER)
    assert store.of_owner(ResourceKey("ns", "other"))


LIVE = {"spec": {"replicas": 2, "list": [{"name": "a", "defaulted": 1}], "extra": True}}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"spec": {"replicas": 2}}, True),
        ({"spec": {"list": [{"name": "a"}]}}, True),
        ({"spec": {"replicas": 3}}, False),
        ({"spec": {"list": [{"name": "a"}, {"name": "b"}]}}, False),
        ({"spec": {"list": []}}, False),
        ({"spec": {"missing": None}}, False),
        ({"spec": {"replicas": {"a": 1}}}, False),
    ],
)
def test_a_live_object_covers_what_is_wanted_of_it(wanted: dict[str, Any], expected: bool) -> None:
    assert covers(LIVE, wanted) is expected


def live_of(manifest: dict[str, Any]) -> dict[str, Any]:
    live = copy.deepcopy(manifest)
    live["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    return live


def test_a_dropped_field_and_a_drifted_one_are_both_seen() -> None:
    accepted = Accepted()
    manifest = {"kind": "Service", "metadata": {"name": "s", "namespace": "ns"}, "spec": {"a": 1, "b": 2}}
    applied = with_hash(manifest)
    live = live_of(applied)
    assert accepted.is_settled(live, applied)
    assert not accepted.is_settled(live, with_hash({**manifest, "spec": {"a": 1}}))
    live["spec"]["b"] = 3
    assert not accepted.is_settled(live, applied)


def test_what_the_server_writes_differently_is_applied_once_and_drift_still_seen() -> None:
    accepted = Accepted()
    manifest = with_hash({"kind": "Service", "metadata": {"name": "s", "namespace": "ns"}, "spec": {"cpu": "1000m"}})
    live = live_of(manifest)
    live["spec"]["cpu"] = "1"
    assert not accepted.is_settled(live, manifest)
    accepted.note(manifest, live)
    later = copy.deepcopy(live)
    later["metadata"]["resourceVersion"] = "2"
    later["status"] = {"x": 1}
    assert accepted.is_settled(later, manifest)
    later["spec"]["cpu"] = "2"
    assert not accepted.is_settled(later, manifest)


def test_the_hash_does_not_depend_on_the_order_of_keys() -> None:
    one = with_hash({"kind": "A", "metadata": {"name": "n"}, "spec": {"a": 1, "b": 2}})
    two = with_hash({"spec": {"b": 2, "a": 1}, "metadata": {"name": "n"}, "kind": "A"})
    assert one["metadata"]["annotations"][ANNOTATION_APPLIED] == two["metadata"]["annotations"][ANNOTATION_APPLIED]
    assert key_of(one) == ("A", "", "n")


def owned(name: str, uid: str = "me") -> dict[str, Any]:
    labels = {LABEL_DEPLOYMENT: "k3", "kimi-operator.io/role": "decode", "kimi-operator.io/group": "0"}
    return config_map(name, ownerReferences=[{"uid": uid, "controller": True}], labels=labels)


def stateful_set(generation: int) -> dict[str, Any]:
    template = {
        "metadata": {"labels": {"kimi-operator.io/generation": str(generation), "kimi-operator.io/revision": "v1-a"}},
        "spec": {"volumes": [{"configMap": {"name": "k3-decode-live"}}]},
    }
    return {**owned("k3-decode-0"), "kind": "StatefulSet", "spec": {"replicas": 1, "template": template}}


def test_only_own_unused_children_are_leftovers() -> None:
    children = [stateful_set(2), owned("k3-decode-live"), owned("k3-decode-old"), owned("anothers", uid="them")]
    seen = observe(children, [])
    found = find_leftovers(children, {("StatefulSet", "k3-decode-0")}, seen, "me")
    assert [one["metadata"]["name"] for one in found] == ["k3-decode-old"]


def test_a_config_map_stays_while_pods_of_an_earlier_start_leave() -> None:
    pod = {
        "kind": "Pod",
        "metadata": {"name": "k3-decode-0-0", "namespace": "ns", "uid": "p", "resourceVersion": "1",
                     "ownerReferences": [{"uid": "u", "controller": True}],
                     "labels": {LABEL_DEPLOYMENT: "k3", "kimi-operator.io/generation": "1"}},
        "spec": {}, "status": {},
    }  # fmt: skip
    children = [stateful_set(2), owned("k3-decode-old"), pod]
    assert not find_leftovers(children, {("StatefulSet", "k3-decode-0")}, observe(children, []), "me")


def test_of_a_childs_status_only_what_is_read_counts_as_a_change() -> None:
    store = Store()

    def put(version: int, kind: str, **status: Any) -> bool:
        metadata = {"name": "n", "namespace": "ns", "resourceVersion": str(version)}
        return store.put({"kind": kind, "metadata": metadata, "spec": {}, "status": status})

    assert put(1, "StatefulSet", replicas=0)
    assert not put(2, "StatefulSet", replicas=2, readyReplicas=2)
    progress = {"type": "Progressing", "status": "True", "message": "going on"}
    assert put(1, "Deployment", readyReplicas=1, conditions=[progress])
    assert not put(2, "Deployment", readyReplicas=1, replicas=2, conditions=[{**progress, "message": "done"}])
    refusal = {"type": "ReplicaFailure", "status": "True", "message": "quota"}
    assert put(3, "Deployment", readyReplicas=1, conditions=[progress, refusal])
    assert put(4, "Deployment", readyReplicas=2, conditions=[progress, refusal])
