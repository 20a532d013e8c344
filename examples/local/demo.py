"""`make demo`: from nothing to 57 of 57 needles, on a local cluster or on the one that KUBECONFIG names.

cluster -> Helm install -> kubectl apply -> Ready -> needles through the router, compared with a single process.
The end-to-end test runs the same functions.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from kimi_localcluster.cluster import Cluster, running_clusters
from kimi_localcluster.errors import CommandError, LocalClusterError
from kimi_localcluster.existing import ExistingCluster
from kimi_localcluster.kube import Kube, end_process
from kimi_localcluster.progress import Progress, Step
from kimi_localcluster.spec import DEFAULT_NAME

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples/tiny-k3"
MANIFESTS = ROOT / "examples/local"
CHART = ROOT / "charts/kimi-operator"
BIN = Path(sys.executable).parent

CHECKPOINT_ON_NODES = "/opt/kimi/tiny-k3"
FOLDERS = {CHECKPOINT: CHECKPOINT_ON_NODES}
NAMESPACE = "default"
ROUTER_URL = f"http://k3-router.{NAMESPACE}.svc.cluster.local:8000"
REFERENCE_PORT, FORWARDED_PORT = 18100, 18000
READY_TIMEOUT_S = 600.0

NEEDS = f"""KUBECONFIG is set, so that cluster is used. It needs
  - four schedulable nodes that offer two of the resource amd.com/gpu each
  - the images that charts/kimi-operator/values.yaml names, pullable from there
  - this repository's examples/tiny-k3 as {CHECKPOINT_ON_NODES} on each node, readable for uid 65532
Unset KUBECONFIG to use a local cluster instead."""
LOOK_AROUND = """Look around:
  {kubectl} get kd,pods -o wide
  {kubectl} describe kd k3
  {kubectl} delete pod k3-decode-0-1    # the whole group restarts, once"""
LEAVE_LOCAL = """  .venv/bin/localcluster exec -- curl -s {url}/v1/models
The cluster is still up; `make down` ends it."""
LEAVE_EXISTING = (
    """The deployment still runs. To remove it: kubectl delete kd k3; helm uninstall kimi-operator -n kimi-system"""
)


def install(cluster: Kube) -> None:
    """Install the chart and wait until the operator leads. Needs no rights beyond those of a cluster administrator."""
    cluster.helm(
        "upgrade", "--install", "kimi-operator", str(CHART), "--namespace", "kimi-system", "--create-namespace",
        "--wait", "--timeout", "120s", timeout_s=150,
    )  # fmt: skip


def deploy(cluster: Kube) -> None:
    """As a user does it: a `kubectl apply` after another way of creating the same object would be warned about."""
    for manifest in ("profile.yaml", "2p2d.yaml"):
        cluster.kubectl("apply", "--namespace", NAMESPACE, "-f", str(MANIFESTS / manifest))


def conditions(cluster: Kube) -> dict[str, dict[str, Any]]:
    """The deployment's conditions by type: those that answer its present spec."""
    document = cluster.get("kimideployment", "k3", namespace=NAMESPACE)
    found = document.get("status", {}).get("conditions", [])
    return {one["type"]: one for one in found if one["observedGeneration"] == document["metadata"]["generation"]}


def wait_ready(cluster: Kube, timeout_s: float = READY_TIMEOUT_S, step: Step | None = None) -> None:
    """Wait until the deployment is Ready, showing what it says meanwhile.

    Raises WaitTimeoutError, or LocalClusterError as soon as the operator says that only a person can help.
    """

    def is_ready() -> bool:
        known = conditions(cluster)
        ready, stalled = known.get("Ready", {}), known.get("Stalled", {})
        if stalled.get("status") == "True":
            raise LocalClusterError(f"KimiDeployment k3 is stalled: {stalled['reason']}: {stalled.get('message', '')}")
        if step is not None:
            step.note(f"{ready.get('reason', 'Unknown')}: {ready.get('message', 'not seen by the operator yet')}"[:150])
        return ready.get("status") == "True"

    cluster.wait_for("KimiDeployment k3 is Ready", is_ready, timeout_s=timeout_s)


@contextmanager
def reference(cluster: Kube) -> Iterator[str]:
    """Serve the same checkpoint from one process beside the cluster; yields its URL."""
    argv = [str(BIN / "kimi-worker"), "serve", "--standalone", str(CHECKPOINT), "--port", str(REFERENCE_PORT)]
    url = f"http://127.0.0.1:{REFERENCE_PORT}"
    probe = f"import urllib.request; urllib.request.urlopen('{url}/ready', timeout=10)"
    # A file, not a pipe: nobody reads while it serves, and a full pipe would stop it.
    with tempfile.TemporaryFile("w+") as log:
        process = cluster.popen(argv, stdout=log, stderr=log, text=True)

        def is_ready() -> bool:
            if process.poll() is not None:
                log.seek(0)
                raise LocalClusterError(f"the single process ended: {log.read()[-500:]}")
            return cluster.exec([sys.executable, "-S", "-c", probe], check=False, timeout_s=120).returncode == 0

        try:
            cluster.wait_for("the single process serves", is_ready, timeout_s=300)
            yield url
        finally:
            end_process(process)


@contextmanager
def router(cluster: Kube) -> Iterator[str]:
    """A URL at which commands run by `cluster.exec` reach the router."""
    if isinstance(cluster, Cluster):
        yield ROUTER_URL
        return
    forward = cluster.popen(
        ["kubectl", "port-forward", "--namespace", NAMESPACE, "service/k3-router", f"{FORWARDED_PORT}:8000"],
        stdout=subprocess.DEVNULL,
    )

    def answers() -> bool:
        if forward.poll() is not None:
            raise LocalClusterError("`kubectl port-forward` to the router has ended; its last line stands above")
        try:
            return httpx.get(f"http://127.0.0.1:{FORWARDED_PORT}/health").is_success
        except httpx.TransportError:
            return False  # kubectl takes a moment to listen

    try:
        cluster.wait_for("the router answers", answers)
        yield f"http://127.0.0.1:{FORWARDED_PORT}"
    finally:
        end_process(forward)


def needle(cluster: Kube, url: str, reference_url: str, *options: str) -> int:
    """Run `kimictl needle` with its output going to the terminal; returns its exit status."""
    argv = [str(BIN / "kimictl"), "needle", "--url", url, "--reference-url", reference_url, *options]
    process = cluster.popen(argv)
    try:
        return process.wait()
    finally:
        end_process(process)


def start_cluster(progress: Progress) -> Kube:
    was_up = DEFAULT_NAME in running_clusters()
    cluster = Cluster.find_or_up(folders=FOLDERS, progress=progress)
    if isinstance(cluster, ExistingCluster):
        progress.say(NEEDS)
        check_nodes(cluster)
    elif was_up:
        progress.say("The local cluster is up already and is used as it is; `make down` first for the present code.")
    return cluster


def check_nodes(cluster: Kube) -> None:
    """Raise LocalClusterError unless four nodes can each hold a pod of the example."""
    fit = [
        node["metadata"]["name"]
        for node in cluster.get("nodes")
        if int(node["status"]["allocatable"].get("amd.com/gpu", "0")) >= 2 and not node["spec"].get("unschedulable")
    ]
    if len(fit) < 4:
        raise LocalClusterError(
            f"{len(fit)} schedulable nodes offer two amd.com/gpu or more ({', '.join(fit) or 'none'}); "
            "the example needs four: add nodes, uncordon them, or unset KUBECONFIG"
        )


def main() -> int:
    progress = Progress()
    began = time.monotonic()
    cluster = start_cluster(progress)
    with progress.step("Installing the operator with Helm", expected_s=15):
        install(cluster)
    with progress.step("Deploying examples/local/2p2d.yaml", expected_s=40) as step:
        deploy(cluster)
        wait_ready(cluster, step=step)
    with ExitStack() as running:
        with progress.step("Starting a single process of the same checkpoint to compare with", expected_s=10):
            reference_url = running.enter_context(reference(cluster))
            url = running.enter_context(router(cluster))
        status = needle(cluster, url, reference_url)
    progress.say(f"\n{time.monotonic() - began:.0f} s in all.")
    is_local = isinstance(cluster, Cluster)
    progress.say(LOOK_AROUND.format(kubectl=".venv/bin/localcluster kubectl" if is_local else "kubectl"))
    progress.say(LEAVE_LOCAL.format(url=ROUTER_URL) if is_local else LEAVE_EXISTING)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LocalClusterError, CommandError) as error:
        sys.exit(f"demo failed: {error}")
    except KeyboardInterrupt:
        sys.exit("demo interrupted; `make down` ends what is running")
