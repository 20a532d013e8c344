"""A cluster that somebody else runs, by its kubeconfig."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_localcluster.binaries import ensure_programs
from kimi_localcluster.errors import LocalClusterError
from kimi_localcluster.kube import Kube
from kimi_localcluster.paths import environment
from kimi_localcluster.progress import Progress

LOCAL_ONLY = {
    "partition_node", "heal_node", "kill_node", "restart_node", "stop_component", "start_component",
    "load_image", "logs", "status", "network", "down", "spec",
}  # fmt: skip


class ExistingCluster(Kube):
    """kubectl, helm and waiting as with a local cluster; its nodes are not ours to break.

    Programs that are not on PATH are built as for a local cluster.
    """

    def __init__(self, kubeconfig: Path) -> None:
        if not kubeconfig.is_file():
            raise LocalClusterError(f"kubeconfig {kubeconfig} is not a file; correct KUBECONFIG or unset it")
        self.kubeconfig = kubeconfig.resolve()

    def command(self, argv: Sequence[str], node: int | None = None) -> list[str]:
        if node is not None:
            raise self._refusal("a command on a node")
        program, *arguments = argv
        if program in ("kubectl", "helm") and not shutil.which(program):
            program = str(ensure_programs((program,), Progress())[program])
        return [program, *arguments]

    def command_env(self) -> dict[str, str]:
        return environment(KUBECONFIG=str(self.kubeconfig))

    def _refusal(self, what: str) -> LocalClusterError:
        return LocalClusterError(
            f"{self.kubeconfig} names an existing cluster; {what} works on a local one only (unset KUBECONFIG)"
        )

    def __getattr__(self, name: str) -> Any:
        if name in LOCAL_ONLY:
            raise self._refusal(name)
        raise AttributeError(name)
