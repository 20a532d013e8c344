"""Debian packages that the nodes need, installed when they are missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kimi_localcluster.errors import LocalClusterError
from kimi_localcluster.paths import cache_dir, environment
from kimi_localcluster.progress import Progress
from kimi_localcluster.shell import run_logged

# A file or program that proves the package is there, however it was installed.
PROOFS = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iproute2": "ip",
    "iptables": "iptables",  # the CNI plugin for host ports calls it
    "nftables": "nft",
    "socat": "socat",  # kubectl port-forward
    "openssl": "openssl",
    "util-linux": "unshare",
}


def is_there(proof: str) -> bool:
    return Path(proof).exists() if proof.startswith("/") else shutil.which(proof) is not None


def missing_packages() -> list[str]:
    return [package for package, proof in PROOFS.items() if not is_there(proof)]


def ensure_packages(progress: Progress) -> None:
    """Install missing packages with apt-get, or raise an error that lists them."""
    missing = missing_packages()
    if not missing:
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise LocalClusterError(
            f"these programs are missing: {', '.join(PROOFS[package] for package in missing)}; "
            f"install the packages (Debian's names: {' '.join(missing)}) and try again"
        )
    by_hand = f"install {' '.join(missing)} by hand and try again"
    env = environment(DEBIAN_FRONTEND="noninteractive")
    with progress.step(f"Installing {', '.join(missing)} with apt-get", expected_s=30):
        for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *missing]):
            log = cache_dir() / "logs" / f"apt-{command[0]}.log"
            run_logged(["apt-get", *command], log, what=f"apt-get {command[0]}", hint=by_hand, env=env)
    if still := missing_packages():
        raise LocalClusterError(f"apt-get succeeded, but {', '.join(PROOFS[p] for p in still)} is missing; {by_hand}")
