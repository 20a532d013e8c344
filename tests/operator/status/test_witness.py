"""Which events are asked for, when, and which of them are told."""

from __future__ import annotations

from typing import Any, cast

import pytest
from kimi_operator.cluster import Cluster
from kimi_operator.errors import ClusterUnavailable
from kimi_operator.store import Document, Listing, Store
from kimi_operator.times import format_time
from kimi_operator.witness import KEEP_S, Witness

NOW_S = 1_000_000.0
REFUSED = 'create Pod k3-decode-0-0 in StatefulSet k3-decode-0 failed error: pods "k3-decode-0-0" is forbidden'


class Events:
    """Lists events by the uid in the query; keeps the queries. No pod has a name that is asked for."""

    def __init__(self, **by_uid: list[Document]) -> None:
        self.by_uid = by_uid
        self.asked: list[str] = []

    async def list(
        self, kind: str, namespace: str | None = None, fields: str = "", labels: str | None = None
    ) -> Listing:
        assert (namespace, labels) == ("ns", None)
        self.asked.append(fields)
        if kind == "Pod":
            assert fields.startswith("metadata.name=k3-decode-0-")
            return Listing([], 1)
        uid, kind_field = fields.removeprefix("involvedObject.uid=").split(",")
        assert kind_field == "type=Warning"
        if uid not in self.by_uid:
            raise ClusterUnavailable("no answer")
        return Listing(self.by_uid[uid], 1)


def event(reason: str, message: str, at_s: float = NOW_S) -> Document:
    return {"reason": reason, "message": message, "lastTimestamp": format_time(at_s)}


def stateful_set(**changes: Any) -> Document:
    metadata = {"name": "k3-decode-0", "namespace": "ns", "uid": "set", "creationTimestamp": format_time(NOW_S - 60)}
    return {"kind": "StatefulSet", "metadata": metadata | changes, "spec": {"replicas": 2}}


def pod(uid: str, age_s: float = 60.0, node: str | None = "node0", **status: Any) -> Document:
    metadata = {
        "name": f"k3-decode-0-{uid}", "namespace": "ns", "uid": uid, "creationTimestamp": format_time(NOW_S - age_s),
        "ownerReferences": [{"uid": "set", "controller": True}],
    }  # fmt: skip
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Pending"} | status}


def witness(events: Events) -> Witness:
    return Witness(cast("Cluster", events), Store())


async def test_a_set_that_may_not_make_its_pods_is_asked_about() -> None:
    events = Events(set=[event("FailedCreate", REFUSED), event("RecreatingFailedPod", "other")])
    one = witness(events)
    assert await one.mount_failures([stateful_set()], NOW_S) == {"set": REFUSED}
    assert await one.mount_failures([stateful_set()], NOW_S + 1) == {"set": REFUSED}
    assert len(events.asked) == 1
    await one.mount_failures([stateful_set()], NOW_S + KEEP_S + 1)
    assert len(events.asked) == 2


@pytest.mark.parametrize(
    "children",
    [
        [stateful_set(), pod("a"), pod("b", phase="Running")],
        [stateful_set(creationTimestamp=format_time(NOW_S - 3))],
        [stateful_set(deletionTimestamp=format_time(NOW_S))],
        [{**stateful_set(), "spec": {"replicas": 0}}],
    ],
    ids=["whole", "young", "leaving", "suspended"],
)
async def test_a_set_that_misses_nothing_is_not(children: list[Document]) -> None:
    running = [{**one, "status": {"phase": "Running"}} for one in children]
    events = Events()
    assert await witness(events).mount_failures(running, NOW_S) == {}
    assert not events.asked


async def test_what_was_told_before_a_set_was_whole_is_past() -> None:
    events = Events(set=[event("FailedCreate", REFUSED, NOW_S - 30)])
    one = witness(events)
    whole = [stateful_set(), pod("a", phase="Running"), pod("b", phase="Running")]
    assert await one.mount_failures(whole, NOW_S) == {}
    assert await one.mount_failures(whole[:2], NOW_S + 5) == {}
    assert await one.mount_failures(whole[:2], NOW_S + 20) == {"set": ""}
    events.by_uid["set"].append(event("FailedCreate", "exceeded quota", NOW_S + 10))
    assert await one.mount_failures(whole[:2], NOW_S + 60) == {"set": "exceeded quota"}


async def test_pods_are_asked_for_by_name_only_where_no_event_says_why() -> None:
    events = Events(set=[])
    owned = pod("0", phase="Running")
    await witness(events).mount_failures([stateful_set(), owned], NOW_S)
    assert events.asked[1:] == ["metadata.name=k3-decode-0-1"]


def test_what_will_hang_is_looked_at_again() -> None:
    one = witness(Events())
    young = stateful_set(creationTimestamp=format_time(NOW_S))
    assert not one.is_waiting([young], NOW_S)
    assert one.is_waiting([young], NOW_S + 30)
    assert one.is_waiting([pod("a", age_s=0)], NOW_S + 30)
    assert not one.is_waiting([pod("a", phase="Running"), pod("b", node=None)], NOW_S + 30)


SANDBOX = "Failed to create pod sandbox: failed to setup network for sandbox {}: plugin type=multus failed"


@pytest.mark.parametrize("reason", ["FailedMount", "FailedMapVolume", "FailedAttachVolume", "FailedCreatePodSandBox"])
async def test_a_pod_without_containers_says_what_it_waits_for(reason: str) -> None:
    events = Events(a=[event(reason, SANDBOX.format("7f" * 32)), event("FailedScheduling", "0/4 nodes")])
    assert await witness(events).mount_failures([pod("a")], NOW_S) == {"a": SANDBOX.format("...")}


async def test_alike_events_are_told_in_the_same_words_whichever_came_last() -> None:
    """Volumes are tried again in turns: a message that followed the last of them would change at rest."""
    one, two = event("FailedMount", "volume a"), event("FailedMount", "volume b")
    summary = event("FailedMount", "Unable to attach or mount volumes: unmounted volumes=[a b]", NOW_S + 100)
    later = event("FailedMount", "volume b", NOW_S + 90)
    for told in ([one, two], [two, one], [one, later, summary]):
        assert await witness(Events(a=told)).mount_failures([pod("a")], NOW_S) == {"a": "volume a"}
    assert (await witness(Events(a=[summary])).mount_failures([pod("a")], NOW_S))["a"].startswith("Unable")
    long_ago = event("FailedMount", "volume a", NOW_S - 50)
    long_after = event("FailedMount", "volume b", NOW_S + 200)
    assert await witness(Events(a=[long_ago, long_after])).mount_failures([pod("a")], NOW_S) == {"a": "volume b"}


async def test_events_that_cannot_be_read_hold_up_nothing() -> None:
    assert await witness(Events()).mount_failures([pod("a")], NOW_S) == {"a": ""}
