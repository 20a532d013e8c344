"""Mounts inside a cluster's own mount namespaces; they end with the namespace."""

from __future__ import annotations

from pathlib import Path

from kimi_localcluster.shell import run


def mount_tmpfs(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(target)])


def bind(source: Path, target: Path) -> None:
    """Show a folder at another place; both are made if missing."""
    for folder in (source, target):
        folder.mkdir(parents=True, exist_ok=True)
    run(["mount", "--bind", str(source), str(target)])


def show_folder(source: Path, target: Path) -> None:
    """Bind a folder read-only to a path that need not exist, without making it on the machine's own disk."""
    if not target.exists():
        # An empty tmpfs over the nearest folder that exists holds the mount point; it hides that folder on the node.
        mount_tmpfs(next(parent for parent in target.parents if parent.exists()))
        target.mkdir(parents=True)
    run(["mount", "--bind", str(source), str(target)])
    run(["mount", "-o", "remount,bind,ro", str(target)])


def bind_resolv_conf(source: Path) -> None:
    """Give this namespace its own /etc/resolv.conf, also where that is a link into an emptied /run."""
    target = Path("/etc/resolv.conf").resolve()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    run(["mount", "--bind", str(source), str(target)])


def is_overlay(path: Path) -> bool:
    """Whether a folder lies on overlayfs, which cannot carry another overlay."""
    return run(["stat", "-f", "-c", "%T", str(path)]).strip() == "overlayfs"
