"""What a cluster has on the machine, to show that nothing of it is left."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from kimi_localcluster.cgroups import Cgroups
from kimi_localcluster.paths import ClusterPaths

NAMESPACES = ("net", "mnt", "pid", "uts")


@dataclass(frozen=True, slots=True)
class Traces:
    """Everything of one cluster that can be seen from the machine's own namespaces."""

    processes: frozenset[int]
    """Processes that are not in our namespaces but in the cluster's, and its keeper."""
    mounts: frozenset[str]
    links: frozenset[str]
    cgroups: frozenset[Path]
    files: frozenset[Path]

    @property
    def is_empty(self) -> bool:
        return not (self.processes or self.mounts or self.links or self.cgroups or self.files)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine's mounts and links at one time, shared by all clusters."""

    mounts: frozenset[str]
    links: frozenset[str]

    @classmethod
    def now(cls) -> Machine:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return cls(frozenset(mounts), frozenset(name for _, name in socket.if_nameindex()))


def namespaces_of(name: str) -> frozenset[str]:
    """Ids of the namespaces that a running cluster's processes live in, without our own."""
    found = {link for process in Cgroups(name).processes() for link in _namespace_links(process)}
    return frozenset(found - _namespace_links(os.getpid()))


def find_traces(name: str, before: Machine, namespaces: frozenset[str]) -> Traces:
    """What is there of a cluster now.

    `before` is the machine before the cluster started; `namespaces` are those it had, so that a process that has left
    its control group is found too.
    """
    now = Machine.now()
    files = [path for path in ClusterPaths(name).state.parent.glob(f"{name}*") if path.is_dir()]
    return Traces(
        processes=frozenset(p for p in _all_processes() if _belongs(p, name, namespaces)),
        mounts=now.mounts - before.mounts,
        links=now.links - before.links,
        cgroups=frozenset(Cgroups(name).groups()),
        files=frozenset(files),
    )


def _all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _namespace_links(process: int) -> set[str]:
    links = set()
    for kind in NAMESPACES:
        try:
            links.add(str(Path(f"/proc/{process}/ns/{kind}").readlink()))
        except OSError:  # it has ended, or ends now
            continue
    return links


def _belongs(process: int, name: str, namespaces: frozenset[str]) -> bool:
    try:
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    is_ours = any(argument.startswith(b"kimi_localcluster.") for argument in arguments) and name.encode() in arguments
    return is_ours or bool(_namespace_links(process) & namespaces)
