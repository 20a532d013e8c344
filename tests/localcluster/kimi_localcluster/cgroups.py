"""A cluster's control groups: created before the kubelets need them, removed when the cluster is gone.

Layout, the same on cgroup v1 (in each hierarchy) and v2 (in the one tree):

    kimi-NAME/system    every daemon of the cluster, so that its processes can be found from outside
    kimi-NAME/nodeN     root of node N's kubelet, which deletes what it does not know below its root
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kimi_localcluster.errors import LocalClusterError
from kimi_localcluster.paths import CGROUP_ROOT

# Shares of CPU time, in units of what one session of the machine gets. A cluster counts as several, since it is many
# programs; in it the control plane and kubelets go before pods, or a busy pod would make nodes look dead.
NODE_WEIGHT = 4
SYSTEM_WEIGHT = 10


class Cgroups:
    """Control groups of one cluster under a mounted cgroup file system."""

    def __init__(self, name: str, root: Path = CGROUP_ROOT) -> None:
        self._root = root
        self._top = f"kimi-{name}"

    @property
    def is_v2(self) -> bool:
        return (self._root / "cgroup.controllers").exists()

    def kubelet_root(self, node: int) -> str:
        """Value of the kubelet's cgroupRoot."""
        return f"/{self._top}/node{node}"

    def hierarchies(self) -> list[Path]:
        """Mount points of the trees that hold groups: one on v2; on v1 one a controller, often with a v2 beside."""
        if self.is_v2:
            return [self._root]
        folders = [path for path in self._root.iterdir() if path.is_dir() and not path.is_symlink()]
        return sorted(path for path in folders if (path / "cgroup.procs").exists())

    def create(self, num_nodes: int) -> None:
        """Make the groups of all nodes. Raises LocalClusterError where the machine does not allow it."""
        hierarchies = self.hierarchies()
        if not hierarchies:
            raise LocalClusterError(f"no cgroup hierarchy is mounted under {self._root}; kubelets cannot run without")
        groups = {self._top: NODE_WEIGHT * (num_nodes + 1), f"{self._top}/system": SYSTEM_WEIGHT}
        groups |= {f"{self._top}/node{index}": 1 for index in range(num_nodes)}
        for hierarchy in hierarchies:
            for path, weight in groups.items():
                try:
                    (hierarchy / path).mkdir(exist_ok=True)
                    self._prepare(hierarchy / path, weight)
                except OSError as error:
                    raise LocalClusterError(
                        f"cannot create cgroup {hierarchy / path}: {error}; the local cluster needs root and "
                        f"a writable {self._root} (in a container: a privileged one with its own cgroup namespace)"
                    ) from error

    def _prepare(self, group: Path, weight: int) -> None:
        """Make a new group usable: controllers in v2, cpus and memory nodes in v1's cpuset, its share of CPU time."""
        parent = group.parent
        if self.is_v2:
            available = (parent / "cgroup.controllers").read_text().split()
            enabled = (parent / "cgroup.subtree_control").read_text().split()
            if missing := [f"+{controller}" for controller in available if controller not in enabled]:
                (parent / "cgroup.subtree_control").write_text(" ".join(missing))
        elif (parent / "cpuset.cpus").exists():
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((parent / file).read_text())
        for file, unit in (("cpu.shares", 1024), ("cpu.weight", 100)):
            if (group / file).exists():
                (group / file).write_text(str(unit * weight))

    def join_system(self) -> None:
        """Move the calling process, and so all its later children, into the cluster's own group.

        In v1 that of one hierarchy suffices to find them again; the limits of the others stay those of the caller.
        """
        hierarchy = min(self.hierarchies(), key=lambda path: "cpu" not in path.name.split(","))
        (hierarchy / self._top / "system" / "cgroup.procs").write_text("0")

    def processes(self) -> set[int]:
        """Ids of all processes in the cluster's groups, as the caller sees them."""
        ids: set[int] = set()
        for group in self.groups():
            try:
                ids.update(int(line) for line in (group / "cgroup.procs").read_text().split())
            except OSError:  # the group went away meanwhile
                continue
        # 0 is a process outside the caller's process namespace.
        return ids - {0}

    def groups(self, node: int | None = None) -> list[Path]:
        """Existing groups of the cluster or of one node: in each hierarchy its top, then all that is below."""
        below = self._top if node is None else f"{self._top}/node{node}"
        tops = [group for hierarchy in self.hierarchies() if (group := hierarchy / below).is_dir()]
        # os.walk, because groups go away while one looks: it passes over what it cannot read.
        found = sorted({Path(folder) for top in tops for folder, _, _ in os.walk(top)} - set(tops))
        return tops + found

    def remove(self, *, node: int | None = None, deadline_s: float = 15) -> None:
        """End what still runs in the groups and remove them. Raises LocalClusterError after the deadline.

        With `node`, removes only what is below that node's group, whose processes must be dying already.
        """
        deadline = time.monotonic() + deadline_s
        keep = set(self.groups(node)[: len(self.hierarchies())]) if node is not None else set()
        while left := [group for group in self.groups(node) if group not in keep]:
            if node is None:
                self._kill()
            for group in sorted(left, key=lambda path: len(path.parts), reverse=True):
                try:
                    group.rmdir()
                except OSError:  # still busy: a killed process has not been reaped yet
                    continue
            if time.monotonic() > deadline:
                raise LocalClusterError(
                    f"cgroup {left[0]} cannot be removed: processes {sorted(self.processes())} do not end; "
                    "look at them with ps and try `localcluster down` again"
                )
            time.sleep(0.02)

    def _kill(self) -> None:
        for process in self.processes() - {os.getpid()}:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
