"""Where the local cluster keeps its files. The only reader of the environment in this package."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kimi_localcluster.errors import LocalClusterError

CGROUP_ROOT = Path("/sys/fs/cgroup")


def cache_dir() -> Path:
    """The project's folder in the user's cache; everything below can be rebuilt."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kimi-operator"


def kubebuilder_assets() -> Path | None:
    """Folder with ready kube-apiserver, etcd and kubectl, as controller-runtime's envtest names it."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise LocalClusterError(f"KUBEBUILDER_ASSETS={folder} is not a folder; correct it or unset it to build instead")
    return Path(folder).resolve()


def existing_kubeconfig() -> Path | None:
    """The cluster that the caller already has, as kubectl would find it by KUBECONFIG."""
    path = os.environ.get("KUBECONFIG")
    return Path(path) if path else None


def uv() -> str:
    """The uv program: KIMI_UV, then PATH, then the copy that the Makefile keeps in the cache folder."""
    ours = sorted(str(path) for path in cache_dir().glob("uv*/bin/uv"))
    candidates = [os.environ.get("KIMI_UV"), shutil.which("uv"), *ours]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise LocalClusterError(
        f"uv not found on PATH or in {cache_dir()}; run `make setup`, or set KIMI_UV to a uv program"
    )


def repository() -> Path:
    """Root of the checkout: the folder whose pyproject.toml declares the uv workspace."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "uv.lock").exists() and (folder / "operator").is_dir():
            return folder
    raise LocalClusterError(
        f"no uv workspace above {Path(__file__).parent}; run from a checkout with kimi-localcluster installed editable"
    )


def go_modules() -> Path:
    """Folder of the locked Go modules that the cluster's programs are built from."""
    return Path(__file__).resolve().parents[1] / "go"


def current_test() -> str:
    """Name of the test that runs, and whether it is set up, called or torn down; pytest keeps it for others to read."""
    return os.environ.get("PYTEST_CURRENT_TEST", "no test").rpartition("::")[2]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for child processes."""
    return {**os.environ, **changes}


@dataclass(frozen=True, slots=True)
class ClusterPaths:
    """Files of one cluster. `state` goes when the cluster goes; `logs` stay until the next start."""

    name: str

    @property
    def state(self) -> Path:
        return cache_dir() / "clusters" / self.name

    @property
    def lock(self) -> Path:
        """Held while any cluster's files are made or removed; one for all, because a lock file must never go."""
        return cache_dir() / "clusters" / "lock"

    @property
    def logs(self) -> Path:
        return cache_dir() / "logs" / self.name

    @property
    def spec(self) -> Path:
        return self.state / "cluster.json"

    @property
    def keeper(self) -> Path:
        """Process ids of the keeper and of the `unshare` process that is the cluster."""
        return self.state / "keeper.json"

    @property
    def socket(self) -> Path:
        return self.state / "control.sock"

    @property
    def bin(self) -> Path:
        """Links to the cluster's programs: one folder for PATH."""
        return self.state / "bin"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        return self.pki / "admin.kubeconfig"

    @property
    def resolv_conf(self) -> Path:
        return self.state / "resolv.conf"

    @property
    def base_spec(self) -> Path:
        return self.state / "base-spec.json"

    @property
    def images(self) -> Path:
        return self.state / "images.tar"

    @property
    def pods(self) -> Path:
        """PATH of each pods' environment that the cluster has loaded, one a line."""
        return self.state / "pods"

    def node(self, index: int) -> Path:
        return self.state / f"node{index}"
