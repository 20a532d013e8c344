"""Command lines and configuration of the control plane's programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kimi_localcluster.api import Api
from kimi_localcluster.paths import ClusterPaths
from kimi_localcluster.spec import (
    CONTROL_IP,
    POD_NETWORK,
    SERVICE_NETWORK,
    ClusterSpec,
)

ETCD_URL = "http://127.0.0.1:2379"
ETCD_PEER_URL = "http://127.0.0.1:2380"
# Failures show within seconds instead of a minute: kubelets report every 4 s (see node.py) and may miss two reports.
NODE_GRACE = ["--node-monitor-grace-period=12s", "--node-monitor-period=2s"]
# The default limit of 20 requests/s would be the bottleneck of every test with many objects.
FAST_CLIENT = ["--kube-api-qps=500", "--kube-api-burst=1000"]

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "userGroups": ["system:nodes", "system:masters"]},
        {
            "level": "None",
            "users": [
                "system:kube-controller-manager",
                "system:kube-scheduler",
                "system:kube-proxy",
                "system:apiserver",
            ],
        },
        {"level": "Metadata"},
    ],
}

COREFILE = """\
cluster.local:53 {{
    bind {address}
    errors
    kubernetes cluster.local {{
        kubeconfig {kubeconfig} localcluster
        pods insecure
        ttl 2
    }}
}}
"""


def _program(paths: ClusterPaths, name: str) -> str:
    return str(paths.bin / name)


def etcd(paths: ClusterPaths) -> list[str]:
    """Its data lies in memory and dies with the cluster, so nothing needs to reach a disk."""
    return [
        _program(paths, "etcd"),
        "--data-dir", str(paths.state / "etcd" / "data"), "--unsafe-no-fsync",
        "--listen-client-urls", ETCD_URL, "--advertise-client-urls", ETCD_URL,
        "--listen-peer-urls", ETCD_PEER_URL, "--initial-advertise-peer-urls", ETCD_PEER_URL,
        "--initial-cluster", f"default={ETCD_PEER_URL}", "--log-level", "warn",
    ]  # fmt: skip


def apiserver(paths: ClusterPaths) -> list[str]:
    policy = paths.state / "audit-policy.yaml"
    policy.write_text(yaml.safe_dump(AUDIT_POLICY))
    pki = paths.pki
    return [
        _program(paths, "kube-apiserver"),
        f"--etcd-servers={ETCD_URL}",
        "--bind-address=0.0.0.0", "--secure-port=6443", f"--advertise-address={CONTROL_IP}",
        f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt", f"--token-auth-file={pki}/tokens.csv",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt", f"--kubelet-client-key={pki}/kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={pki}/service-account.pub",
        f"--service-account-signing-key-file={pki}/service-account.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC", "--allow-privileged=true",
        f"--audit-policy-file={policy}", f"--audit-log-path={paths.logs}/audit.log",
    ]  # fmt: skip


def controller_manager(paths: ClusterPaths) -> list[str]:
    return [
        _program(paths, "kube-controller-manager"),
        f"--kubeconfig={paths.pki}/controller-manager.kubeconfig",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={paths.pki}/service-account.key",
        f"--root-ca-file={paths.pki}/ca.crt",
        "--leader-elect=false", "--bind-address=127.0.0.1", *NODE_GRACE, *FAST_CLIENT,
    ]  # fmt: skip


def scheduler(paths: ClusterPaths) -> list[str]:
    return [
        _program(paths, "kube-scheduler"),
        f"--kubeconfig={paths.pki}/scheduler.kubeconfig",
        "--leader-elect=false", "--bind-address=127.0.0.1", *FAST_CLIENT,
    ]  # fmt: skip


def coredns(paths: ClusterPaths) -> list[str]:
    corefile = paths.state / "Corefile"
    corefile.write_text(COREFILE.format(address=CONTROL_IP, kubeconfig=paths.pki / "coredns.kubeconfig"))
    return [_program(paths, "coredns"), "-conf", str(corefile)]


def proxy(paths: ClusterPaths, node_name: str, address: str) -> list[str]:
    """kube-proxy: makes service addresses work in the network namespace it runs in."""
    return [
        _program(paths, "kube-proxy"),
        f"--kubeconfig={paths.pki}/proxy.kubeconfig", f"--hostname-override={node_name}", "--proxy-mode=nftables",
        f"--bind-address={address}", f"--cluster-cidr={POD_NETWORK}", "--conntrack-max-per-core=0",
    ]  # fmt: skip


def control_proxy(paths: ClusterPaths) -> list[str]:
    """For webhooks and for commands that run beside the control plane.

    It must name an existing node and waits for it; the first one serves, because only node-local traffic rules differ.
    """
    return proxy(paths, "node0", CONTROL_IP)


def create_coredns_role(api: Api) -> None:
    """Let CoreDNS watch what it answers from; the API server has no built-in role for it."""
    name = {"name": "system:coredns"}
    rules = [
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    group = "/apis/rbac.authorization.k8s.io/v1"
    api.call("POST", f"{group}/clusterroles", {"metadata": name, "rules": rules})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", **name}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", **name}
    api.call("POST", f"{group}/clusterrolebindings", {"metadata": name, "roleRef": reference, "subjects": [subject]})


def is_node_ready(node: dict[str, Any], spec: ClusterSpec) -> bool:
    """Ready, untainted and with its GPUs allocatable."""
    conditions = {c["type"]: c["status"] for c in node["status"].get("conditions", [])}
    gpus = node["status"].get("allocatable", {}).get("amd.com/gpu", "0")
    is_tainted = bool(node["spec"].get("taints"))
    return conditions.get("Ready") == "True" and gpus == str(spec.gpus_per_node) and not is_tainted


def write_resolv_conf(path: Path) -> None:
    """Names of services resolve as in a pod; other names get a quick refusal, since there is no way out."""
    path.write_text(f"nameserver {CONTROL_IP}\nsearch svc.cluster.local cluster.local\noptions ndots:5\n")
