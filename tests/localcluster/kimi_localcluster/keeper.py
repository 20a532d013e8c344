"""The process outside a cluster's namespaces: prepares its files, starts it, and removes what the kernel does not.

Namespaces, mounts, links and processes end with the cluster's first process. Control groups and files do not; the
keeper waits for that end, however it comes, and removes them. Should the keeper itself be killed, the next
`localcluster down` or `up` does the same.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from kimi_localcluster import channel
from kimi_localcluster.cgroups import Cgroups
from kimi_localcluster.components import write_resolv_conf
from kimi_localcluster.errors import LocalClusterError
from kimi_localcluster.images import READ_ONLY_HOST_PATHS, SYSTEM_PATH, Image, write_base_spec, write_images
from kimi_localcluster.paths import ClusterPaths, environment
from kimi_localcluster.pki import write_pki
from kimi_localcluster.podenv import PodEnvironment
from kimi_localcluster.shell import UNSHARE, file_lock
from kimi_localcluster.spec import PAUSE_IMAGE, ClusterSpec

MODULE = "kimi_localcluster.keeper"


@dataclass(frozen=True, slots=True)
class Order:
    """What `up` tells the keeper to run."""

    spec: ClusterSpec
    programs: dict[str, Path]
    pods: PodEnvironment

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Order:
        values = json.loads(text)
        spec = ClusterSpec.from_json(values["spec"])
        pods = PodEnvironment(values["pods"]["path"], tuple(Path(path) for path in values["pods"]["mounts"]))
        return cls(spec, {name: Path(path) for name, path in values["programs"].items()}, pods)


def keeper_process(paths: ClusterPaths) -> int | None:
    """Process id of the running keeper of a cluster."""
    try:
        process = int(json.loads(paths.keeper.read_text())["keeper"])
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, KeyError):
        return None
    return process if {MODULE.encode(), paths.name.encode()} <= set(arguments) else None


def control_process(paths: ClusterPaths) -> int | None:
    """Process id of the cluster's first process, from the kernel's word about who listens on its socket."""
    try:
        with channel.connect(paths.socket) as sock:
            return channel.peer_process(sock)
    except OSError:
        return None


def refuse_second(paths: ClusterPaths) -> None:
    """Raise LocalClusterError if a cluster of this name runs or starts."""
    if keeper_process(paths) or control_process(paths):
        raise LocalClusterError(f"cluster {paths.name} exists; `localcluster down --name {paths.name}` ends it")


def prepare(order: Order) -> None:
    """Write all files of a new cluster and make its control groups."""
    spec = order.spec
    paths = ClusterPaths(spec.name)
    remove_traces(paths)
    for folder in (paths.state, paths.bin):
        folder.mkdir(parents=True)
    paths.keeper.write_text(json.dumps({"keeper": os.getpid()}))
    spec.write(paths.spec)
    for name, program in order.programs.items():
        (paths.bin / name).symlink_to(program)
    write_resolv_conf(paths.resolv_conf)
    write_pki(paths.pki, spec)
    host_paths = [Path(path) for path in READ_ONLY_HOST_PATHS if Path(path).exists()]
    write_base_spec(paths.base_spec, [*host_paths, *order.pods.mounts])
    paths.pods.write_text(f"{order.pods.path}\n")
    write_pod_images(paths.images, order.pods, spec.images, order.programs["pause"])
    Cgroups(spec.name).create(spec.num_nodes)


def write_pod_images(target: Path, pods: PodEnvironment, names: tuple[str, ...], pause: Path | None = None) -> None:
    """Images of the given names that run the pods' environment, and the pause image if its program is given."""
    mounts = [*(Path(path) for path in READ_ONLY_HOST_PATHS), *pods.mounts]
    project = Image(names, ("/bin/sh",), f"{pods.path}:{SYSTEM_PATH}")
    # containerd adds the machine's folders to containers, but not to the one that holds a pod's namespaces.
    holder = [Image((PAUSE_IMAGE,), ("/pause",), SYSTEM_PATH, pause)] if pause else []
    write_images(target, [project, *holder], mounts)


def remove_traces(paths: ClusterPaths) -> None:
    """Remove control groups and files of a cluster that has ended; ends stray processes in the groups."""
    Cgroups(paths.name).remove()
    shutil.rmtree(paths.state, ignore_errors=True)
    if paths.state.exists():
        shutil.rmtree(paths.state)


def keep(order: Order, lifeline_fd: int) -> None:
    """Run the cluster until it ends, then remove its traces."""
    paths = ClusterPaths(order.spec.name)
    with file_lock(paths.lock):
        refuse_second(paths)
        try:
            prepare(order)
            cluster = _start(paths, lifeline_fd)
        except BaseException:
            remove_traces(paths)
            raise
    try:
        cluster.wait()
    finally:
        cluster.kill()
        cluster.wait()
        with file_lock(paths.lock):
            remove_traces(paths)


def _start(paths: ClusterPaths, lifeline_fd: int) -> subprocess.Popen[bytes]:
    argv = [*UNSHARE, sys.executable, "-P", "-m", "kimi_localcluster.control", paths.name, str(lifeline_fd)]
    # Nothing in the cluster may try to reach it through the machine's HTTP proxy.
    env = environment(NO_PROXY="*", no_proxy="*")
    with (paths.logs / "control.log").open("wb") as log:
        cluster = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, pass_fds=[lifeline_fd]
        )
    os.close(lifeline_fd)
    return cluster


def end(received: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + received)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    try:
        keep(Order.from_json(sys.stdin.read()), int(sys.argv[2]))
    except LocalClusterError as problem:
        sys.exit(str(problem))
