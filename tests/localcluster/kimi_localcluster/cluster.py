"""The local cluster as an object: start it, talk to it, break it, end it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kimi_localcluster import channel
from kimi_localcluster.binaries import DEFAULT_PROGRAMS, ensure_programs
from kimi_localcluster.channel import Message
from kimi_localcluster.errors import LocalClusterError, WaitTimeoutError, tail
from kimi_localcluster.existing import ExistingCluster
from kimi_localcluster.keeper import (
    MODULE,
    Order,
    control_process,
    keeper_process,
    remove_traces,
    write_pod_images,
)
from kimi_localcluster.kube import Kube
from kimi_localcluster.machine import check_machine
from kimi_localcluster.packages import ensure_packages
from kimi_localcluster.paths import ClusterPaths, cache_dir, environment, existing_kubeconfig
from kimi_localcluster.podenv import check_place, ensure_pod_environment, remove_old
from kimi_localcluster.progress import Progress
from kimi_localcluster.shell import file_lock
from kimi_localcluster.spec import DEFAULT_IMAGES, DEFAULT_NAME, ClusterSpec, check_name, default_vram

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0
KEEP_LOGS = 10
POLL_S = 0.1


class Cluster(Kube):
    """A running local cluster. Make one with `up`, or find one with `attach`.

    As a context manager it ends the cluster at the end of the block.
    """

    def __init__(self, name: str) -> None:
        check_name(name)
        self.paths = ClusterPaths(name)
        self.name = name
        self._lifeline_fd: int | None = None

    @classmethod
    def up(
        cls,
        name: str = DEFAULT_NAME,
        *,
        nodes: int = 4,
        gpus: int = 8,
        device_id: str = "74a1",
        vram: str | None = None,
        images: Sequence[str] = DEFAULT_IMAGES,
        folders: Mapping[Path, str] | None = None,
        is_tied: bool = False,
        timeout_s: float = START_TIMEOUT_S,
        progress: Progress | None = None,
    ) -> Cluster:
        """Start a cluster, building whatever it needs first, and return when pods can run in it.

        nodes       number of nodes, named node0, node1, ...
        gpus        amd.com/gpu of each node, with the labels of the card that device_id (PCI) and vram name
        images      names under which pods find the project's environment
        folders     folders of this machine that every node shows, read-only, at another path
        is_tied     the cluster ends when this process does, however it does
        Raises LocalClusterError with the failing step, its log and what to do; then nothing is left behind.
        """
        shown = tuple((str(here), there) for here, there in (folders or {}).items())
        spec = ClusterSpec(name, nodes, gpus, device_id, vram or default_vram(device_id), tuple(images), shown)
        progress = progress or Progress()
        check_machine()
        if keeper_process(ClusterPaths(name)) or control_process(ClusterPaths(name)):
            raise LocalClusterError(f"cluster {name} exists; `localcluster down --name {name}` ends it")
        ensure_packages(progress)
        check_place()
        programs = ensure_programs(DEFAULT_PROGRAMS, progress)
        pods = ensure_pod_environment(progress)
        remove_old({pods.path, *(line for path in _cluster_paths() for line in _loaded_environments(path))})
        cluster = cls(name)
        cluster._start(Order(spec, programs, pods), is_tied=is_tied, timeout_s=timeout_s, progress=progress)
        return cluster

    @classmethod
    def attach(cls, name: str = DEFAULT_NAME) -> Cluster:
        """The running cluster of that name. Raises LocalClusterError if there is none."""
        cluster = cls(name)
        cluster.status()
        return cluster

    @staticmethod
    def from_kubeconfig(path: Path | str) -> ExistingCluster:
        """Any other cluster, with the same kubectl, helm and waiting but without node verbs."""
        return ExistingCluster(Path(path))

    @classmethod
    def find_or_up(cls, name: str = DEFAULT_NAME, **options: Any) -> Cluster | ExistingCluster:
        """KUBECONFIG's cluster if that is set, else the running local one, else a new one, with the options of `up`."""
        if kubeconfig := existing_kubeconfig():
            return cls.from_kubeconfig(kubeconfig)
        return cls.attach(name) if name in running_clusters() else cls.up(name, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def spec(self) -> ClusterSpec:
        return ClusterSpec.read(self.paths.spec)

    @property
    def kubeconfig(self) -> Path:
        """Valid inside the cluster's network, that is for commands run by `exec`."""
        return self.paths.kubeconfig

    # --- commands ----------------------------------------------------------------------------------------------

    def command(self, argv: Sequence[str], node: int | None = None) -> list[str]:
        process = control_process(self.paths)
        if process is None:
            raise self._not_running()
        stay = f"--wd={_working_folder()}"
        entry = ["nsenter", "-t", str(process), "-n", "-m", "-p", stay]
        if node is not None:
            entry += ["nsenter", "-t", str(self._node_process(node)), "-n", "-m", "-u", "-p", stay]
        return [*entry, *argv]

    def command_env(self) -> dict[str, str]:
        path = f"{self.paths.bin}:{environment().get('PATH', os.defpath)}"
        return environment(PATH=path, KUBECONFIG=str(self.kubeconfig), NO_PROXY="*", no_proxy="*")

    @contextmanager
    def network(self) -> Iterator[None]:
        """Let the calling thread, and threads it starts meanwhile, open sockets in the cluster's network.

        For clients inside a test process. Addresses work, cluster names do not: those need `exec`.
        """
        process = control_process(self.paths)
        if process is None:
            raise self._not_running()
        with Path("/proc/thread-self/ns/net").open() as ours, Path(f"/proc/{process}/ns/net").open() as theirs:
            _set_network_namespace(theirs.fileno())
            try:
                yield
            finally:
                _set_network_namespace(ours.fileno())

    def _not_running(self) -> LocalClusterError:
        return LocalClusterError(
            f"cluster {self.name} is not running; start it with `localcluster up --name {self.name}`"
        )

    def _node_process(self, node: int) -> int:
        nodes: dict[str, dict[str, Any]] = self.status()["nodes"]
        if f"node{node}" not in nodes:
            raise LocalClusterError(f"node 'node{node}' does not exist; nodes: {', '.join(nodes)}")
        process = nodes[f"node{node}"]["process"]
        if process is None:
            raise LocalClusterError(f"node{node} is not running; start it with `localcluster node restart {node}`")
        return int(process)

    # --- verbs -------------------------------------------------------------------------------------------------

    def _request(self, timeout_s: float = 30, **message: Any) -> Message:
        try:
            return channel.request(self.paths.socket, timeout_s, **message)
        except OSError as error:
            raise self._not_running() from error

    def status(self) -> Message:
        """Phase, components and nodes as the cluster's first process sees them."""
        return self._request(verb="status")

    def partition_node(self, node: int) -> None:
        """Take the node's network link down; what runs on it runs on."""
        self._request(verb="partition", node=f"node{node}")

    def heal_node(self, node: int) -> None:
        self._request(verb="heal", node=f"node{node}")

    def kill_node(self, node: int) -> None:
        """End all processes of a node at once, as a power cut does; returns when none is left."""
        self._request(verb="kill", node=f"node{node}")

    def restart_node(self, node: int) -> None:
        """Boot a node again with its old disk and identity; kills it first if it runs. Returns at once."""
        self._request(verb="restart", node=f"node{node}")

    def stop_component(self, component: str) -> None:
        """Kill etcd, apiserver, controller-manager, scheduler, coredns or proxy and keep it down."""
        self._request(verb="stop", component=component)

    def start_component(self, component: str) -> None:
        self._request(verb="start", component=component)

    def logs(self, component: str) -> Path:
        """Log file of a component: a name of `status`, control, audit, nodeN, or nodeN/kubelet and the like."""
        log = self.paths.logs / f"{component}.log"
        if not log.exists():
            known = sorted(str(p.relative_to(self.paths.logs).with_suffix("")) for p in self.paths.logs.rglob("*.log"))
            there = f"there are: {', '.join(known)}" if known else f"cluster {self.name} has not run here"
            raise LocalClusterError(f"no log of {component!r}; {there}")
        return log

    def load_image(self, name: str, progress: Progress | None = None) -> None:
        """Make the checkout's present code available on all running nodes as an image of that name."""
        pods = ensure_pod_environment(progress or Progress())
        with self.paths.pods.open("a") as loaded:
            loaded.write(f"{pods.path}\n")
        target = self.paths.state / "loaded-images.tar"
        write_pod_images(target, pods, (name,))
        for node, state in self.status()["nodes"].items():
            if state["process"] is not None:
                argv = ["ctr", "-n", "k8s.io", "images", "import", str(target)]
                self.exec(argv, node=int(node.removeprefix("node")))

    # --- start and end -----------------------------------------------------------------------------------------

    def _start(self, order: Order, *, is_tied: bool, timeout_s: float, progress: Progress) -> None:
        """Start the keeper, detached, and wait; two pipes tell each side when the other has ended."""
        lifeline_read, self._lifeline_fd = os.pipe()
        keeper_fd, keeper_write = os.pipe()
        log = self._fresh_logs() / "keeper.log"
        argv = ["setsid", "--fork", sys.executable, "-P", "-m", MODULE, self.name, str(lifeline_read)]
        try:
            with log.open("w") as output:
                subprocess.run(
                    argv, input=order.to_json(), stdout=output, stderr=output, text=True, check=True,
                    pass_fds=[lifeline_read, keeper_write],
                )  # fmt: skip
            os.close(lifeline_read)
            os.close(keeper_write)
            self._wait_until_up(keeper_fd, log, timeout_s, progress)
        except BaseException:
            # Closing the lifeline ends the cluster, and the keeper removes its traces.
            self._release_lifeline()
            _is_closed(keeper_fd, END_TIMEOUT_S)
            raise
        finally:
            os.close(keeper_fd)
        if not is_tied:
            os.write(self._lifeline_fd, b"1")
            self._release_lifeline()

    def _fresh_logs(self) -> Path:
        """An empty folder for this cluster's logs; those of long ended clusters go."""
        shutil.rmtree(self.paths.logs, ignore_errors=True)
        self.paths.logs.mkdir(parents=True)
        ended = [
            path for path in self.paths.logs.parent.iterdir() if path.is_dir() and path.name not in running_clusters()
        ]
        for folder in sorted(ended, key=lambda path: path.stat().st_mtime, reverse=True)[KEEP_LOGS:]:
            shutil.rmtree(folder, ignore_errors=True)
        return self.paths.logs

    def _wait_until_up(self, keeper_fd: int, log: Path, timeout_s: float, progress: Progress) -> None:
        deadline = time.monotonic() + timeout_s
        with progress.step(f"Starting cluster {self.name}", expected_s=12) as step:
            while True:
                if _is_closed(keeper_fd, POLL_S):
                    raise LocalClusterError(
                        f"cluster {self.name} ended while it started; {log}:\n{tail(log)}\n"
                        f"{self.paths.logs}/control.log:\n{tail(self.paths.logs / 'control.log')}"
                    )
                with contextlib.suppress(OSError):
                    status = channel.request(self.paths.socket, verb="status")
                    if status["phase"] == "ready":
                        return
                    if status["phase"] == "failed":
                        raise LocalClusterError(f"cluster {self.name} did not start: {status['problem']}")
                    step.note(f"waiting for {status['step']}")
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(
                        f"cluster {self.name} is not up after {timeout_s:g} s: {step.line()}; logs in {self.paths.logs}"
                    )

    def _release_lifeline(self) -> None:
        if self._lifeline_fd is not None:
            os.close(self._lifeline_fd)
            self._lifeline_fd = None

    def _wait_for_keeper(self) -> None:
        """Wait until the keeper has removed the cluster's traces."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while keeper_process(self.paths):
            if time.monotonic() > deadline:
                raise LocalClusterError(
                    f"the keeper of cluster {self.name} does not end; see {self.paths.logs}/keeper.log"
                )
            time.sleep(0.02)

    def down(self) -> None:
        """End the cluster and remove everything of it but its logs; no effect if there is none."""
        self._release_lifeline()
        if keeper := keeper_process(self.paths):
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGTERM)
        self._wait_for_keeper()
        with file_lock(self.paths.lock):
            if keeper_process(self.paths):
                return  # a new cluster of this name has started meanwhile
            if control := control_process(self.paths):
                os.kill(control, signal.SIGKILL)
            remove_traces(self.paths)


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise LocalClusterError("the working folder has been removed; change to one that is there") from None


def _set_network_namespace(fd: int) -> None:
    """setns(2) for the calling thread; Python has it from 3.12 on."""
    clone_newnet = 0x40000000
    if ctypes.CDLL(None, use_errno=True).setns(fd, clone_newnet) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _is_closed(fd: int, timeout_s: float) -> bool:
    """Whether the other end of a pipe that carries nothing closes within the time."""
    return bool(select.select([fd], [], [], timeout_s)[0])


def running_clusters() -> list[str]:
    """Names of clusters that run or start now."""
    return [paths.name for paths in _cluster_paths() if keeper_process(paths) or control_process(paths)]


def _cluster_paths() -> list[ClusterPaths]:
    folder = cache_dir() / "clusters"
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []
    return [ClusterPaths(name) for name in names]


def _loaded_environments(paths: ClusterPaths) -> list[str]:
    return paths.pods.read_text().splitlines() if paths.pods.exists() else []
