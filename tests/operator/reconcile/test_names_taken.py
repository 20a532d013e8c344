"""A pod that has the name of a group's pod and is not the group's: the group says so, and goes on once it is gone."""

from __future__ import annotations

import pytest
from api_server import Key
from stage import Stage

DECODE = "k3-decode-0"
POD = f"{DECODE}-0"
LABEL = "kimi-operator.io"

EDITS = {
    "out of the group": ({f"{LABEL}/group": "7"}, f"{LABEL}/group=0"),
    "out of the watch": ({f"{LABEL}/deployment": None}, f"{LABEL}/deployment=k3"),
    "to another deployment": ({f"{LABEL}/deployment": "other"}, f"{LABEL}/deployment=k3"),
    "of all": (
        dict.fromkeys((f"{LABEL}/deployment", f"{LABEL}/role", f"{LABEL}/group")),
        f"{LABEL}/deployment=k3 {LABEL}/role=decode {LABEL}/group=0",
    ),
}


async def lose_the_name(stage: Stage, labels: dict[str, str | None]) -> None:
    """Edit a pod's labels: its StatefulSet lets it go, the group restarts, and one of its pods cannot be made."""
    await stage.settle()
    stage.server.relabel(POD, **labels)
    stage.server.make_pods()
    await stage.look()
    assert stage.generation(DECODE) == 2
    stage.server.end_deleted_pods()
    stage.server.make_pods()
    await stage.look()
    stage.server.now_s += 15
    await stage.look()


@pytest.mark.parametrize(("labels", "remedy"), EDITS.values(), ids=EDITS.keys())
async def test_a_pod_that_lost_its_labels_is_named_with_what_to_do(
    stage: Stage, labels: dict[str, str | None], remedy: str
) -> None:
    await lose_the_name(stage, labels)
    assert stage.condition("Stalled") == ("True", "PodsRefused")
    assert stage.condition("DecodeReady") == ("False", "PodsRefused")
    for message in (stage.message("Stalled"), stage.status()["decode"]["blocked"]):
        assert f"pod {POD} is missing" in message
        assert f"kubectl label pod -n ns {POD} --overwrite {remedy};" in message
        assert f"kubectl delete pod -n ns {POD}" in message
    assert stage.server.get("Pod", POD)["metadata"]["labels"].get(f"{LABEL}/generation") == "1"

    # Its peer waits in vain, ends, and is not judged: no restart would help.
    stage.server.now_s += 1000
    stage.server.writes.clear()
    await stage.look(3)
    assert (stage.generation(DECODE), stage.server.writes) == (2, [])


@pytest.mark.parametrize("mend", ["delete the pod", "restore the labels"])
async def test_a_group_whose_name_is_free_again_becomes_ready(stage: Stage, mend: str) -> None:
    await lose_the_name(stage, {f"{LABEL}/group": "7"})
    if mend == "delete the pod":
        stage.server.drop(Key("Pod", "ns", POD))
    else:
        stage.server.relabel(POD, **{f"{LABEL}/group": "0"})
    stage.server.make_pods()
    await stage.settle()
    assert stage.condition("Ready") == ("True", "AsDesired")
    assert stage.condition("Stalled")[0] == "False"
    assert (stage.generation(DECODE), stage.notes(DECODE)) == (2, ("1", "1"))


async def test_anothers_pod_is_not_to_be_relabelled(stage: Stage) -> None:
    owner = {"kind": "ReplicaSet", "name": "web", "uid": "web", "controller": True}
    metadata = {"name": POD, "namespace": "ns", "ownerReferences": [owner]}
    stage.server.put({"kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Running"}})
    await stage.look()
    stage.server.make_pods()
    stage.server.now_s += 15
    await stage.look()
    assert stage.condition("Stalled") == ("True", "PodsRefused")
    assert "belongs to ReplicaSet web" in stage.message("Stalled")
    assert "kubectl label" not in stage.message("Stalled")


async def test_a_predecessor_that_is_leaving_needs_nobody(stage: Stage) -> None:
    await stage.look()
    metadata = {"name": POD, "namespace": "ns", "deletionTimestamp": "2027-01-15T08:00:00Z"}
    stage.server.put({"kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Running"}})
    stage.server.make_pods()
    stage.server.now_s += 15
    await stage.look()
    assert stage.condition("Stalled")[0] == "False"
    assert stage.condition("DecodeReady") == ("False", "GroupsStarting")
