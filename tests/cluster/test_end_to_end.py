"""The main job from end to end: chart, resource, needles, a killed rank, a deleted pod, needles, nothing left."""

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from kimi_localcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
# Four pods with two ranks each start side by side on this machine's few cores.
PATIENT_S = 900
REST_S = 60
KILL_ONE_RANK = """
import os, pathlib, signal
comms = {int(p.parent.name): p.read_text().strip() for p in pathlib.Path('/proc').glob('[0-9]*/comm')}
os.kill(next(pid for pid, comm in comms.items() if comm == 'kimi-rank-1'), signal.SIGKILL)
"""


def load_demo() -> ModuleType:
    """examples/local/demo.py, which `make demo` runs."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/local/demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_demo()


def needles(cluster: Cluster, reference_url: str, *options: str) -> dict[str, Any]:
    """The report of a needle run, which must be right in every answer, token id and log-probability."""
    argv = [str(demo.BIN / "kimictl"), "needle", "--url", demo.ROUTER_URL, "--reference-url", reference_url]
    done = cluster.exec([*argv, "-o", "json", *options], check=False, timeout_s=PATIENT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def demo_by_kubeconfig(cluster: Cluster) -> None:
    """`make demo KUBECONFIG=...` with all of its steps and needles; what it installs and applies is there already."""
    argv = ["env", f"KUBECONFIG={cluster.kubeconfig}", sys.executable, str(demo.__file__)]
    done = cluster.exec(argv, check=False, timeout_s=PATIENT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "that cluster is used" in done.stdout + done.stderr
    assert "57 of 57" in done.stdout


def group(cluster: Cluster, role: str) -> dict[str, Any]:
    (only,) = cluster.get("kimideployment", "k3", namespace="default")["status"][role]["groups"]
    return dict(only)


def children(cluster: Cluster) -> list[str]:
    kinds = "statefulsets,deployments,replicasets,services,endpointslices,configmaps,pods,poddisruptionbudgets"
    found = cluster.get(kinds, namespace="default", selector="kimi-operator.io/deployment=k3")
    return [f"{one['kind']}/{one['metadata']['name']}" for one in found]


def assert_pools_are_as_planned(cluster: Cluster) -> None:
    """What the workers made room for, against what they were told to."""
    plan = cluster.get("kimideployment", "k3", namespace=demo.NAMESPACE)["status"]["plan"]
    for role in ("prefill", "decode"):
        measured = group(cluster, role)["measured"]
        for pool in ("numPages", "numStateSlots", "maxNumSeqs"):
            assert measured[pool] == plan[role][pool] > 0, f"{role} {pool}"


def restarts(cluster: Cluster) -> dict[str, int]:
    return {role: int(group(cluster, role)["restarts"]) for role in ("prefill", "decode")}


def wait_serving(cluster: Cluster) -> None:
    """Ready, and every prefill lane has proved that it can write into every decode pod."""
    demo.wait_ready(cluster, timeout_s=PATIENT_S)
    cluster.wait_for("the fabric is verified", lambda: demo.conditions(cluster)["FabricVerified"]["status"] == "True")


def wait_for_restart(cluster: Cluster, role: str, before: dict[str, int]) -> None:
    """One restart of one group, and Ready again."""
    expected = before | {role: before[role] + 1}
    cluster.wait_for(
        f"the whole {role} group restarts once", lambda: restarts(cluster) == expected, timeout_s=PATIENT_S
    )
    wait_serving(cluster)
    assert restarts(cluster) == expected


@pytest.fixture
def installed(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the chart as `make demo` installs it; whatever fails, the next tests get their GPUs back."""
    try:
        demo.install(cluster)
        yield cluster
        cluster.kubectl("delete", "kimideployment", "--all", "--namespace", demo.NAMESPACE)
        cluster.wait_for("nothing of the deployment is left", lambda: not children(cluster), timeout_s=PATIENT_S)
    finally:
        argv = ["uninstall", "kimi-operator", "--namespace", "kimi-system", "--wait", "--ignore-not-found"]
        cluster.helm(*argv, timeout_s=PATIENT_S)


def test_one_apply_serves_survives_a_dead_rank_and_leaves_nothing(
    installed: Cluster, tmp_path: Path, written_by_operator: Callable[[float, str], Counter[tuple[str, str]]]
) -> None:
    cluster = installed
    # First with a folder that holds no checkpoint: the workers end, and what they say is told.
    tmp_path.chmod(0o755)
    wrong = yaml.safe_load((demo.MANIFESTS / "2p2d.yaml").read_text())
    wrong["spec"]["model"]["checkpoint"]["hostPath"]["path"] = str(tmp_path)
    cluster.apply(demo.MANIFESTS / "profile.yaml")
    cluster.apply(wrong, namespace=demo.NAMESPACE)
    cluster.wait_for(
        "the missing checkpoint is told",
        lambda: demo.conditions(cluster).get("WeightsReady", {}).get("reason") == "WeightsMissing",
        timeout_s=PATIENT_S,
    )
    # Mended, it becomes ready without anybody's help.
    demo.deploy(cluster)
    edited = cluster.exec(["kubectl", "apply", "--namespace", demo.NAMESPACE, "-f", str(demo.MANIFESTS / "2p2d.yaml")])
    assert edited.stderr == "", "what a user does next, in the README's words, is nothing to warn of"
    wait_serving(cluster)
    assert demo.conditions(cluster)["WeightsReady"]["status"] == "True"
    assert_pools_are_as_planned(cluster)

    with demo.reference(cluster) as reference_url:
        needles(cluster, reference_url)
        assert not written_by_operator(REST_S, demo.NAMESPACE), "nothing is written while all is well"
        before = restarts(cluster)

        cluster.kubectl("exec", "k3-decode-0-1", "--", "python", "-c", KILL_ONE_RANK)
        wait_for_restart(cluster, "decode", before)
        needles(cluster, reference_url, "--seed", "2")

        before = restarts(cluster)
        cluster.kubectl("delete", "pod", "k3-prefill-0-1", "--wait=false")
        wait_for_restart(cluster, "prefill", before)
    demo_by_kubeconfig(cluster)

    cluster.kubectl("delete", "kimideployment", "k3", "--namespace", "default")
    cluster.wait_for("nothing of the deployment is left", lambda: not children(cluster), timeout_s=PATIENT_S)
