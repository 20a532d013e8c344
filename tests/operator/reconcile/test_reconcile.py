"""The reconcile loop as it is wired, against an API server in memory: what it writes, and what when it cannot."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
import structlog
from api_server import UNANSWERED, Fault, Key
from kimi_operator.errors import ClusterUnavailable
from kimi_operator.queue import FORGET
from kimi_operator.store import ObjectKey, key_of
from kimi_operator.times import parse_time
from stage import K3, Stage, example, node

DECODE, PREFILL = "k3-decode-0", "k3-prefill-0"
PODS = {f"{DECODE}-0", f"{DECODE}-1"}


async def test_a_deployment_becomes_children_and_then_ready(stage: Stage) -> None:
    await stage.look()
    kinds = Counter(key.kind for key in stage.server.objects)
    assert (kinds["StatefulSet"], kinds["Service"], kinds["ConfigMap"], kinds["Deployment"]) == (2, 3, 3, 1)
    uid = stage.server.get("KimiDeployment", "k3")["metadata"]["uid"]
    for key, document in stage.server.objects.items():
        if key.kind in ("StatefulSet", "Service", "ConfigMap", "Deployment", "PodDisruptionBudget"):
            assert [one["uid"] for one in document["metadata"]["ownerReferences"]] == [uid], key
    assert stage.condition("Ready") == ("False", "GroupsStarting")
    await stage.settle()
    assert stage.condition("Ready") == ("True", "AsDesired")
    assert stage.events("Ready") == ["all groups and the router are ready"]


async def test_at_rest_nothing_is_written(stage: Stage) -> None:
    await stage.settle()
    stage.server.writes.clear()
    await stage.look(3)
    stage.restart_operator()
    await stage.look(3)
    assert stage.server.writes == []


async def test_a_killed_container_restarts_its_group_once(stage: Stage) -> None:
    await stage.settle()
    stage.server.kill(f"{DECODE}-1")
    await stage.look(3)
    assert (stage.generation(DECODE), stage.generation(PREFILL)) == (2, 1)
    assert stage.server.graces == dict.fromkeys(PODS, 5)
    assert stage.num_restarts("decode") == 1
    assert len(stage.events("GroupRestarting")) == 1
    await stage.settle()
    assert stage.condition("Ready") == ("True", "AsDesired")
    assert stage.notes(DECODE) == ("1", "1")
    assert (stage.group("decode")["restarts"], stage.num_restarts("decode")) == (1, 1)


async def test_each_restart_is_told_and_each_return_to_ready(stage: Stage) -> None:
    """However soon after the last one, and in the same words."""
    await stage.settle()
    for _ in range(3):
        stage.server.kill(f"{DECODE}-1", message="out of memory")
        await stage.settle()
        stage.server.now_s += 60
        await stage.settle()
        assert stage.condition("Ready")[0] == "True"
    told = sorted(stage.events("GroupRestarting"))
    assert [message.partition(": ")[0] for message in told] == [
        f"decode group 0 restarts ({count} so far)" for count in (1, 2, 3)
    ]
    assert len({message.partition(": ")[2] for message in told}) == 1
    assert len(stage.events("Ready")) == 4


async def test_a_drained_pod_takes_its_group_along_in_peace(stage: Stage) -> None:
    await stage.settle()
    stage.server.begin_to_delete(f"{DECODE}-0")
    await stage.look(3)
    assert stage.generation(DECODE) == 2
    assert stage.server.graces == {f"{DECODE}-1": None}
    await stage.settle()
    assert stage.notes(DECODE) == ("1", "0")
    assert len(stage.events("Draining")) == 1


REFUSED_SPECS = {
    "no such field": {"nonsense": 1},
    "no such profile": {"hardware": {"profile": "nowhere"}},
    "does not fit": {"prefill": {**example("2p2d.yaml")["spec"]["prefill"], "maxNumSeqs": 4096}},
}


@pytest.mark.parametrize("change", REFUSED_SPECS.values(), ids=REFUSED_SPECS.keys())
async def test_what_runs_is_healed_while_its_spec_is_refused(stage: Stage, change: dict[str, object]) -> None:
    await stage.settle()
    before = stage.status()
    stage.change_spec(**change)
    await stage.look()
    assert stage.condition("Ready")[0] == "False"
    assert stage.condition("Available")[0] == "True"
    for field in ("plan", "revision"):
        assert stage.status()[field] == before[field]
    stage.server.kill(f"{DECODE}-1")
    await stage.look(3)
    assert (stage.generation(DECODE), stage.notes(DECODE)) == (2, ("1", "1"))
    assert (set(stage.server.graces), stage.num_restarts("decode")) == (PODS, 1)
    stage.server.end_deleted_pods()
    stage.server.make_pods()
    stage.server.graces.clear()
    await stage.look(3)
    stage.server.start_pods()
    await stage.look(3)
    assert (stage.server.graces, stage.num_restarts("decode")) == ({}, 1)
    assert stage.condition("Available")[0] == "True"
    assert stage.status()["decode"]["revision"] == before["decode"]["revision"]


async def test_whatever_a_dying_pod_says_reaches_the_status(stage: Stage) -> None:
    """gloo ends its error with a beach: a character that JSON writes as two, and YAML does not read so."""
    await stage.settle()
    words = "Connection closed by peer. GLHF! \U0001f3d6\ufe0f \x7f\x85\ufeff\u2028 \\ud83c"
    stage.server.kill(f"{DECODE}-1", message=words)
    await stage.look(2)
    assert words in stage.group("decode")["lastFailure"]["message"]
    assert stage.generation(DECODE) == 2


async def test_changes_in_a_row_restart_a_group_that_does_not_serve_twice(stage: Stage) -> None:
    """The first is followed at once, the others together when the pods of the first have stood for a while."""
    await stage.look()
    stage.server.make_pods()
    stage.server.now_s += 60
    for num_seqs in (2, 3, 4, 5, 6):
        stage.change_spec(prefill={**example("2p2d.yaml")["spec"]["prefill"], "maxNumSeqs": num_seqs})
        await stage.look()
        stage.server.end_deleted_pods()
        stage.server.make_pods()
        stage.server.now_s += 1
    assert stage.generation(PREFILL) == 2
    look_again_s = await stage.look()
    assert look_again_s is not None
    stage.server.now_s += look_again_s
    await stage.look()
    assert stage.generation(PREFILL) == 3
    await stage.settle()
    assert (stage.generation(PREFILL), stage.notes(PREFILL)) == (3, ("0", "0"))
    settings = [one["data"] for one in stage.server.of("ConfigMap") if "worker.json" in one["data"]]
    assert any(
        '"role": "prefill"' in one["worker.json"] and '"max_num_seqs": 6' in one["worker.json"] for one in settings
    )


async def test_a_refused_status_holds_nothing_up(stage: Stage) -> None:
    await stage.settle()
    stage.server.faults.append(Fault(422, "KimiDeployment", method="PATCH", message="unknown field"))
    stage.server.kill(f"{DECODE}-1")
    assert await stage.look(2) is not None
    assert stage.generation(DECODE) == 2


async def test_back_off_and_budget_hold_while_the_spec_is_refused(stage: Stage) -> None:
    await stage.settle()
    stage.change_spec(nonsense=1)
    for streak in range(5):
        stage.server.kill(f"{DECODE}-1")
        await stage.look(2)
        if streak > 1:  # the first two waits are over by the time that pods are ready
            assert (stage.generation(DECODE), stage.group("decode")["state"]) == (streak + 1, "Failed")
            stage.server.now_s = parse_time(stage.group("decode")["nextRestartTime"]) or 0.0
            await stage.look(2)
        assert stage.generation(DECODE) == streak + 2
        stage.server.end_deleted_pods()
        stage.server.make_pods()
        stage.server.start_pods()
    stage.server.kill(f"{DECODE}-1")
    stage.server.now_s += 500
    await stage.look(2)
    assert stage.notes(DECODE) == ("5", "5")
    assert stage.group("decode")["state"] == "Failed"
    assert stage.condition("DecodeReady") == ("False", "RestartBudgetExhausted")


async def test_a_group_whose_stamp_is_refused_is_left_alone_and_the_others_are_healed(stage: Stage) -> None:
    await stage.settle()
    stage.server.kill(f"{PREFILL}-0")
    stage.server.kill(f"{DECODE}-0")
    stage.server.faults.append(Fault(422, "StatefulSet", PREFILL, "PATCH", "spec is odd"))
    look_again_s = await stage.look(3)
    assert (stage.generation(PREFILL), stage.generation(DECODE)) == (1, 2)
    assert set(stage.server.graces) == PODS
    assert (stage.num_restarts("prefill"), stage.num_restarts("decode")) == (0, 1)
    assert not any("prefill" in message for message in stage.events("GroupRestarting"))
    assert stage.condition("Stalled") == ("True", "ApplyRefused")
    assert (stage.group("prefill")["state"], stage.group("prefill")["restarts"]) == ("Failed", 0)
    assert look_again_s is not None
    stage.server.faults.clear()
    await stage.settle()
    assert (stage.num_restarts("prefill"), stage.generation(PREFILL)) == (1, 2)
    assert stage.condition("Ready") == ("True", "AsDesired")


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "Deployment", "PodDisruptionBudget", "StatefulSet"])
@pytest.mark.parametrize("status", [403, 500])
async def test_no_refused_kind_holds_up_a_restart(stage: Stage, kind: str, status: int) -> None:
    await stage.settle()
    stage.server.faults.append(Fault(status, kind, method="PATCH", message="exceeded quota"))
    template = {"env": [{"name": "A", "value": "B"}]}
    spec = example("2p2d.yaml")["spec"]
    prefill = {**spec["prefill"], "maxNumSeqs": 4, "template": template}
    stage.change_spec(prefill=prefill, router={"replicas": 2, "template": template})
    for one in stage.server.of("Service"):
        stage.server.edit("Service", one["metadata"]["name"], spec={**one["spec"], "type": "ExternalName"})
    stage.server.kill(f"{DECODE}-0")
    for _ in range(3):
        with suppress(ClusterUnavailable):
            await stage.look()
    if kind == "StatefulSet":
        assert stage.server.graces == {}
        assert stage.group("prefill")["state"] == "Ready"
    else:
        assert (stage.generation(DECODE), stage.num_restarts("decode")) == (2, 1)
        assert set(stage.server.graces) >= PODS
    if status == 403:
        assert stage.condition("Stalled") == ("True", "ApplyRefused")
    else:
        assert stage.condition("Progressing") == ("True", "ApiUnavailable")


async def test_no_group_moves_to_a_template_whose_config_map_was_refused(stage: Stage) -> None:
    await stage.settle()
    stage.server.faults.append(Fault(403, "ConfigMap", method="PATCH", message="exceeded quota"))
    stage.change_spec(prefill={**example("2p2d.yaml")["spec"]["prefill"], "maxNumSeqs": 4})
    await stage.look(3)
    assert stage.generation(PREFILL) == 1
    assert stage.server.graces == {}
    assert stage.condition("Available")[0] == "True"
    assert stage.condition("Stalled") == ("True", "ApplyRefused")
    stage.server.faults.clear()
    await stage.settle()
    assert stage.generation(PREFILL) == 2
    assert stage.condition("Ready") == ("True", "AsDesired")


async def test_anothers_object_is_named_and_the_rest_is_made(stage: Stage) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "k3-router", "namespace": "ns"}, "spec": {}}
    stage.server.put(service)
    await stage.look()
    assert stage.server.get("Service", "k3-router")["spec"] == {}
    assert stage.condition("Ready") == ("False", "NameConflict")
    assert "Service ns/k3-router" in stage.status()["conditions"][0]["message"]
    assert len(stage.server.of("StatefulSet")) == 2
    stage.server.drop(Key("Service", "ns", "k3-router"))
    await stage.settle()
    assert stage.condition("Ready") == ("True", "AsDesired")


@pytest.mark.parametrize("status", [404, 409, 410, 429, 500, 503, 504])
async def test_an_api_server_that_cannot_do_it_now_is_told_and_asked_again(stage: Stage, status: int) -> None:
    fault = Fault(status, "StatefulSet", method="PATCH", message="webhook is dead", headers={"Retry-After": "7"})
    stage.server.faults.append(fault)
    await stage.look_in_vain()
    assert stage.condition("Ready") == ("False", "ApiUnavailable")
    assert stage.condition("Progressing") == ("True", "ApiUnavailable")
    assert "webhook is dead" in stage.status()["conditions"][0]["message"]
    assert (stage.status()["prefill"]["desired"], stage.status()["plan"]["gpus"]) == (1, 8)
    assert stage.condition("Stalled")[0] == "False"
    await stage.look_in_vain()
    stage.server.faults.clear()
    await stage.settle()
    assert stage.condition("Ready") == ("True", "AsDesired")


@pytest.mark.parametrize("status", [500, 503, UNANSWERED])
async def test_a_restart_is_counted_once_though_its_pods_cannot_be_deleted(stage: Stage, status: int) -> None:
    await stage.settle()
    stage.server.kill(f"{DECODE}-1")
    stage.server.faults.append(Fault(status, "Pod", method="DELETE"))
    await stage.look_in_vain()
    assert (stage.generation(DECODE), stage.num_restarts("decode"), stage.server.graces) == (2, 1, {})
    assert len(stage.events("GroupRestarting")) == 1
    await stage.look_in_vain()
    stage.server.faults.clear()
    await stage.settle()
    assert (stage.generation(DECODE), stage.num_restarts("decode"), stage.notes(DECODE)) == (2, 1, ("1", "1"))


@pytest.mark.parametrize("num_writes", range(6))
async def test_whoever_takes_over_in_the_midst_of_a_restart_restarts_no_more(stage: Stage, num_writes: int) -> None:
    """The first operator dies after so many writes: stamp, two deletions, event, status."""
    await stage.settle()
    stage.server.kill(f"{DECODE}-1")
    stage.server.writes.clear()

    def die(method: str, key: Key) -> None:
        if len(stage.server.writes) + 1 == num_writes:
            stage.server.faults.append(Fault(UNANSWERED))

    stage.server.before_write = die
    if num_writes == 0:
        stage.server.faults += [Fault(UNANSWERED, method=method) for method in ("PATCH", "DELETE", "POST")]
    with suppress(ClusterUnavailable):
        await stage.look()
    assert len(stage.server.writes) == num_writes
    stage.server.before_write = lambda method, key: None
    stage.server.faults.clear()
    stage.restart_operator()
    await stage.look(2)
    stage.restart_operator()
    await stage.settle()
    assert (stage.generation(DECODE), stage.notes(DECODE)) == (2, ("1", "1"))
    assert set(stage.server.graces) == PODS
    assert stage.condition("Ready") == ("True", "AsDesired")


async def test_a_deployment_that_goes_while_it_is_reconciled_is_let_go(stage: Stage) -> None:
    def delete(method: str, key: Key) -> None:
        if key.kind == "StatefulSet":
            stage.server.drop(stage.deployment_key())

    stage.server.before_write = delete
    await stage.look()
    stage.server.writes.clear()
    assert await stage.look() == FORGET
    assert stage.server.writes == []


@pytest.mark.parametrize("successor", [False, True], ids=["gone", "made anew"])
async def test_nothing_is_made_for_a_deployment_whose_end_nobody_told(stage: Stage, successor: bool) -> None:
    """Its children are collected, and the watches of those do tell."""
    await stage.settle()
    await stage.operator.list_all()
    document = stage.server.get("KimiDeployment", "k3")
    children = stage.reconciler.store.of_owner(K3)
    children.remove(stage.reconciler.store.get(ObjectKey("KimiDeployment", *K3)))
    stage.server.drop(stage.deployment_key())
    if successor:
        stage.server.put({**document, "metadata": {"name": "k3", "namespace": "ns"}, "status": {}})
    stage.server.writes.clear()
    for child in children:
        stage.operator.inbox.take("DELETED", child)
        assert await stage.reconcile() == FORGET
    assert stage.server.writes == []
    assert stage.operator.inbox.store.get(ObjectKey("KimiDeployment", *K3)) is None


async def test_in_a_namespace_that_is_being_deleted_nothing_is_said_and_nothing_made(stage: Stage) -> None:
    """Each object that goes wakes the operator; what it would make anew is refused."""
    await stage.settle()
    before, num_events = stage.status(), len(stage.server.of("Event"))
    stage.server.ending.add("ns")
    await stage.operator.list_all()
    children = stage.reconciler.store.of_owner(K3)
    with structlog.testing.capture_logs() as logs:
        for child in children:
            if child["kind"] not in ("KimiDeployment", "Pod"):
                stage.server.drop(Key(*key_of(child)))
                assert await stage.look() == FORGET
    assert {entry["event"] for entry in logs if entry["log_level"] != "info"} <= {"group_restarted"}
    assert (stage.status(), len(stage.server.of("Event"))) == (before, num_events)


async def test_a_pod_that_leaves_with_its_namespace_is_no_loss_to_tell(stage: Stage) -> None:
    await stage.settle()
    before, num_events = stage.status(), len(stage.server.of("Event"))
    stage.server.ending.add("ns")
    with structlog.testing.capture_logs() as logs:
        stage.server.begin_to_delete(f"{DECODE}-0")
        assert await stage.look() == FORGET
        assert await stage.reconcile() == FORGET
    assert {entry["event"] for entry in logs if entry["log_level"] != "info"} == {"group_restarted"}
    assert (stage.status(), len(stage.server.of("Event"))) == (before, num_events)


async def test_a_deployment_that_is_being_deleted_is_not_touched(stage: Stage) -> None:
    await stage.settle()
    document = stage.server.get("KimiDeployment", "k3")
    metadata = {**document["metadata"], "deletionTimestamp": "2027-01-01T00:00:00Z"}
    stage.server.edit("KimiDeployment", "k3", metadata=metadata)
    stage.server.kill(f"{DECODE}-0")
    stage.server.writes.clear()
    assert await stage.look() == FORGET
    assert stage.server.writes == []


async def test_a_profile_that_was_found_stays_when_other_nodes_come(stage: Stage) -> None:
    for name, device in (("local-cpu", "74a1"), ("other", "74a5")):
        profile = example("profile.yaml")
        profile["metadata"]["name"] = name
        profile["spec"]["match"] = {"deviceIds": [device]}
        stage.server.drop(Key("HardwareProfile", "", name))
        stage.server.put(profile)
    stage.server.put(node("node0", **{"amd.com/gpu.device-id": "74a1"}))
    stage.change_spec(hardware={})
    await stage.settle()
    assert stage.status()["plan"]["profile"] == "local-cpu"
    for index in range(4):
        stage.server.put(node(f"node{index}", **{"amd.com/gpu.device-id": "74a5"}))
        stage.restart_operator()
        await stage.look(2)
        assert stage.status()["plan"]["profile"] == "local-cpu"
        assert stage.condition("Ready") == ("True", "AsDesired")
    stage.server.drop(Key("HardwareProfile", "", "local-cpu"))
    await stage.look()
    assert stage.status()["plan"]["profile"] == "other"


async def test_pods_on_other_hardware_than_planned_for_are_told(stage: Stage) -> None:
    spec = stage.server.get("HardwareProfile", "local-cpu")["spec"]
    stage.server.edit("HardwareProfile", "local-cpu", spec={**spec, "match": {"deviceIds": ["74a1"]}})
    await stage.settle()
    assert stage.condition("PlanResolved")[1] != "HardwareDiffers", "no label says anything"
    home = stage.server.get("Pod", f"{DECODE}-0")["spec"]["nodeName"]
    for name, device in ((home, "74a1"), ("elsewhere", "9999")):
        stage.server.put(node(name, **{"amd.com/gpu.device-id": device}))
    await stage.look()
    assert stage.condition("PlanResolved")[1] != "HardwareDiffers"
    stage.server.put(node(home, **{"amd.com/gpu.device-id": "9999"}))
    await stage.look()
    assert stage.condition("PlanResolved") == ("True", "HardwareDiffers")
    assert f"node {home}" in stage.message("PlanResolved")
    assert stage.condition("Ready") == ("True", "AsDesired")
    assert stage.events("HardwareDiffers") == [stage.message("PlanResolved")]


async def test_a_pod_whose_end_nobody_told_is_looked_for(stage: Stage) -> None:
    await stage.settle()
    stage.change_spec(suspend=True)
    await stage.look()
    for pod in stage.server.of("Pod"):
        stage.server.begin_to_delete(pod["metadata"]["name"])
    look_again_s = await stage.look()
    assert look_again_s is not None
    stage.server.end_deleted_pods()
    # From here on the operator is told nothing.
    await stage.reconcile()
    assert stage.group("decode")["state"] == "Draining"
    stage.server.now_s += look_again_s
    await stage.reconcile()
    assert stage.group("decode")["state"] == "Pending"


async def test_a_pod_on_a_lost_node_waits_for_a_person_and_says_so(stage: Stage) -> None:
    await stage.settle()
    home = stage.server.get("Pod", f"{DECODE}-1")["spec"]["nodeName"]
    stage.server.put(node(home, ready="Unknown"))
    await stage.look(2)
    assert stage.generation(DECODE) == 2
    assert stage.condition("Stalled") == ("True", "NodeLost")
    assert stage.condition("Progressing")[0] == "False"
    assert any(f"kubectl taint node {home}" in message for message in stage.events("NodeLost"))
    lost = node(home, ready="Unknown")
    lost["spec"]["taints"] = [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]
    stage.server.put(lost)
    await stage.look()
    assert stage.server.graces[f"{DECODE}-1"] == 0
    assert stage.condition("Stalled")[0] == "False"


async def test_notes_that_somebody_spoilt_are_written_anew(stage: Stage) -> None:
    await stage.settle()
    live = stage.server.get("StatefulSet", DECODE)
    spoilt = dict.fromkeys(live["metadata"]["annotations"], "x")
    stage.server.edit("StatefulSet", DECODE, metadata={**live["metadata"], "annotations": spoilt})
    await stage.look()
    assert stage.notes(DECODE) == ("0", "0")
    assert stage.condition("Ready") == ("True", "AsDesired")


async def test_the_first_list_is_tried_until_it_succeeds(stage: Stage) -> None:
    fault = Fault(503, "Pod", headers={"Retry-After": "0"}, num_times=3)
    stage.server.faults.append(fault)
    await stage.operator._first_listing()
    assert fault.num_times == 0
    assert stage.operator.inbox.store.of_kind("KimiDeployment")
