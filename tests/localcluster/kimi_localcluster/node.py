"""One node: first process of the node's namespaces, runs containerd, kubelet and kube-proxy.

All default paths stay what they are on a real node; bind mounts make them this node's own.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from kimi_localcluster import components
from kimi_localcluster.api import Api, ApiError
from kimi_localcluster.cgroups import Cgroups
from kimi_localcluster.channel import request
from kimi_localcluster.errors import CommandError, LocalClusterError, tail
from kimi_localcluster.init import Daemon, Init
from kimi_localcluster.mounts import bind, bind_resolv_conf, is_overlay, mount_tmpfs, show_folder
from kimi_localcluster.paths import ClusterPaths
from kimi_localcluster.shell import ip_batch, run
from kimi_localcluster.spec import (
    CONTROL_IP,
    NODE_PREFIX_LENGTH,
    PAUSE_IMAGE,
    ClusterSpec,
    gpu_labels,
    node_ip,
    pod_cidr,
)

POLL_S = 0.2
MAX_EXITS = 4
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
# Folder of the node's disk -> where programs expect it.
BINDS = {
    "kubelet": "/var/lib/kubelet",
    "containerd": "/var/lib/containerd",
    "cni": "/var/lib/cni",
    "cni-config": "/etc/cni/net.d",
    "pod-logs": "/var/log/pods",
    "container-logs": "/var/log/containers",
}


def containerd_config(base_spec: Path, snapshotter: str) -> str:
    """TOML of containerd 1.6 and later 1.x."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [{cri}.cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [{cri}.containerd]
    snapshotter = "{snapshotter}"
    default_runtime_name = "runc"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{base_spec}"
"""


def cni_config(index: int) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": pod_cidr(index)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    port_map = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "localcluster", "plugins": [bridge, port_map]}


def kubelet_config(client_ca: Path, resolv_conf: Path, cgroup_root: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(client_ca)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup_root,
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [CONTROL_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": str(resolv_conf),
        # The machine's disk and memory are shared with others; a full one must not evict pods here.
        "evictionHard": dict.fromkeys(
            ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"), "0%"
        ),
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "enforceNodeAllocatable": [],
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 12,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "shutdownGracePeriod": "0s",
    }


class NodeInit:
    """Set-up and daemons of one node."""

    def __init__(self, paths: ClusterPaths, index: int) -> None:
        self._paths = paths
        self._spec = ClusterSpec.read(paths.spec)
        self._index = index
        self._name = f"node{index}"
        self._disk = paths.node(index)
        self._init = Init(paths.logs / self._name, self._on_exit)
        self._is_up = False

    def set_up_network(self) -> None:
        """Ask the control process for a link, then give it this node's address and routes to the others' pods."""
        socket.sethostname(self._name)
        request(self._paths.socket, verb="join", node=self._name)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        others = [index for index in range(self._spec.num_nodes) if index != self._index]
        ip_batch(
            [
                "link set lo up",
                f"addr add {node_ip(self._index)}/{NODE_PREFIX_LENGTH} dev eth0",
                "link set eth0 up",
                f"route add default via {CONTROL_IP}",
                *(f"route add {pod_cidr(index)} via {node_ip(index)}" for index in others),
            ]
        )

    def set_up_mounts(self) -> None:
        # Memory of the last boot is gone: sockets, mounted secrets, network namespaces.
        mount_tmpfs(Path("/run"))
        for folder in ("containerd", "netns", "lock"):
            (Path("/run") / folder).mkdir()
        for name, target in BINDS.items():
            bind(self._disk / name, Path(target))
        # Pods' volumes are mounted by the kubelet and must appear in containers that already run.
        run(["mount", "--make-rshared", BINDS["kubelet"]])
        bind_resolv_conf(self._paths.resolv_conf)
        for here, there in self._spec.folders:
            show_folder(Path(here), Path(there))

    def write_configs(self) -> None:
        Path("/etc/cni/net.d/10-localcluster.conflist").write_text(json.dumps(cni_config(self._index)))
        snapshotter = "native" if is_overlay(self._disk) else "overlayfs"
        (self._disk / "containerd.toml").write_text(containerd_config(self._paths.base_spec, snapshotter))
        # Pods inherit the search list's tail from this file, so it names the server alone.
        (self._disk / "resolv.conf").write_text(f"nameserver {CONTROL_IP}\n")
        cgroup_root = Cgroups(self._spec.name).kubelet_root(self._index)
        config = kubelet_config(self._paths.pki / "ca.crt", self._disk / "resolv.conf", cgroup_root)
        (self._disk / "kubelet.yaml").write_text(yaml.safe_dump(config))

    async def start_daemons(self) -> None:
        self._init.start("containerd", ["containerd", "-c", str(self._disk / "containerd.toml")])
        await self._import_images()
        await self._wait_for_api()
        proxy = components.proxy(self._paths, self._name, node_ip(self._index))
        self._init.start("proxy", proxy)
        self._init.start("kubelet", self._kubelet())
        await self._keep_gpus()

    def _kubelet(self) -> list[str]:
        labels = ",".join(f"{key}={value}" for key, value in gpu_labels(self._spec).items())
        return [
            str(self._paths.bin / "kubelet"),
            f"--config={self._disk}/kubelet.yaml",
            f"--kubeconfig={self._paths.pki}/{self._name}.kubeconfig",
            f"--hostname-override={self._name}", f"--node-ip={node_ip(self._index)}", f"--node-labels={labels}",
        ]  # fmt: skip

    async def _import_images(self) -> None:
        """Import as soon as containerd answers; a node that booted before has them already, which costs nothing."""
        while True:
            try:
                await self._init.run(["ctr", "-n", "k8s.io", "images", "import", str(self._paths.images)])
                return
            except CommandError as error:
                if "connection error" not in error.output and "no such file" not in error.output.lower():
                    raise
            await asyncio.sleep(POLL_S)

    async def _wait_for_api(self) -> None:
        api = Api(self._paths.pki / f"{self._name}.kubeconfig")
        while True:
            try:
                await asyncio.to_thread(api.call, "GET", "/readyz")
                return
            except ApiError:
                await asyncio.sleep(POLL_S)

    async def _keep_gpus(self) -> None:
        """Report GPUs in the node's status, as a device plugin would make the kubelet do.

        A kubelet that starts resets resources it has no plugin for, so each start is followed by a patch; the kubelet
        keeps what it then finds.
        """
        api = Api(self._paths.pki / f"{self._name}.kubeconfig")
        kubelet = self._init.daemons["kubelet"]
        served_start_s = -1.0
        while True:
            if kubelet.started_s != served_start_s:
                started_s = kubelet.started_s
                if await asyncio.to_thread(self._patch_gpus, api, started_s):
                    served_start_s = started_s
                    self._is_up = True
            await asyncio.sleep(1.0 if kubelet.started_s == served_start_s else POLL_S)

    def _patch_gpus(self, api: Api, started_s: float) -> bool:
        """True once the kubelet of this start reports and the GPUs are in the status."""
        path = f"/api/v1/nodes/{self._name}"
        want = str(self._spec.gpus_per_node)
        try:
            node = api.call("GET", path)
            status = node["status"]
            if not is_heartbeat_after(status, time.time() - (time.monotonic() - started_s)):
                return False
            if status.get("allocatable", {}).get("amd.com/gpu") == want or want == "0":
                return True
            resources = {"amd.com/gpu": want}
            patch = {"status": {"capacity": resources, "allocatable": resources}}
            api.call("PATCH", f"{path}/status", patch, "application/merge-patch+json")
        except ApiError:
            return False
        return False

    def _on_exit(self, daemon: Daemon, code: int) -> None:
        print(f"{daemon.name} ended with status {code}", file=sys.stderr, flush=True)
        if not self._is_up and daemon.num_restarts >= MAX_EXITS:
            print(f"log {daemon.log}:\n{tail(daemon.log)}", file=sys.stderr, flush=True)
            os._exit(1)


def is_heartbeat_after(status: dict[str, Any], since_s: float) -> bool:
    """Whether the node's Ready condition was reported after a point in time; heartbeats have whole seconds."""
    for condition in status.get("conditions", []):
        if condition["type"] == "Ready":
            heartbeat = datetime.datetime.fromisoformat(condition["lastHeartbeatTime"])
            return heartbeat.timestamp() >= int(since_s)
    return False


async def run_node(name: str, index: int) -> None:
    node = NodeInit(ClusterPaths(name), index)
    node.set_up_network()
    node.set_up_mounts()
    node.write_configs()
    await node.start_daemons()


if __name__ == "__main__":
    try:
        asyncio.run(run_node(sys.argv[1], int(sys.argv[2])))
    except LocalClusterError as error:
        sys.exit(f"node{sys.argv[2]}: {error}")
