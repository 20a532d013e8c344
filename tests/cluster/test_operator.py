"""The operator as it is shipped: installed by its chart into a real cluster, running there as a pod.

Most deployments here name a checkpoint folder that does not exist: their pods are scheduled and wait for the volume,
which costs nothing and is a failure that must be told exactly.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_localcluster.cluster import Cluster
from kimi_localcluster.errors import CommandError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kimi-operator"
BIN = Path(sys.executable).parent
SYSTEM = "kimi-system"
RELEASE = "kimi-operator"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:{RELEASE}"
REST_S = 60
# The machine that runs this also runs all nodes, and everything else.
PATIENT_S = 240
PATIENT_LEASE = {"leaseDurationSeconds": 40, "renewDeadlineSeconds": 30, "retryPeriodSeconds": 3}
LEASE = ",".join(f"leaderElection.{name}={seconds}" for name, seconds in PATIENT_LEASE.items())

Document = dict[str, Any]


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the chart installed and two replicas ready; KIMI_TEST_RELEASE=1 uses one that is there."""
    if not os.environ.get("KIMI_TEST_RELEASE"):
        cluster.helm("install", RELEASE, str(CHART), "--namespace", SYSTEM, "--create-namespace", "--set", LEASE)
    cluster.wait(f"deployment/{RELEASE}", "condition=Available", namespace=SYSTEM, timeout_s=PATIENT_S)
    cluster.apply(ROOT / "examples" / "local" / "profile.yaml")
    yield cluster
    if not os.environ.get("KIMI_TEST_RELEASE"):
        cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", timeout_s=PATIENT_S)


def deployment(checkpoint: str = "/nowhere/checkpoint", **spec: Any) -> Document:
    """The example for a local cluster, with another checkpoint folder."""
    document: Document = yaml.safe_load((ROOT / "examples" / "local" / "2p2d.yaml").read_text())
    document["spec"]["model"]["checkpoint"]["hostPath"]["path"] = checkpoint
    document["spec"] |= spec
    return document


def conditions(cluster: Cluster, namespace: str) -> dict[str, Document]:
    status = cluster.get("kimideployment", "k3", namespace=namespace).get("status", {})
    return {one["type"]: one for one in status.get("conditions", ())}


def wait_for_condition(cluster: Cluster, namespace: str, kind: str, status: str, reason: str) -> Document:
    def probe() -> Document | None:
        found = conditions(cluster, namespace).get(kind, {})
        return found if (found.get("status"), found.get("reason")) == (status, reason) else None

    return cluster.wait_for(f"{kind} {status} {reason} in {namespace}", probe, timeout_s=PATIENT_S)


def stateful_sets(cluster: Cluster, namespace: str) -> dict[str, Document]:
    return {one["metadata"]["name"]: one for one in cluster.get("statefulsets", namespace=namespace)}


def generation(stateful_set: Document) -> int:
    return int(stateful_set["spec"]["template"]["metadata"]["labels"]["kimi-operator.io/generation"])


def holder(cluster: Cluster) -> str:
    lease = cluster.find("lease", RELEASE, namespace=SYSTEM)
    return str(lease["spec"].get("holderIdentity", "")) if lease else ""


@pytest.fixture
def waiting(operator: Cluster, namespace: str) -> Document:
    """A deployment whose pods wait for a checkpoint that is not there."""
    operator.apply(deployment(), namespace=namespace)
    wait_for_condition(operator, namespace, "WeightsReady", "False", "WeightsMissing")
    found: Document = operator.get("kimideployment", "k3", namespace=namespace)
    return found


def test_a_deployment_becomes_children_and_a_status(operator: Cluster, namespace: str, waiting: Document) -> None:
    found = stateful_sets(operator, namespace)
    assert set(found) == {"k3-prefill-0", "k3-decode-0"}
    for name in ("k3-prefill", "k3-decode", "k3-router"):
        assert operator.find("service", name, namespace=namespace), name
    assert operator.find("deployment", "k3-router", namespace=namespace)
    reference = found["k3-decode-0"]["metadata"]["ownerReferences"][0]
    assert (reference["uid"], reference["controller"]) == (waiting["metadata"]["uid"], True)
    # The pods of prefill may be told of before those of decode are made, and an event is written after the status.
    operator.wait_for(
        "both pods of decode",
        lambda: len(operator.get("pods", namespace=namespace, selector="kimi-operator.io/role=decode")) == 2,
        timeout_s=PATIENT_S,
    )

    message = conditions(operator, namespace)["WeightsReady"]["message"]
    assert "/nowhere/checkpoint is not a directory" in message
    status = waiting["status"]
    assert status["plan"]["decode"]["numPages"] > 0
    assert sum(line["bytes"] for line in status["plan"]["decode"]["lines"]) == 64 * 2**20
    assert status["observedGeneration"] == waiting["metadata"]["generation"]
    assert not waiting["metadata"].get("finalizers")
    assert not any("kopf" in name for name in waiting["metadata"].get("annotations", {}))

    def told() -> list[str]:
        events = operator.get("events", namespace=namespace)
        return [one["reason"] for one in events if one["involvedObject"]["kind"] == "KimiDeployment"]

    operator.wait_for("the event", lambda: "WeightsMissing" in told(), timeout_s=PATIENT_S)
    assert told().count("WeightsMissing") == 1


WORKLOAD: Document = {"prompt": {"fixed": 512}, "output": {"fixed": 64}, "concurrency": 2}
WITH_FRACTIONS: Document = {"prompt": {"fixed": 512.0}, "output": {"fixed": 6.4e1}, "concurrency": 2.0}
"""The same to the API server's schema."""


def test_whole_numbers_with_fractions_reach_the_operator_as_it_reads_them(
    operator: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Its models take integers and no nulls: they must not see what the API server lets pass."""
    document = deployment(workload=WITH_FRACTIONS, router={"replicas": 1.0})
    document["spec"]["prefill"]["groups"] = 1.0
    with pytest.raises(CommandError, match=r"spec\.workload\.targets in body must be of type object"):
        operator.apply(deployment(workload=WITH_FRACTIONS | {"targets": None}), namespace=namespace)
    operator.apply(document, namespace=namespace)
    # Past kubectl, which writes such numbers anew; the rules of a workload take no fractions there.
    del document["spec"]["workload"]
    document["metadata"]["name"] = "k4"
    path = f"/apis/kimi-operator.io/v1alpha1/namespaces/{namespace}/kimideployments"
    body = tmp_path / "body.json"
    body.write_text(json.dumps(document))
    operator.kubectl("create", "--raw", path, "-f", str(body))
    first, second = (operator.get("kimideployment", name, namespace=namespace)["spec"] for name in ("k3", "k4"))
    assert json.dumps(first["workload"], sort_keys=True) == json.dumps(WORKLOAD | {"reuse": 0}, sort_keys=True)
    for spec in (first, second):
        assert (repr(spec["prefill"]["groups"]), repr(spec["router"]["replicas"])) == ("1", "1")
    wait_for_condition(operator, namespace, "PlanResolved", "True", "PlanFits")
    operator.wait("kimideployment/k4", "condition=PlanResolved", namespace=namespace, timeout_s=PATIENT_S)


def test_at_rest_the_operator_writes_nothing(
    operator: Cluster,
    namespace: str,
    waiting: Document,
    written_by_operator: Callable[[float, str], Counter[tuple[str, str]]],
) -> None:
    settled = operator.wait_for("a status that stands still", still(operator, namespace), timeout_s=PATIENT_S)
    assert not written_by_operator(REST_S, namespace)
    assert operator.get("kimideployment", "k3", namespace=namespace)["metadata"]["resourceVersion"] == settled


def still(cluster: Cluster, namespace: str) -> Callable[[], str | None]:
    """A probe for a resource version that has not changed for five seconds."""
    seen: dict[str, float] = {}

    def probe() -> str | None:
        version = str(cluster.get("kimideployment", "k3", namespace=namespace)["metadata"]["resourceVersion"])
        since = seen.setdefault(version, time.monotonic())
        return version if time.monotonic() - since > 5 else None

    return probe


def test_what_others_change_is_put_back(operator: Cluster, namespace: str, waiting: Document) -> None:
    operator.kubectl("scale", "statefulset/k3-decode-0", "--replicas=1", "-n", namespace)
    operator.kubectl("delete", "service/k3-prefill", "-n", namespace)
    operator.kubectl("label", "statefulset/k3-prefill-0", "-n", namespace, "team=blue")
    operator.wait_for(
        "two replicas", lambda: stateful_sets(operator, namespace)["k3-decode-0"]["spec"]["replicas"] == 2
    )
    operator.wait_for("the service", lambda: operator.find("service", "k3-prefill", namespace=namespace))
    assert stateful_sets(operator, namespace)["k3-prefill-0"]["metadata"]["labels"]["team"] == "blue"


def test_a_changed_profile_is_planned_anew_and_rolls_only_what_differs(operator: Cluster, namespace: str) -> None:
    """Nobody touches the deployment: the event is the profile's."""
    profile: Document = yaml.safe_load((ROOT / "examples" / "local" / "profile.yaml").read_text())
    profile["metadata"]["name"] = name = "of-this-test"
    document = deployment(hardware={"profile": name})
    del document["spec"]["decode"]["maxNumSeqs"]
    operator.apply(profile)
    try:
        operator.apply(document, namespace=namespace)
        wait_for_condition(operator, namespace, "WeightsReady", "False", "WeightsMissing")
        before = operator.get("kimideployment", "k3", namespace=namespace)["status"]["plan"]
        assert before["decode"]["maxNumSeqs"] > 12
        patch = json.dumps({"spec": {"limits": {"maxNumSeqs": 12}}})
        operator.kubectl("patch", f"hardwareprofile/{name}", "--type=merge", "-p", patch)
        operator.wait_for(
            "a new generation of decode",
            lambda: generation(stateful_sets(operator, namespace)["k3-decode-0"]) == 2,
            timeout_s=PATIENT_S,
        )
        wait_for_condition(operator, namespace, "PlanResolved", "True", "PlanFits")
        after = operator.get("kimideployment", "k3", namespace=namespace)["status"]["plan"]
        assert after["decode"]["maxNumSeqs"] == 12
        assert after["prefill"] == before["prefill"]
        assert after["profileVersion"] != before["profileVersion"]
        assert generation(stateful_sets(operator, namespace)["k3-prefill-0"]) == 1
    finally:
        operator.kubectl("delete", f"hardwareprofile/{name}")


def test_deletion_removes_everything_with_the_operator_down(
    operator: Cluster, namespace: str, waiting: Document
) -> None:
    operator.kubectl("scale", f"deployment/{RELEASE}", "--replicas=0", "-n", SYSTEM)
    operator.wait_for("no operator", lambda: not operator.get("pods", namespace=SYSTEM), timeout_s=PATIENT_S)
    try:
        operator.kubectl("delete", "kimideployment/k3", "-n", namespace, timeout_s=PATIENT_S)
        kinds = "statefulsets,deployments,services,configmaps,pods,poddisruptionbudgets,replicasets"

        def left() -> list[str]:
            found = operator.get(kinds, namespace=namespace, selector="kimi-operator.io/deployment=k3")
            return [f"{one['kind']}/{one['metadata']['name']}" for one in found]

        operator.wait_for("nothing left", lambda: not left(), timeout_s=PATIENT_S)
    finally:
        operator.kubectl("scale", f"deployment/{RELEASE}", "--replicas=2", "-n", SYSTEM)
        operator.wait(f"deployment/{RELEASE}", "condition=Available", namespace=SYSTEM, timeout_s=PATIENT_S)


def test_a_broken_worker_restarts_its_whole_group_and_a_new_spec_replaces_it(
    operator: Cluster, namespace: str, tmp_path: Path
) -> None:
    """An empty folder mounts, and the worker's last words name the file that it missed."""
    tmp_path.chmod(0o755)
    operator.apply(deployment(str(tmp_path)), namespace=namespace)
    message = wait_for_condition(operator, namespace, "WeightsReady", "False", "WeightsMissing")["message"]
    assert "/models/checkpoint/config.json" in message

    def restarted() -> Document | None:
        status = operator.get("kimideployment", "k3", namespace=namespace)["status"]
        group = status["decode"]["groups"][0]
        return group if group["restarts"] >= 1 and group["generation"] >= 2 else None

    group = operator.wait_for("a restart of decode", restarted, timeout_s=PATIENT_S)
    assert "config.json" in group["lastFailure"]["message"]
    assert group["generation"] == group["restarts"] + 1

    before = stateful_sets(operator, namespace)["k3-decode-0"]
    operator.apply(deployment("/nowhere/else"), namespace=namespace)

    def moved() -> bool:
        now = stateful_sets(operator, namespace)["k3-decode-0"]
        pods = operator.get("pods", namespace=namespace, selector="kimi-operator.io/role=decode")
        labels = [one["metadata"]["labels"] for one in pods]
        wanted = now["spec"]["template"]["metadata"]["labels"]["kimi-operator.io/revision"]
        return (
            generation(now) > generation(before)
            and len(labels) == 2
            and {one["kimi-operator.io/revision"] for one in labels} == {wanted}
            and wanted != before["spec"]["template"]["metadata"]["labels"]["kimi-operator.io/revision"]
        )

    operator.wait_for("both decode pods at the new revision", moved, timeout_s=PATIENT_S)
    annotations = stateful_sets(operator, namespace)["k3-decode-0"]["metadata"]["annotations"]
    assert annotations["kimi-operator.io/restarts-in-a-row"] == "0"


def test_a_shortage_of_nodes_is_counted_and_mended(operator: Cluster, namespace: str) -> None:
    spec = deployment()["spec"]
    operator.apply(deployment(decode=spec["decode"] | {"groups": 2}), namespace=namespace)
    found = wait_for_condition(operator, namespace, "CapacityAvailable", "False", "InsufficientCapacity")
    assert found["message"].startswith("needs 6 nodes x 2 amd.com/gpu, 4 free; k3-")
    assert "0/4 nodes are available" in found["message"]
    operator.apply(deployment(), namespace=namespace)
    wait_for_condition(operator, namespace, "CapacityAvailable", "True", "CapacitySufficient")


def test_pods_that_the_namespace_refuses_are_told_in_its_words(operator: Cluster, namespace: str) -> None:
    """Pod Security refuses the pods one by one; nothing of it stands on any object that is watched."""
    operator.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline")
    operator.apply(deployment(), namespace=namespace)
    message = wait_for_condition(operator, namespace, "Ready", "False", "PodsRefused")["message"]
    assert 'violates PodSecurity "baseline:latest": hostPath volumes (volume "checkpoint")' in message
    assert "label the namespace pod-security.kubernetes.io/enforce=privileged" in message
    assert conditions(operator, namespace)["Stalled"]["status"] == "True"
    assert (
        "violates PodSecurity"
        in operator.get("kimideployment", "k3", namespace=namespace)["status"]["decode"]["blocked"]
    )
    assert not operator.get("pods", namespace=namespace, selector="kimi-operator.io/role=decode")

    operator.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    # The StatefulSet's controller tries again after a time of its own; a new object is tried at once.
    operator.kubectl("delete", "statefulset", "k3-prefill-0", "k3-decode-0", "-n", namespace)
    wait_for_condition(operator, namespace, "Ready", "False", "WeightsMissing")
    assert conditions(operator, namespace)["Stalled"]["status"] == "False"


def test_a_claim_that_is_not_there_is_a_missing_checkpoint(operator: Cluster, namespace: str) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "kimi-k3"}}
    operator.apply(set_path(deployment(), "spec.model.checkpoint", claim), namespace=namespace)
    message = wait_for_condition(operator, namespace, "WeightsReady", "False", "WeightsMissing")["message"]
    assert 'persistentvolumeclaim "kimi-k3" not found' in message
    assert conditions(operator, namespace)["CapacityAvailable"]["status"] == "Unknown"


def test_suspension_ends_all_pods_and_keeps_the_rest(operator: Cluster, namespace: str, waiting: Document) -> None:
    operator.apply(deployment(suspend=True), namespace=namespace)
    operator.wait_for("no pods", lambda: not operator.get("pods", namespace=namespace), timeout_s=PATIENT_S)
    assert {one["spec"]["replicas"] for one in stateful_sets(operator, namespace).values()} == {0}
    wait_for_condition(operator, namespace, "Ready", "False", "Suspended")
    operator.apply(deployment(suspend=False), namespace=namespace)

    def resumed() -> bool:
        return len(operator.get("pods", namespace=namespace, selector="kimi-operator.io/role=decode")) == 2

    operator.wait_for("pods again", resumed, timeout_s=PATIENT_S)
    status = operator.get("kimideployment", "k3", namespace=namespace)["status"]
    assert status["decode"]["groups"][0]["restarts"] == 0


def test_what_belongs_to_others_is_left_alone(operator: Cluster, namespace: str) -> None:
    ports = {"ports": [{"port": 80}]}
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "k3-router"}, "spec": ports}
    operator.apply(theirs, namespace=namespace)
    operator.apply(deployment(), namespace=namespace)
    message = wait_for_condition(operator, namespace, "Stalled", "True", "NameConflict")["message"]
    assert f"Service {namespace}/k3-router" in message
    service = operator.get("service", "k3-router", namespace=namespace)
    assert [port["port"] for port in service["spec"]["ports"]] == [80]
    assert not service["metadata"].get("ownerReferences")


REFUSALS = {
    "ProfileUnknown": ({"hardware": {"profile": "mi999"}}, ["spec.hardware.profile", "mi999", "local-cpu", "mi300x"]),
    "DoesNotFit": ({"hardware": {"profile": "mi300x"}, "model": {
        "architecture": "kimi-k3", "checkpoint": {"hostPath": {"path": "/nowhere"}}}}, ["spec."]),
}  # fmt: skip


@pytest.mark.parametrize(("reason", "case"), REFUSALS.items(), ids=REFUSALS.keys())
def test_a_spec_that_cannot_work_is_refused_in_status(
    operator: Cluster, namespace: str, reason: str, case: tuple[Document, list[str]]
) -> None:
    change, words = case
    operator.apply(deployment(**change), namespace=namespace)
    message = wait_for_condition(operator, namespace, "PlanResolved", "False", reason)["message"]
    for word in words:
        assert word in message
    assert conditions(operator, namespace)["Stalled"]["status"] == "True"
    assert not stateful_sets(operator, namespace)


def set_path(document: Document, path: str, value: object) -> Document:
    changed = copy.deepcopy(document)
    *parents, last = path.split(".")
    place = changed
    for name in parents:
        place = place[name]
    place[last] = value
    return changed


REJECTIONS = {
    "no source": ("spec.model.checkpoint", {}, "exactly one"),
    "two sources": (
        "spec.model.checkpoint",
        {"hostPath": {"path": "/a"}, "persistentVolumeClaim": {"claimName": "b"}},
        "exactly one",
    ),
    "tensor parallel": ("spec.decode.tensorParallel", 3, "tensorParallel"),
    "unknown field": ("spec.decode.replicas", 2, "spec.decode.replicas: field not declared"),
    "wrong type": ("spec.decode.groups", "two", "spec.decode.groups"),
    "no groups": ("spec.decode.groups", 0, "spec.decode.groups"),
    "no ranks of a lane": ("spec.prefill.tensorParallel", 0, "greater than or equal to 1"),
    "no GPUs": ("spec.decode.gpusPerNode", 0, "spec.decode.gpusPerNode in body should be greater than or equal to 1"),
    "no nodes": ("spec.decode.nodesPerGroup", 0, "greater than or equal to 1"),
    "more nodes than can be counted": ("spec.decode.nodesPerGroup", 2**62, "less than or equal to 64"),
    "relative path": ("spec.model.checkpoint.hostPath.path", "models", "spec.model.checkpoint.hostPath.path"),
    "experts": ("spec.decode.nodesPerGroup", 3, "must divide the routed experts (896 of kimi-k3, 8 of kimi-k3-tiny)"),
    "too long": ("spec.model.maxModelLen", 8193, "8,192 of kimi-k3-tiny"),
}


@pytest.mark.parametrize(("path", "value", "words"), REJECTIONS.values(), ids=REJECTIONS.keys())
def test_the_api_server_rejects_what_cannot_be_meant(operator: Cluster, path: str, value: object, words: str) -> None:
    bad = set_path(deployment(), path, value)
    with pytest.raises(CommandError) as refused:
        operator.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(bad))
    assert words in refused.value.output
    assert "evaluating rule" not in refused.value.output, "a rule that cannot be evaluated explains nothing"


TOO_LARGE = ("spec.model.architecture", "kimi-k3")
"""On GPUs of 64 MiB."""
TOO_MANY = ("spec.decode.maxNumSeqs", 17)
DENIED = 'admission webhook "fits.kimi-operator.io" denied the request: DoesNotFit: '


def refusal_of(cluster: Cluster, document: Document, namespace: str) -> str:
    """What `kubectl apply` is told, on trial; empty when it is taken."""
    dry = ("apply", "--server-side", "--dry-run=server", "-n", namespace, "-f", "-")
    try:
        cluster.kubectl(*dry, stdin=yaml.safe_dump(document))
    except CommandError as error:
        return error.output
    return ""


def scale_operator(cluster: Cluster, replicas: int) -> None:
    cluster.kubectl("scale", f"deployment/{RELEASE}", f"--replicas={replicas}", "-n", SYSTEM)
    if replicas:
        cluster.wait(f"deployment/{RELEASE}", "condition=Available", namespace=SYSTEM, timeout_s=PATIENT_S)
    else:
        cluster.wait_for("no operator", lambda: not cluster.get("pods", namespace=SYSTEM), timeout_s=PATIENT_S)


def test_what_cannot_fit_is_refused_at_apply_and_without_the_webhook_all_goes_on(
    operator: Cluster, namespace: str
) -> None:
    suspended = deployment(suspend=True)
    operator.apply(suspended, namespace=namespace)
    upgrade(operator, "webhook.enabled=true")
    try:
        large, many = set_path(suspended, *TOO_LARGE), set_path(suspended, *TOO_MANY)
        large["metadata"]["name"] = "large"
        told = operator.wait_for("a refusal", lambda: refusal_of(operator, large, namespace), timeout_s=PATIENT_S)
        assert DENIED in told
        assert "of weights + 40.0 MiB reserved" in told
        assert "expected at most 64.0 MiB, the memory of a GPU" in told
        assert f"{DENIED}spec.decode.maxNumSeqs: got 17" in refusal_of(operator, many, namespace)
        assert not refusal_of(operator, suspended | {"metadata": {"name": "small"}}, namespace)
        operator.kubectl("label", "kimideployment/k3", "-n", namespace, "team=blue")
        operator.apply(set_path(suspended, "spec.decode.maxNumSeqs", 4), namespace=namespace)

        secret = operator.get("secret", f"{RELEASE}-webhook", namespace=SYSTEM)["data"]
        upgrade(operator, "webhook.enabled=true", "logLevel=debug")
        assert operator.get("secret", f"{RELEASE}-webhook", namespace=SYSTEM)["data"] == secret

        scale_operator(operator, 0)
        operator.apply(large, namespace=namespace)
        operator.apply(many, namespace=namespace)
        operator.kubectl("delete", "kimideployment/large", "-n", namespace, timeout_s=PATIENT_S)
        scale_operator(operator, 2)
        # It was taken while nobody was asked; the loop refuses it all the same, and it can be edited and deleted.
        refused = wait_for_condition(operator, namespace, "PlanResolved", "False", "DoesNotFit")
        assert "spec.decode.maxNumSeqs: got 17, expected at most 16" in refused["message"]
        operator.apply(set_path(many, "spec.router.replicas", 2), namespace=namespace)
        operator.kubectl("delete", "kimideployment/k3", "-n", namespace, timeout_s=PATIENT_S)
    finally:
        scale_operator(operator, 2)
        upgrade(operator)
    assert not operator.find("validatingwebhookconfiguration", RELEASE)


def test_model_identity_cannot_change(operator: Cluster, namespace: str, waiting: Document) -> None:
    with pytest.raises(CommandError, match=r"spec\.model"):
        operator.apply(set_path(deployment(), "spec.model.servedName", "other"), namespace=namespace)


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.stem)
def test_the_examples_and_what_becomes_of_them_are_accepted(operator: Cluster, example: Path) -> None:
    dry = ("apply", "--server-side", "--dry-run=server", "-n", "default", "-f")
    operator.kubectl(*dry, str(example))
    rendered = operator.exec([str(BIN / "kimictl"), "render", "-f", str(example)]).stdout
    taken = operator.kubectl(*dry, "-", stdin=rendered).splitlines()
    assert len(taken) == len(list(yaml.safe_load_all(rendered))) > 5
    assert all(line.endswith("serverside-applied (server dry run)") for line in taken), taken


ALLOWED = ["list kimideployments", "patch kimideployments --subresource=status", "create statefulsets", "delete pods"]
FORBIDDEN = [
    "get secrets", "list secrets", "create pods", "create pods --subresource=exec", "patch pods",
    "get pods --subresource=log",
    "update kimideployments", "delete kimideployments", "patch hardwareprofiles", "patch nodes", "delete nodes",
    "create serviceaccounts", "create clusterroles", "create clusterrolebindings", "impersonate users",
    "get leases -n default", "delete namespaces", "create customresourcedefinitions", "deletecollection pods",
]  # fmt: skip


def can(cluster: Cluster, what: str) -> str:
    """yes or no, in kubectl's words: an error is neither."""
    done = cluster.exec(["kubectl", "auth", "can-i", *what.split(), f"--as={ACCOUNT}"], check=False)
    return done.stdout.strip()


@pytest.mark.parametrize("what", ALLOWED)
def test_the_operator_may_do_its_work(operator: Cluster, what: str) -> None:
    assert can(operator, what) == "yes"


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_operator_may_do_nothing_else(operator: Cluster, what: str) -> None:
    assert can(operator, what) == "no"


def test_a_standby_takes_over_when_the_leader_is_killed(operator: Cluster, namespace: str) -> None:
    leader = operator.wait_for("a leader", lambda: holder(operator), timeout_s=PATIENT_S)
    operator.wait(f"deployment/{RELEASE}", "condition=Available", namespace=SYSTEM, timeout_s=PATIENT_S)
    operator.kubectl("delete", "pod", leader, "-n", SYSTEM, "--grace-period=0", "--force")
    operator.wait_for("another leader", lambda: holder(operator) not in ("", leader), timeout_s=PATIENT_S)
    operator.apply(deployment(), namespace=namespace)
    operator.wait_for("its children", lambda: len(stateful_sets(operator, namespace)) == 2, timeout_s=PATIENT_S)


def test_the_operators_pods_are_locked_down_and_say_who_leads(operator: Cluster) -> None:
    operator.wait_for("a leader", lambda: holder(operator), timeout_s=PATIENT_S)
    for pod in operator.get("pods", namespace=SYSTEM, selector="app.kubernetes.io/component=operator"):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True

    def answers() -> list[str]:
        pods = operator.get("pods", namespace=SYSTEM, selector="app.kubernetes.io/component=operator")
        urls = [f"http://{pod['status']['podIP']}:8080/readyz" for pod in pods if pod["status"].get("podIP")]
        done = [operator.exec(["python3", "-c", READ, url], check=False) for url in urls]
        return sorted(one.stdout.strip() for one in done)

    expected = ["leading", "standing by: another replica leads"]
    operator.wait_for("one leader, one standby", lambda: answers() == expected, timeout_s=PATIENT_S)


READ = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"


def upgrade(cluster: Cluster, *settings: str) -> None:
    values = [word for setting in (LEASE, *settings) for word in ("--set", setting)]
    argv = ["upgrade", RELEASE, str(CHART), "--namespace", SYSTEM, "--wait", "--timeout", f"{PATIENT_S}s", *values]
    cluster.helm(*argv, timeout_s=PATIENT_S + 30)


def columns(cluster: Cluster) -> list[str]:
    crd = cluster.get("crd", "kimideployments.kimi-operator.io")
    return [column["name"] for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]]


def test_an_upgrade_renews_the_crds_and_can_keep_to_some_namespaces(operator: Cluster, namespace: str) -> None:
    shipped = yaml.safe_load((CHART / "crds" / "kimideployments.kimi-operator.io.yaml").read_text())
    older = copy.deepcopy(shipped)
    del older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["suspend"]
    older["spec"]["versions"][0]["additionalPrinterColumns"] = [{"name": "Old", "type": "string", "jsonPath": ".kind"}]
    operator.kubectl("replace", "-f", "-", stdin=yaml.safe_dump(older))
    assert columns(operator) == ["Old"]
    calibration = '{"spec": {"limits": {"maxNumSeqs": 7}}}'
    operator.kubectl("patch", "hardwareprofile", "mi325x", "--type=merge", "-p", calibration)
    with pytest.raises(CommandError, match=r"spec\.suspend"):
        operator.apply(deployment(suspend=True), namespace=namespace)
    try:
        upgrade(operator, f"watchNamespaces={{{namespace}}}")
        assert columns(operator) == [one["name"] for one in shipped["spec"]["versions"][0]["additionalPrinterColumns"]]
        assert not operator.find("clusterrole", f"{RELEASE}-crds"), "what an upgrade needs goes with it"
        assert operator.get("hardwareprofile", "mi325x")["spec"]["limits"]["maxNumSeqs"] == 7

        assert can(operator, f"list pods -n {namespace}") == "yes"
        assert can(operator, "list pods -n default") == "no"
        operator.apply(deployment(suspend=True), namespace=namespace)
        wait_for_condition(operator, namespace, "Ready", "False", "Suspended")
        assert set(stateful_sets(operator, namespace)) == {"k3-prefill-0", "k3-decode-0"}
    finally:
        upgrade(operator, "profiles.install=false")
    assert can(operator, "list pods -n default") == "yes"
    assert operator.get("hardwareprofile", "mi325x")["spec"]["limits"]["maxNumSeqs"] == 7
    assert operator.find("hardwareprofile", "mi300x"), "profiles stay"
    operator.kubectl("delete", "hardwareprofile", "mi325x")
    upgrade(operator)
    assert operator.get("hardwareprofile", "mi325x")["spec"]["limits"]["maxNumSeqs"] != 7
