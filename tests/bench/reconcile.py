"""From a change of spec to the first write of a child, by a real API server; the operator's memory; writes at rest.

100 deployments exist; their specs change 50 times a second for a while. All times are the API server's own, from its
audit log: from the moment that a change was answered to the moment that the operator's first write to a child of that
deployment arrived, and to the moment that it was answered. The deployments are suspended, so that no pods compete for
the machine; the operator plans, renders, compares and applies as ever.

usage: reconcile.py [--deployments 100] [--rate 50] [--seconds 20] [--cluster NAME] [--output FILE]
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from kimi_localcluster.cluster import Cluster
from kimi_localcluster.kube import end_process
from kubernetes.aio import client, config

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "bench"
OPERATOR_AGENT, BENCH_AGENT = "kimi-operator", "kimi-bench"
API = ("kimi-operator.io", "v1alpha1", NAMESPACE, "kimideployments")
REST_S = 20
CHILDREN = ("statefulsets", "deployments", "services", "configmaps", "poddisruptionbudgets")
WRITES = ("create", "update", "patch", "delete")


def deployment(index: int) -> dict[str, Any]:
    """The local example under another name, suspended."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples/local/2p2d.yaml").read_text())
    document["metadata"]["name"] = name(index)
    document["spec"]["suspend"] = True
    return document


def name(index: int) -> str:
    return f"d{index:03d}"


def account_kubeconfig(cluster: Cluster, account: str, folder: Path) -> Path:
    """Credentials of a service account: the audit log of a local cluster leaves administrators out."""
    made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
    cluster.apply(made, namespace=NAMESPACE)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": account},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
    }
    cluster.apply(binding)
    document = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", account, "-n", NAMESPACE, "--duration=2h").strip()
    for user in document["users"]:
        user["user"] = {"token": token}
    path = folder / f"{account}.kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.contextmanager
def operator(cluster: Cluster, kubeconfig: Path) -> Iterator[int]:
    """The operator as a process of this machine, with the code of this checkout; its process id."""
    env = {"POD_NAME": "bench", "POD_NAMESPACE": NAMESPACE, "KIMI_OPERATOR_HTTP_PORT": "18231"}
    env["KUBECONFIG"] = str(kubeconfig)
    command = [sys.executable, "-m", "kimi_operator", "run"]
    log = Path(f"/tmp/kimi-bench-operator-{os.getpid()}.log")
    with log.open("wb") as file:
        process = cluster.popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            cluster.wait_for("the operator leads", lambda: b'"leading"' in log.read_bytes(), timeout_s=120)
            yield find_operator(process.pid)
        finally:
            end_process(process)
    log.unlink()


def find_operator(pid: int) -> int:
    """The operator below a process that entered the cluster's namespaces."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if b"kimi_operator" in Path(f"/proc/{pid}/cmdline").read_bytes() and not children:
        return pid
    return max((find_operator(int(child)) for child in children), default=pid)


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_s(pid: int) -> float:
    """Time that a process was ready to run and another had the CPU: how busy the machine was with other things."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks) / 1e9


async def change_specs(kubeconfig: Path, deployments: int, rate: float, seconds: float) -> int:
    """Change one deployment after the other, at a steady rate; how many changes were made."""
    configuration = client.Configuration()
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    async with client.ApiClient(configuration) as api:
        api.user_agent = BENCH_AGENT
        objects = client.CustomObjectsApi(api)
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for change in range(int(rate * seconds)):
                await asyncio.sleep(began + change / rate - asyncio.get_running_loop().time())
                spec = {"decode": {"template": {"annotations": {"bench": str(change)}}}}
                tasks.create_task(
                    objects.patch_namespaced_custom_object(
                        *API, name(change % deployments), {"spec": spec}, _content_type="application/merge-patch+json"
                    )
                )
    return int(rate * seconds)


def read_audit(log: Path, start: int) -> list[dict[str, Any]]:
    """Entries of the API server's audit log from an offset on."""
    with log.open() as file:
        file.seek(start)
        return [json.loads(line) for line in file if line.endswith("\n")]


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def latencies(entries: list[dict[str, Any]], deployments: int) -> tuple[list[float], list[float]]:
    """Seconds from the answer to each change to the first child's write: its arrival, and its answer."""
    changes: dict[str, list[float]] = {name(index): [] for index in range(deployments)}
    writes: dict[str, list[tuple[float, float]]] = {name(index): [] for index in range(deployments)}
    for entry in entries:
        target = entry.get("objectRef", {})
        if entry["userAgent"] == BENCH_AGENT and target.get("resource") == "kimideployments":
            changes[target["name"]].append(moment(entry["stageTimestamp"]))
        elif entry["userAgent"] == OPERATOR_AGENT and entry["verb"] in WRITES and target.get("resource") in CHILDREN:
            owner = target["name"].split("-")[0]
            writes[owner].append((moment(entry["requestReceivedTimestamp"]), moment(entry["stageTimestamp"])))
    arrivals, answers = [], []
    for owner, at in changes.items():
        for changed in at:
            later = [pair for pair in writes[owner] if pair[0] >= changed]
            if later:
                first = min(later)
                arrivals.append(first[0] - changed)
                answers.append(first[1] - changed)
    return sorted(arrivals), sorted(answers)


def percentile(values: list[float], percent: float) -> float:
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def wait_until_quiet(cluster: Cluster, log: Path, quiet_s: float = 5.0) -> None:
    """Until the operator has written nothing for a while."""
    seen = {"writes": -1.0, "since": time.monotonic()}

    def is_quiet() -> bool:
        writes = float(count_writes(read_audit(log, 0)).total())
        if writes != seen["writes"]:
            seen.update(writes=writes, since=time.monotonic())
        return time.monotonic() - seen["since"] > quiet_s

    cluster.wait_for("a quiet operator", is_quiet, timeout_s=300)


def count_writes(entries: list[dict[str, Any]]) -> Counter[str]:
    """The operator's writes by verb and resource, without the renewals of its lease."""
    return Counter(
        f"{entry['verb']} {entry['objectRef']['resource']}"
        for entry in entries
        if entry["userAgent"] == OPERATOR_AGENT
        and entry["verb"] in WRITES
        and entry["objectRef"]["resource"] != "leases"
    )


def measure(cluster: Cluster, deployments: int, rate: float, seconds: float) -> dict[str, Any]:
    """Install, load, and read the figures."""
    log = cluster.logs("audit")
    cluster.apply(ROOT / "crds")
    cluster.wait_for("the CRDs", lambda: cluster.get("kimideployments", namespace="*") is not None)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.wait_for("the namespace", lambda: cluster.find("serviceaccount", "default", namespace=NAMESPACE))
    cluster.apply(ROOT / "examples/local/profile.yaml")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        paths = [account_kubeconfig(cluster, account, Path(folder)) for account in (OPERATOR_AGENT, BENCH_AGENT)]
        pid = stack.enter_context(operator(cluster, paths[0]))
        empty_bytes = memory_bytes(pid)
        began = time.monotonic()
        cluster.apply([deployment(index) for index in range(deployments)], namespace=NAMESPACE)
        wait_until_quiet(cluster, log)
        created_s = time.monotonic() - began - 5.0
        start, used_s, starved_s = log.stat().st_size, cpu_s(pid), waited_s(pid)
        with cluster.network():
            changes = asyncio.run(change_specs(paths[1], deployments, rate, seconds))
        wait_until_quiet(cluster, log)
        arrivals, answers = latencies(read_audit(log, start), deployments)
        used_s, starved_s = cpu_s(pid) - used_s, waited_s(pid) - starved_s
        full_bytes = memory_bytes(pid)
        rest = log.stat().st_size
        time.sleep(REST_S)  # the span that is measured
        writes = count_writes(read_audit(log, rest))
    return {
        "deployments": deployments,
        "changes": changes,
        "changes_per_s": rate,
        "answered_by_a_write": len(arrivals),
        "arrival_ms": {f"p{p}": percentile(arrivals, p) * 1e3 for p in (50, 99)},
        "answer_ms": {f"p{p}": percentile(answers, p) * 1e3 for p in (50, 99)},
        "first_children_of_all_s": created_s,
        "cpu_ms_per_change": used_s * 1e3 / changes,
        "waited_for_cpu_ms_per_change": starved_s * 1e3 / changes,
        "memory_empty_bytes": empty_bytes,
        "memory_loaded_bytes": full_bytes,
        "writes_at_rest": dict(writes),
        "rest_s": REST_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=100)
    parser.add_argument("--rate", type=float, default=50.0, help="changes of spec a second (50)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long specs are changed (20)")
    parser.add_argument("--cluster", help="use this running local cluster; a fresh one otherwise")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.cluster:
            cluster = Cluster.attach(options.cluster)
        else:
            cluster = stack.enter_context(Cluster.up(f"bench-{os.getpid()}", is_tied=True))
        try:
            row = measure(cluster, options.deployments, options.rate, options.seconds)
        finally:
            if options.cluster:
                cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout_s=300)
    row["machine"] = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()}
    print(f"{row['deployments']} deployments, {row['changes']} changes of spec at {row['changes_per_s']:g}/s")
    for label, figure in (("arrived", row["arrival_ms"]), ("answered", row["answer_ms"])):
        print(f"  first write of a child {label:<9} p50 {figure['p50']:7.1f} ms   p99 {figure['p99']:7.1f} ms")
    print(f"  CPU of the operator a change     {row['cpu_ms_per_change']:7.1f} ms")
    print(f"  waiting for a CPU, a change      {row['waited_for_cpu_ms_per_change']:7.1f} ms")
    print(f"  all children made after          {row['first_children_of_all_s']:7.1f} s")
    print(f"  memory of the operator           {row['memory_empty_bytes'] / 2**20:7.1f} MiB empty, ", end="")
    print(f"{row['memory_loaded_bytes'] / 2**20:.1f} MiB loaded")
    print(f"  writes at rest in {row['rest_s']} s            {sum(row['writes_at_rest'].values()):5d}")
    if options.output:
        options.output.write_text(json.dumps({"operator": row}, indent=2) + "\n")


if __name__ == "__main__":
    main()
