"""The cluster: first process of its namespaces, runs the control plane and starts the nodes.

Started by the keeper under `unshare`; when it ends, the kernel ends everything below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_localcluster import components
from kimi_localcluster.api import Api, ApiError
from kimi_localcluster.cgroups import Cgroups
from kimi_localcluster.channel import Message, peer_process
from kimi_localcluster.errors import LocalClusterError, tail
from kimi_localcluster.init import Daemon, Init
from kimi_localcluster.mounts import bind_resolv_conf, mount_tmpfs
from kimi_localcluster.paths import ClusterPaths
from kimi_localcluster.shell import UNSHARE, ip_batch
from kimi_localcluster.spec import (
    BRIDGE,
    CONTROL_IP,
    KUBERNETES_SERVICE_IP,
    NODE_PREFIX_LENGTH,
    SERVICE_NETWORK,
    ClusterSpec,
    node_ip,
    pod_cidr,
)

POLL_S = 0.15
# A daemon may lose a race or two while the API server starts.
MAX_EXITS_WHILE_STARTING = 3


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class Node:
    """One node as the control process knows it; `process` is the node's first process in our numbering."""

    index: int
    process: int | None = None
    is_partitioned: bool = False

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def link(self) -> str:
        return f"v{self.index}"


class Control:
    """State of one running cluster and the verbs of its control socket."""

    def __init__(self, paths: ClusterPaths) -> None:
        self._paths = paths
        self._spec = ClusterSpec.read(paths.spec)
        self._cgroups = Cgroups(self._spec.name)
        self._nodes = {name: Node(index) for index, name in enumerate(self._spec.node_names)}
        self._init = Init(paths.logs, self._on_exit)
        self._api = Api(paths.kubeconfig)
        self._phase = Phase.STARTING
        self._step = "the control socket"
        self._error = ""
        self._verbs: dict[str, Callable[[Message, int], Awaitable[Message]]] = {
            "status": self._status,
            "join": self._join,
            "partition": self._partition,
            "heal": self._heal,
            "kill": self._kill,
            "restart": self._restart,
            "stop": self._stop,
            "start": self._start,
        }

    # --- start -------------------------------------------------------------------------------------------------

    async def bring_up(self) -> None:
        """Start everything and wait until pods can run; failures end in `status`, for `up` to report."""
        try:
            await self._bring_up()
            self._phase = Phase.READY
        except LocalClusterError as error:
            self._fail(str(error))

    async def _bring_up(self) -> None:
        start = self._init.start
        start("etcd", components.etcd(self._paths))
        start("apiserver", components.apiserver(self._paths))
        for node in self._nodes.values():
            self._start_node(node)
        await self._until("the API server", self._api_is_ready)
        await asyncio.to_thread(components.create_coredns_role, self._api)
        start("controller-manager", components.controller_manager(self._paths))
        start("scheduler", components.scheduler(self._paths))
        start("coredns", components.coredns(self._paths))
        start("proxy", components.control_proxy(self._paths))
        await self._until("the nodes", self._nodes_are_ready)
        await self._until("the default service account", self._has_service_account)
        await self._until("cluster DNS and service addresses", self._services_answer)

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll a blocking condition; `up` holds the deadline, because it knows how patient its caller is."""
        self._step = what
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  # the other side has no events to offer
            await asyncio.sleep(POLL_S)

    def _api_is_ready(self) -> bool:
        try:
            return bool(self._api.call("GET", "/readyz") == "ok")
        except ApiError:
            return False

    def _nodes_are_ready(self) -> bool:
        nodes = self._api.call("GET", "/api/v1/nodes")["items"]
        ready = [node for node in nodes if components.is_node_ready(node, self._spec)]
        self._step = f"the nodes ({len(ready)} of {self._spec.num_nodes} ready)"
        return len(ready) == self._spec.num_nodes

    def _has_service_account(self) -> bool:
        try:
            self._api.call("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        except ApiError:
            return False
        return True

    def _services_answer(self) -> bool:
        try:
            address = socket.gethostbyname("kubernetes.default.svc.cluster.local")
            with socket.create_connection((KUBERNETES_SERVICE_IP, 443), timeout=1):
                return address == KUBERNETES_SERVICE_IP
        except OSError:
            return False

    def _fail(self, error: str) -> None:
        if self._phase is Phase.STARTING:
            self._phase, self._error = Phase.FAILED, error

    def _on_exit(self, daemon: Daemon, code: int) -> None:
        print(f"{daemon.name} ended with status {code}", file=sys.stderr, flush=True)
        if daemon.name in self._nodes:
            self._nodes[daemon.name].process = None
        if not daemon.restart or daemon.num_restarts >= MAX_EXITS_WHILE_STARTING:
            self._fail(f"{daemon.name} ended with status {code}; log {daemon.log}:\n{tail(daemon.log)}")

    def _start_node(self, node: Node) -> None:
        argv = [*UNSHARE, sys.executable, "-P", "-m", "kimi_localcluster.node", self._spec.name, str(node.index)]
        self._init.start(node.name, argv, restart=False)

    # --- control socket ----------------------------------------------------------------------------------------

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line:
            message = json.loads(line)
            peer = peer_process(writer.get_extra_info("socket"))
            try:
                answer = await self._verbs[message["verb"]](message, peer)
            except LocalClusterError as error:
                answer = {"error": str(error)}
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _status(self, message: Message, peer: int) -> Message:
        daemons = {
            daemon.name: {"state": daemon.state, "restarts": daemon.num_restarts}
            for daemon in self._init.daemons.values()
            if daemon.name not in self._nodes
        }
        nodes = {
            node.name: {
                "state": self._init.daemons[node.name].state if node.name in self._init.daemons else "stopped",
                "partitioned": node.is_partitioned,
                "process": node.process,
            }
            for node in self._nodes.values()
        }
        return {
            "phase": self._phase.value,
            "step": self._step,
            "problem": self._error,
            "components": daemons,
            "nodes": nodes,
        }

    async def _join(self, message: Message, peer: int) -> Message:
        """A node's first process asks for its network link."""
        node = self._node(message)
        node.process = peer
        node.is_partitioned = False
        # The link of a killed node lives until the kernel has taken its namespace down.
        if node.link in {name for _, name in socket.if_nameindex()}:
            ip_batch([f"link del {node.link}"])
        ip_batch(
            [
                f"link add {node.link} type veth peer name eth0 netns {peer}",
                f"link set {node.link} master {BRIDGE} up",
                f"route replace {pod_cidr(node.index)} via {node_ip(node.index)}",
            ]
        )
        return {}

    async def _partition(self, message: Message, peer: int) -> Message:
        node = self._running_node(message)
        ip_batch([f"link set {node.link} down"])
        node.is_partitioned = True
        return {}

    async def _heal(self, message: Message, peer: int) -> Message:
        node = self._running_node(message)
        ip_batch([f"link set {node.link} up"])
        node.is_partitioned = False
        return {}

    async def _kill(self, message: Message, peer: int) -> Message:
        """End a node's processes at once, and wait until none is left."""
        node = self._node(message)
        await self._init.stop(node.name)
        node.process = None
        # unshare is gone; the kernel is still ending what ran below it.
        await asyncio.to_thread(self._cgroups.remove, node=node.index)
        return {}

    async def _restart(self, message: Message, peer: int) -> Message:
        """Boot a node again: its disk stays, its memory and processes do not."""
        node = self._node(message)
        await self._kill(message, peer)
        self._start_node(node)
        return {}

    async def _stop(self, message: Message, peer: int) -> Message:
        await self._init.stop(self._component(message))
        return {}

    async def _start(self, message: Message, peer: int) -> Message:
        self._init.resume(self._component(message))
        return {}

    def _node(self, message: Message) -> Node:
        name = str(message["node"])
        if name not in self._nodes:
            raise LocalClusterError(f"node {name!r} does not exist; nodes: {', '.join(self._nodes)}")
        return self._nodes[name]

    def _running_node(self, message: Message) -> Node:
        node = self._node(message)
        if node.process is None:
            raise LocalClusterError(
                f"{node.name} is not running; start it with `localcluster node restart {node.index}`"
            )
        return node

    def _component(self, message: Message) -> str:
        name = str(message["component"])
        names = [daemon for daemon in self._init.daemons if daemon not in self._nodes]
        if name not in names:
            raise LocalClusterError(f"component {name!r} does not exist; components: {', '.join(names)}")
        return name


def set_up_namespaces(paths: ClusterPaths) -> None:
    """Network and mounts of the control plane: a bridge to the nodes, etcd's memory disk, the cluster's DNS."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    ip_batch(
        [
            "link set lo up",
            f"link add {BRIDGE} type bridge",
            f"addr add {CONTROL_IP}/{NODE_PREFIX_LENGTH} dev {BRIDGE}",
            f"link set {BRIDGE} up",
            # Gives service addresses a route, so that kube-proxy's rules see the packets at all.
            f"route add {SERVICE_NETWORK} dev {BRIDGE}",
        ]
    )
    mount_tmpfs(paths.state / "etcd")
    bind_resolv_conf(paths.resolv_conf)


def watch_lifeline(fd: int) -> None:
    """End the cluster when the process that starts it goes away before it has said that it is satisfied.

    The other end sends one byte to let the cluster live on without it.
    """
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        if os.read(fd, 1):
            loop.remove_reader(fd)
            os.close(fd)
        else:
            os._exit(1)

    loop.add_reader(fd, on_readable)


async def run_cluster(name: str, lifeline_fd: int) -> None:
    paths = ClusterPaths(name)
    Cgroups(name).join_system()
    watch_lifeline(lifeline_fd)
    os.chdir(paths.state)
    set_up_namespaces(paths)
    control = Control(paths)
    for received in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(received, os._exit, 0)
    # A relative path, because a socket address holds only 107 bytes.
    server = await asyncio.start_unix_server(control.serve_connection, paths.socket.name)
    bringing_up: asyncio.Task[Any] = asyncio.create_task(control.bring_up())
    async with server:
        await bringing_up
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(run_cluster(sys.argv[1], int(sys.argv[2])))
