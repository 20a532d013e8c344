"""The Python environment that pods run in, built by uv into the user's cache.

Two layers. The first holds the locked third-party packages, compiled, and changes only with uv.lock. The second is a
small virtual environment with the project's own packages, which reads the first by a .pth file; a change of the
project's code rebuilds only that one, within seconds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from kimi_localcluster.errors import LocalClusterError
from kimi_localcluster.paths import cache_dir, environment, repository, uv
from kimi_localcluster.progress import Progress
from kimi_localcluster.shell import file_lock, run_logged

MEMBERS = ("kernels", "operator", "worker")
NOT_SOURCE = {"__pycache__", "dist", "build", ".venv"}
KEEP_RECENT = 6
HIDDEN = (Path("/tmp"), Path("/run"))
"""Pods mount folders of their own here, so that what lies below on the machine cannot be seen in them."""


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """A finished environment: `path` is its value for PATH, `mounts` is what a container must see."""

    path: str
    mounts: tuple[Path, ...]


def pods_dir() -> Path:
    return cache_dir() / "pods"


def check_place() -> None:
    """Raise LocalClusterError when pods could not see their environment: to be asked before anything is built."""
    for hidden in HIDDEN:
        if pods_dir().resolve().is_relative_to(hidden):
            raise LocalClusterError(
                f"the cache {cache_dir()} lies below {hidden}, where pods mount a folder of their own and cannot see "
                "it; set XDG_CACHE_HOME (or HOME) to a folder elsewhere"
            )


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def source_files(root: Path) -> list[Path]:
    """The project files that end up in pods, in a fixed order."""
    return sorted(
        file
        for member in MEMBERS
        for file in (root / member).rglob("*")
        if file.is_file() and not NOT_SOURCE.intersection(file.relative_to(root).parts)
    )


def _content(file: Path) -> bytes:
    """Empty for a file that vanished since it was listed: somebody edits the checkout."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def ensure_pod_environment(progress: Progress) -> PodEnvironment:
    """Build what is missing of the environment for the checkout's present state."""
    root = repository()
    lock_key = _digest((root / "uv.lock").read_bytes(), sys.version.encode(), sys.base_prefix.encode())
    sources = [part for file in source_files(root) for part in (str(file.relative_to(root)).encode(), _content(file))]
    packages = pods_dir() / lock_key / "venv"
    code = pods_dir() / _digest(lock_key.encode(), *sources) / "venv"

    def show_waiting() -> AbstractContextManager[object]:
        return progress.step("Waiting for another build of the pods' environment")

    with file_lock(pods_dir() / "build.lock", while_waiting=show_waiting):
        if not _finished(packages).exists():
            with progress.step("Installing the pods' Python packages", expected_s=60):
                _install_packages(packages, root)
        if not _finished(code).exists():
            with progress.step("Installing the project's code for the pods", expected_s=5):
                _install_code(code, packages, root)
        for folder in (packages, code):
            os.utime(folder.parent)
    return PodEnvironment(f"{code}/bin:{packages}/bin", (*_python_homes(packages), pods_dir()))


def remove_old(in_use: set[str]) -> None:
    """Delete environments that no cluster uses, but keep the most recent ones; `in_use` holds their PATH values."""
    with file_lock(pods_dir() / "build.lock"):
        folders = [path for path in pods_dir().iterdir() if path.is_dir()]
        folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for folder in folders[KEEP_RECENT:]:
            if not any(str(folder) in path for path in in_use):
                shutil.rmtree(folder)


def _install_packages(venv: Path, root: Path) -> None:
    """Everything that uv.lock pins for the operator and the worker, without the project's own packages.

    Pods see it read-only, so it is compiled here once: otherwise each start would compile torch anew.
    """
    shutil.rmtree(venv, ignore_errors=True)
    selection = ["--package", "kimi-operator", "--package", "kimi-worker", "--extra", "nixl"]
    argv = [uv(), "sync", "--frozen", "--no-dev", "--no-install-workspace", "--compile-bytecode", *selection]
    env = environment(UV_PROJECT_ENVIRONMENT=str(venv), UV_PYTHON=sys.executable, UV_LINK_MODE="hardlink")
    _run_uv(argv, "packages", root, env)
    _finished(venv).touch()


def _install_code(venv: Path, packages: Path, root: Path) -> None:
    """A virtual environment with the project's packages, which also sees those of `packages`."""
    shutil.rmtree(venv, ignore_errors=True)
    env = environment(UV_LINK_MODE="copy")
    _run_uv([uv(), "venv", "--python", str(packages / "bin" / "python"), str(venv)], "venv", root, env)
    # Without a refresh uv would install the wheel it built before the code changed.
    members = [argument for member in MEMBERS for argument in ("--refresh-package", f"kimi-{member}", f"./{member}")]
    argv = [
        uv(),
        "pip",
        "install",
        "--no-deps",
        "--compile-bytecode",
        "--python",
        str(venv / "bin" / "python"),
        *members,
    ]
    _run_uv(argv, "code", root, env)
    (site,) = venv.glob("lib/python3*/site-packages")
    third_party = packages / site.relative_to(venv)
    (site / "packages.pth").write_text(f"import site; site.addsitedir({str(third_party)!r})\n")
    _finished(venv).touch()


def _python_homes(packages: Path) -> list[Path]:
    """Folders that the environment's interpreter lives in, as the links to it name them; /usr is there anyway."""
    link = packages / "bin" / "python"
    homes = [link.readlink().parent.parent, link.resolve().parent.parent]
    return [home for home in dict.fromkeys(homes) if not home.is_relative_to("/usr")]


def _finished(venv: Path) -> Path:
    """Marks a whole environment. It cannot be built elsewhere and moved: its scripts hold its own path."""
    return venv.parent / "finished"


def _run_uv(argv: list[str], what: str, root: Path, env: dict[str, str]) -> None:
    log = cache_dir() / "logs" / f"pods-{what}.log"
    hint = "check that the Python package index is reachable and that the disk has room, then try again"
    run_logged(argv, log, what=f"building the pods' environment ({what})", hint=hint, cwd=root, env=env)
