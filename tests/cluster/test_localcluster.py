"""The local cluster: real nodes, real pods, real faults, and nothing left behind."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kimi_localcluster.cluster import Cluster
from kimi_localcluster.errors import CommandError, LocalClusterError
from kimi_localcluster.existing import LOCAL_ONLY, ExistingCluster
from kimi_localcluster.keeper import control_process, keeper_process
from kimi_localcluster.spec import DEFAULT_IMAGES
from kimi_localcluster.testing import temporary_namespace
from kimi_localcluster.traces import Machine, Traces, find_traces, namespaces_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

WORKER_IMAGE = DEFAULT_IMAGES[1]
FROM_KUBECONFIG = """
import sys
from kimi_localcluster.cluster import Cluster
existing = Cluster.from_kubeconfig(sys.argv[1])
existing.wait("node/node0", "condition=Ready")
print(*(node["metadata"]["name"] for node in existing.get("nodes")))
"""
LOCKED_DOWN = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def web_manifests(folder: Path) -> list[dict[str, Any]]:
    """Four non-root pods with a node's GPUs each that serve a folder of the machine, and two services for them."""
    container = {
        "name": "web",
        "image": WORKER_IMAGE,
        "command": ["python", "-m", "http.server", "8000"],
        "workingDir": "/served",
        "securityContext": LOCKED_DOWN,
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
        "resources": {"limits": {"memory": "256Mi", "amd.com/gpu": 8}},
        "volumeMounts": [{"name": "served", "mountPath": "/served", "readOnly": True}],
    }
    pod = {
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
        "containers": [container],
        "volumes": [{"name": "served", "hostPath": {"path": str(folder), "type": "Directory"}}],
    }
    labels = {"app": "web"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"clusterIP": "None", "selector": labels, "ports": [{"port": 8000}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web-any"},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "web"},
            "spec": {
                "serviceName": "web",
                "replicas": 4,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


def fetch(url: str, timeout_s: float = 10) -> list[str]:
    """Command that prints what a URL answers, with the pods' own Python."""
    program = f"import urllib.request as u; print(u.urlopen({url!r}, timeout={timeout_s}).read().decode())"
    return ["python3", "-c", program]


def ready_replicas(cluster: Cluster, namespace: str) -> int:
    return int(cluster.get("statefulset", "web", namespace=namespace)["status"].get("readyReplicas", 0))


@pytest.fixture(scope="module")
def web(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The namespace in which the four pods run; the folder they serve holds a file `needle`."""
    # Only the folder itself must be readable: a mount does not pass through its parents.
    folder = tmp_path_factory.mktemp("served")
    folder.chmod(0o755)
    (folder / "needle").write_text("found\n")
    with temporary_namespace(cluster, "web") as namespace:
        cluster.apply(web_manifests(folder), namespace=namespace)
        cluster.wait_for("four ready pods", lambda: ready_replicas(cluster, namespace) == 4)
        # Each node's kube-proxy learns of ready pods a moment after the StatefulSet does.
        answers = fetch(f"http://web-any.{namespace}.svc.cluster.local/needle")
        cluster.wait_for(
            "the service on every node",
            lambda: all(cluster.kubectl("exec", "-n", namespace, f"web-{at}", "--", *answers) for at in range(4)),
        )
        yield namespace


def restart_counts(cluster: Cluster, namespace: str) -> dict[str, int]:
    pods = cluster.get("pods", namespace=namespace)
    return {pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}


def test_nodes_are_ready_with_gpus_and_labels(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")
    assert [node["metadata"]["name"] for node in nodes] == cluster.spec.node_names
    for node in nodes:
        assert cluster.is_node_ready(node["metadata"]["name"])
        assert node["status"]["allocatable"]["amd.com/gpu"] == "8"
        labels = node["metadata"]["labels"]
        assert labels["amd.com/gpu.device-id"] == "74a1"
        assert labels["amd.com/gpu.vram"] == "192G"
        assert labels["feature.node.kubernetes.io/amd-gpu"] == "true"


def test_pods_reach_each_other_across_nodes(cluster: Cluster, web: str) -> None:
    pods = cluster.get("pods", namespace=web, selector="app=web")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 4, "each pod takes a whole node's GPUs"
    for index in range(4):
        url = f"http://web-{(index + 1) % 4}.web:8000/needle"
        assert cluster.kubectl("exec", "-n", web, f"web-{index}", "--", *fetch(url)).strip() == "found"
        url = f"http://web-any.{web}.svc.cluster.local/needle"
        assert cluster.kubectl("exec", "-n", web, f"web-{index}", "--", *fetch(url)).strip() == "found"


def test_commands_in_the_cluster_use_its_addresses_and_names(cluster: Cluster, web: str) -> None:
    urls = [f"http://web-any.{web}.svc.cluster.local/needle", f"http://web-2.web.{web}:8000/needle"]
    urls.append(f"http://{cluster.get('service', 'web-any', namespace=web)['spec']['clusterIP']}/needle")
    urls.append(f"http://{cluster.get('pod', 'web-1', namespace=web)['status']['podIP']}:8000/needle")
    for url in urls:
        assert cluster.exec(fetch(url)).stdout.strip() == "found"


def test_clients_in_the_test_process_use_the_clusters_network(cluster: Cluster, web: str) -> None:
    address = cluster.get("service", "web-any", namespace=web)["spec"]["clusterIP"]
    ours = Path("/proc/thread-self/ns/net").readlink()
    with cluster.network(), urllib.request.urlopen(f"http://{address}/needle", timeout=30) as answer:
        assert answer.read() == b"found\n"
        assert Path("/proc/thread-self/ns/net").readlink() != ours
    assert Path("/proc/thread-self/ns/net").readlink() == ours


def test_image_of_the_present_code_is_loaded_under_any_name(cluster: Cluster, namespace: str) -> None:
    cluster.load_image("registry.example/a/b:2")
    container = {"name": "c", "image": "registry.example/a/b:2", "imagePullPolicy": "IfNotPresent"}
    container["command"] = ["python", "-c", "import kimi_operator; print(kimi_operator.__name__)"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
    cluster.apply({**pod, "spec": {"restartPolicy": "Never", "containers": [container]}}, namespace=namespace)
    cluster.wait("pod/p", "jsonpath={.status.phase}=Succeeded", namespace=namespace)
    assert cluster.kubectl("logs", "p", "-n", namespace) == "kimi_operator\n"


def test_pods_run_the_project_from_an_image_with_its_programs_on_path(cluster: Cluster, web: str) -> None:
    program = "import kimi_worker, kimi_kernels, os, sys; print(kimi_worker.__file__, os.getuid(), sys.prefix)"
    file, user, prefix = cluster.kubectl("exec", "-n", web, "web-0", "--", "python", "-c", program).split()
    assert user == "65532"
    assert file.startswith(prefix), "the project is installed, not linked to the checkout"
    programs = cluster.kubectl("exec", "-n", web, "web-0", "--", "which", "kimi-worker", "kimi-operator", "torchrun")
    assert len(programs.split()) == 3


def test_partitioned_node_is_noticed_and_heals(cluster: Cluster, web: str) -> None:
    pods = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in cluster.get("pods", namespace=web)}
    before = restart_counts(cluster, web)
    cluster.partition_node(2)
    try:
        cluster.wait_for("node2 not ready", lambda: not cluster.is_node_ready("node2"))
        still_there = cluster.exec(["ps", "-e", "-o", "args"], node=2).stdout
        assert "http.server" in still_there, "what runs on a partitioned node runs on"
        other = next(name for node, name in pods.items() if node != "node2")
        with pytest.raises(CommandError):
            cluster.kubectl("exec", "-n", web, other, "--", *fetch(f"http://{pods['node2']}.web:8000/needle", 3))
    finally:
        cluster.heal_node(2)
    cluster.wait_for("node2 ready", lambda: cluster.is_node_ready("node2"))
    cluster.wait_for("four ready pods", lambda: ready_replicas(cluster, web) == 4)
    assert restart_counts(cluster, web) == before


def test_killed_node_comes_back_as_itself(cluster: Cluster, web: str) -> None:
    before = cluster.get("node", "node1")
    processes = namespaces_of(cluster.name)
    cluster.kill_node(1)
    assert len(namespaces_of(cluster.name)) < len(processes)
    with pytest.raises(LocalClusterError, match="node1 is not running"):
        cluster.exec(["true"], node=1)
    with pytest.raises(LocalClusterError, match="node restart 1"):
        cluster.partition_node(1)
    cluster.wait_for("node1 not ready", lambda: not cluster.is_node_ready("node1"))

    cluster.restart_node(1)
    cluster.wait_for("node1 ready", lambda: cluster.is_node_ready("node1"))
    cluster.wait_for("four ready pods", lambda: ready_replicas(cluster, web) == 4)
    after = cluster.wait_for(
        "GPUs of node1",
        lambda: (node := cluster.get("node", "node1"))["status"]["allocatable"].get("amd.com/gpu") == "8" and node,
    )
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    (pod,) = [pod for pod in cluster.get("pods", namespace=web) if pod["spec"]["nodeName"] == "node1"]
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 1


def test_api_server_keeps_its_data_while_it_is_away(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "kept", "-n", namespace, "--from-literal=a=b")
    cluster.stop_component("apiserver")
    try:
        assert cluster.status()["components"]["apiserver"]["state"] == "stopped"
        with pytest.raises(CommandError, match="refused"):
            cluster.get("nodes")
    finally:
        cluster.start_component("apiserver")
    kept = cluster.wait_for("the API server", lambda: cluster.find("configmap", "kept", namespace=namespace))
    assert kept["data"] == {"a": "b"}


def test_dead_kubelet_is_restarted_and_reports_gpus_again(cluster: Cluster) -> None:
    killed_at = datetime.datetime.now(datetime.UTC)
    old = cluster.exec(["pidof", "kubelet"], node=3).stdout
    cluster.exec(["kill", "-9", old.strip()], node=3)

    def status_since() -> Any:
        status = cluster.get("node", "node3")["status"]
        (ready,) = [condition for condition in status["conditions"] if condition["type"] == "Ready"]
        is_new = datetime.datetime.fromisoformat(ready["lastHeartbeatTime"]) > killed_at
        return status if is_new and ready["status"] == "True" else None

    cluster.wait_for("a report of the next kubelet", status_since)
    cluster.wait_for("GPUs of node3", lambda: (status_since() or {})["allocatable"].get("amd.com/gpu") == "8")
    assert cluster.exec(["pidof", "kubelet"], node=3).stdout != old


def test_kubeconfig_gives_the_same_surface_without_node_verbs(cluster: Cluster) -> None:
    existing = Cluster.from_kubeconfig(cluster.kubeconfig)
    assert isinstance(existing, ExistingCluster)
    assert existing.command_env()["KUBECONFIG"] == str(cluster.kubeconfig)
    # Stands for a machine on which the API server's address is reachable, as it is from inside the cluster.
    inside = cluster.exec([sys.executable, "-c", FROM_KUBECONFIG, str(cluster.kubeconfig)])
    assert inside.stdout.split() == cluster.spec.node_names
    for verb in LOCAL_ONLY:
        assert hasattr(Cluster, verb)
        with pytest.raises(LocalClusterError, match="existing cluster"):
            getattr(existing, verb)
    with pytest.raises(LocalClusterError, match="existing cluster"):
        existing.exec(["true"], node=0)
    with pytest.raises(LocalClusterError, match="not a file"):
        Cluster.from_kubeconfig("/nowhere")


def run_in_background(name: str, **options: Any) -> subprocess.Popen[str]:
    """`localcluster up` with one node, as its own process."""
    argv = [sys.executable, "-m", "kimi_localcluster", "up", "--name", name, "--nodes", "1"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not seen within {timeout_s} s"
        time.sleep(0.02)


def wait_until_nothing_is_left(name: str, before: Machine, namespaces: frozenset[str]) -> None:
    def traces() -> Traces:
        return find_traces(name, before, namespaces)

    try:
        wait_until("no traces", lambda: traces().is_empty)
    except AssertionError:
        pytest.fail(f"left behind: {traces()}")


@pytest.fixture
def second_name() -> Iterator[str]:
    name = f"second-{os.getpid()}"
    yield name
    Cluster(name).down()


def end_by_down(name: str) -> None:
    Cluster(name).down()


def end_by_killing_unshare(name: str) -> None:
    keeper = keeper_process(Cluster(name).paths)
    assert keeper
    (unshare,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    os.kill(int(unshare), signal.SIGKILL)


def end_by_killing_first_process(name: str) -> None:
    control = control_process(Cluster(name).paths)
    assert control
    os.kill(control, signal.SIGKILL)


def end_by_killing_keeper_and_down(name: str) -> None:
    """Without a keeper the cluster runs on, and `down` does the keeper's part."""
    keeper = keeper_process(Cluster(name).paths)
    assert keeper
    os.kill(keeper, signal.SIGKILL)
    wait_until("keeper gone", lambda: keeper_process(Cluster(name).paths) is None)
    assert Cluster.attach(name).status()["phase"] == "ready"
    Cluster(name).down()


@pytest.mark.parametrize(
    "end", [end_by_down, end_by_killing_unshare, end_by_killing_first_process, end_by_killing_keeper_and_down]
)
def test_second_cluster_runs_beside_and_leaves_nothing(
    cluster: Cluster, second_name: str, end: Callable[[str], None], tmp_path: Path
) -> None:
    before = Machine.now()
    (tmp_path / "checkpoint").touch()
    second = Cluster.up(second_name, nodes=1, gpus=4, device_id="74a5", folders={tmp_path: "/mnt/nvme/model"})
    namespaces = namespaces_of(second_name)
    assert [node["metadata"]["labels"]["amd.com/gpu.vram"] for node in second.get("nodes")] == ["256G"]
    assert len(cluster.get("nodes")) == 4
    container = {"name": "c", "image": WORKER_IMAGE, "command": ["sleep", "1000"]}
    container["volumeMounts"] = [{"name": "model", "mountPath": "/model"}]
    volume = {"name": "model", "hostPath": {"path": "/mnt/nvme/model", "type": "Directory"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "sleeper"}}
    second.apply({**pod, "spec": {"containers": [container], "volumes": [volume]}})
    second.wait("pod/sleeper", "condition=Ready")
    assert second.kubectl("exec", "sleeper", "--", "ls", "/model") == "checkpoint\n"
    assert not Path("/mnt/nvme").exists(), "the folder is shown on the node alone"
    traces = find_traces(second_name, before, namespaces)
    assert len(traces.processes) > 10, "the search must be able to find processes"
    assert traces.cgroups
    assert traces.files

    end(second_name)
    wait_until_nothing_is_left(second_name, before, namespaces)
    assert len(cluster.get("nodes")) == 4


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_start_leaves_nothing(second_name: str, how: signal.Signals) -> None:
    before = Machine.now()
    for _ in range(5):
        up = run_in_background(second_name)
        wait_until("the API server's process", lambda: len(namespaces_of(second_name)) > 4)
        namespaces = namespaces_of(second_name)
        up.send_signal(how)
        up.communicate(timeout=60)
        if up.returncode != 0:
            break
        Cluster(second_name).down()  # the signal came when the start had just succeeded
    assert up.returncode != 0
    wait_until_nothing_is_left(second_name, before, namespaces)


def test_dying_component_is_named_with_its_log(
    second_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Machine.now()
    etcd = tmp_path / "etcd"
    etcd.write_text("#!/bin/sh\necho the disk is on fire\nexit 3\n")
    etcd.chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    with pytest.raises(LocalClusterError, match=r"etcd ended with status 3[\s\S]*the disk is on fire"):
        Cluster.up(second_name, nodes=1)
    wait_until_nothing_is_left(second_name, before, frozenset())


def test_second_start_of_a_name_is_refused(cluster: Cluster) -> None:
    with pytest.raises(LocalClusterError, match="exists"):
        Cluster.up(cluster.name)


def test_command_line_passes_kubectl_through(cluster: Cluster) -> None:
    argv = [sys.executable, "-m", "kimi_localcluster", "kubectl", "--name", cluster.name]
    done = subprocess.run([*argv, "get", "nodes", "-o", "json"], capture_output=True, text=True, timeout=60, check=True)
    assert len(json.loads(done.stdout)["items"]) == 4
    done = subprocess.run([*argv, "get", "nothing"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "nothing" in done.stderr


def test_wrong_uses_of_a_running_cluster_are_told_in_one_line(cluster: Cluster) -> None:
    """As a user types them: status and last line of each. None of them changes the cluster."""

    def told(*words: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "kimi_localcluster", *words]
        env = {**os.environ, "KUBECONFIG": "/nowhere"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr.count("\n") == 1, done.stderr
        return done.returncode, done.stderr

    here = ("--name", cluster.name)
    nodes = ", ".join(cluster.spec.node_names)
    folders = [word for a, b in cluster.spec.folders for word in ("--folder", f"{a}:{b}")]
    status, line = told("up", *here, *folders)
    assert (status, line) == (0, f"Cluster {cluster.name} is up already.\n")
    status, line = told("up", *here, "--nodes", "3")
    assert (status, "num_nodes is 4, asked for 3" in line, "run down first" in line) == (1, True, True)
    no_node = (1, f"localcluster: node 'node7' does not exist; nodes: {nodes}\n")
    for verb in ("partition", "heal", "kill", "restart"):
        assert told("node", verb, "7", *here) == no_node
    assert told("exec", *here, "--node", "7", "--", "true") == no_node
    assert told("exec", *here, "--", "nonesuch")[0] == 127
    status, line = told("component", "stop", "node0", *here)
    assert (status, "components: etcd, apiserver" in line) == (1, True)
    status, line = told("logs", "nope", *here)
    assert (status, "there are: apiserver, audit" in line) == (1, True)
    assert told("kubectl", *here, "get", "nothing")[0] == 1
    assert cluster.status()["phase"] == "ready"
    assert all(node["state"] == "running" for node in cluster.status()["nodes"].values())
