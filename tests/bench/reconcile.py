"""From a change of spec to the first write of a child, by a real API server; the operator's memory; writes at rest.

100 deployments exist; their specs change at several rates, each for a while. All times are the API server's own, from
its audit log: from the moment that a change was answered to the moment that the operator's first write to a child of
that deployment arrived. The deployments are suspended, so that no pods compete for the machine; the operator plans,
renders, compares and applies as ever, as a process of this machine with the rights of an administrator. API server,
etcd and controllers share the machine with it: their processor time for a change stands beside the operator's.

usage: reconcile.py [--deployments 100] [--rates 5,10,20,50] [--seconds 20] [--cluster NAME] [--output FILE]
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from kimi_localcluster.binaries import DEFAULT_PROGRAMS, ensure_programs
from kimi_localcluster.cluster import Cluster
from kimi_localcluster.kube import end_process
from kimi_localcluster.progress import Progress
from kubernetes.aio import client, config

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "bench"
OPERATOR_AGENT, BENCH_AGENT = "kimi-operator", "kimi-bench"
API = ("kimi-operator.io", "v1alpha1", NAMESPACE, "kimideployments")
REST_S = 20
QUIET_S = 5.0
"""Without a write for so long, the operator has caught up."""
CHILDREN = ("statefulsets", "deployments", "services", "configmaps", "poddisruptionbudgets")
WRITES = ("create", "update", "patch", "delete")


@dataclass(frozen=True)
class Options:
    deployments: int
    rates: tuple[float, ...]
    seconds: float


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
    command = [sys.executable, "-m", "kimi_operator.start", "run"]
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


def api_server(cluster: Cluster) -> int:
    """The API server's process: of all of that name, the one that writes this cluster's audit log."""
    log = str(cluster.logs("audit")).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"kube-apiserver" in command.partition(b"\0")[0] and log in command:
                return int(folder.name)
    raise LookupError(f"no kube-apiserver writes {log.decode()}")


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
                spec = {"decode": {"template": {"annotations": {"bench": f"{rate:g}-{change}"}}}}
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


def latencies(entries: list[dict[str, Any]]) -> list[float]:
    """Seconds from the answer to each change to the arrival of the first write of a child after it, in order."""
    changes: dict[str, list[float]] = defaultdict(list)
    writes: dict[str, list[float]] = defaultdict(list)
    for entry in entries:
        target = entry.get("objectRef", {})
        if entry["userAgent"] == BENCH_AGENT and target.get("resource") == "kimideployments":
            changes[target["name"]].append(moment(entry["stageTimestamp"]))
        elif entry["userAgent"] == OPERATOR_AGENT and entry["verb"] in WRITES and target.get("resource") in CHILDREN:
            writes[target["name"].split("-")[0]].append(moment(entry["requestReceivedTimestamp"]))
    found = []
    for owner, at in changes.items():
        for changed in at:
            # The operator may write for a change before its answer has left the API server: that counts as 0.
            later = [written for written in writes[owner] if written >= changed - 0.05]
            found += [max(0.0, min(later) - changed)] if later else []
    return sorted(found)


def percentile(values: list[float], percent: float) -> float:
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def wait_until_quiet(cluster: Cluster, log: Path) -> None:
    """Until the operator has written nothing for a while."""
    seen = {"writes": -1.0, "since": time.monotonic()}

    def is_quiet() -> bool:
        writes = float(count_writes(read_audit(log, 0)).total())
        if writes != seen["writes"]:
            seen.update(writes=writes, since=time.monotonic())
        return time.monotonic() - seen["since"] > QUIET_S

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


def change_at(cluster: Cluster, kubeconfig: Path, operator: int, rate: float, options: Options) -> dict[str, Any]:
    """One row: what changes at this rate cost, and how soon children were written."""
    log = cluster.logs("audit")
    start, server = log.stat().st_size, api_server(cluster)
    used, used_by_server = cpu_s(operator), cpu_s(server)
    with cluster.network():
        changes = asyncio.run(change_specs(kubeconfig, options.deployments, rate, options.seconds))
    wait_until_quiet(cluster, log)
    entries = read_audit(log, start)
    found = latencies(entries)
    return {
        "changes_per_s": rate,
        "changes": changes,
        "changes_followed_by_a_write": len(found),
        "first_write_ms": {f"p{p}": percentile(found, p) * 1e3 for p in (50, 99)},
        "operator_writes": dict(count_writes(entries)),
        "operator_cpu_ms_per_change": (cpu_s(operator) - used) * 1e3 / changes,
        "api_server_cpu_ms_per_change": (cpu_s(server) - used_by_server) * 1e3 / changes,
    }


def measure(cluster: Cluster, options: Options) -> dict[str, Any]:
    """Install, load, and read the figures."""
    log = cluster.logs("audit")
    cluster.apply(ROOT / "crds")
    cluster.wait_for("the CRDs", lambda: cluster.get("kimideployments", namespace="*") is not None)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.wait_for("the namespace", lambda: cluster.find("serviceaccount", "default", namespace=NAMESPACE))
    cluster.apply(ROOT / "examples/local/profile.yaml")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        paths = [account_kubeconfig(cluster, account, Path(folder)) for account in (OPERATOR_AGENT, BENCH_AGENT)]
        began = time.monotonic()
        pid = stack.enter_context(operator(cluster, paths[0]))
        start_s = time.monotonic() - began
        empty_bytes = memory_bytes(pid)
        began = time.monotonic()
        cluster.apply([deployment(index) for index in range(options.deployments)], namespace=NAMESPACE)
        wait_until_quiet(cluster, log)
        created_s = time.monotonic() - began - QUIET_S
        rows = []
        for rate in options.rates:
            rows.append(change_at(cluster, paths[1], pid, rate, options))
            print_row(rows[-1])
        full_bytes = memory_bytes(pid)
        rest = log.stat().st_size
        time.sleep(REST_S)  # the span that is measured
        writes = count_writes(read_audit(log, rest))
    return {
        "deployments": options.deployments,
        "start_s": start_s,
        "rates": rows,
        "first_children_of_all_s": created_s,
        "memory_empty_bytes": empty_bytes,
        "memory_loaded_bytes": full_bytes,
        "writes_at_rest": dict(writes),
        "rest_s": REST_S,
    }


def print_row(row: dict[str, Any]) -> None:
    first, writes = row["first_write_ms"], sum(row["operator_writes"].values())
    print(
        f"{row['changes_per_s']:9g} {row['changes']:8d} {first['p50']:9.0f} /{first['p99']:6.0f} "
        f"{writes / row['changes']:15.1f} {row['operator_cpu_ms_per_change']:9.1f} "
        f"{row['api_server_cpu_ms_per_change']:11.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=100)
    parser.add_argument("--rates", default="5,10,20,50", help="changes of spec a second, one row each (5,10,20,50)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long specs are changed at each rate (20)")
    parser.add_argument("--cluster", help="use this running local cluster; a fresh one otherwise")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    given = parser.parse_args()
    options = Options(given.deployments, tuple(float(rate) for rate in given.rates.split(",")), given.seconds)
    starts: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        if given.cluster:
            cluster = Cluster.attach(given.cluster)
        else:
            ensure_programs(DEFAULT_PROGRAMS, Progress())
            began = time.monotonic()
            cluster = stack.enter_context(Cluster.up(f"bench-{os.getpid()}", is_tied=True))
            starts["cluster_start_s"] = time.monotonic() - began
            print(f"a cluster of four nodes after {starts['cluster_start_s']:.0f} s")
        print(f"{options.deployments} deployments; from a change of spec to the first write of a child")
        print("changes/s  changes  p50 / p99 ms  writes a change  CPU ms a change: operator, API server")
        try:
            result = measure(cluster, options)
        finally:
            if given.cluster:
                cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout_s=300)
    empty, loaded = (result[f"memory_{when}_bytes"] / 2**20 for when in ("empty", "loaded"))
    print(f"the operator led {result['start_s']:.1f} s after its start")
    print(f"all children of all made after {result['first_children_of_all_s']:.0f} s")
    print(f"memory of the operator {empty:.0f} MiB empty, {loaded:.0f} MiB after these changes")
    print(f"writes at rest in {result['rest_s']} s: {sum(result['writes_at_rest'].values())}")
    if given.output:
        given.output.write_text(json.dumps({"operator": result, **starts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
