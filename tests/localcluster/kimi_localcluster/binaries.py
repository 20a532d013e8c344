"""Kubernetes' own programs, built from locked Go modules into the user's cache.

Each module under `go/` locks versions and checksums in go.mod and go.sum. A program is built once for each combination
of module files, flags and Go version; later runs find it in the cache.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from kimi_localcluster.errors import LocalClusterError
from kimi_localcluster.paths import cache_dir, environment, go_modules, kubebuilder_assets
from kimi_localcluster.progress import Progress
from kimi_localcluster.shell import file_lock, run, run_logged

KUBERNETES_VERSION = "v1.35.4"
STRIP = "-s -w"
KUBERNETES_LDFLAGS = (
    f"{STRIP} -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}"
    " -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=35"
)
HELM_LDFLAGS = f"{STRIP} -X helm.sh/helm/v4/internal/version.version=v4.3.2"


@dataclass(frozen=True, slots=True)
class Program:
    """One program: the Go module that locks it, its package, and its cold build time on two cores."""

    name: str
    module: str
    package: str
    expected_s: float
    ldflags: str = STRIP


PROGRAMS = {
    program.name: program
    for program in (
        # The first one compiles what the other Kubernetes programs share.
        *(
            Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", expected_s, KUBERNETES_LDFLAGS)
            for name, expected_s in (
                ("kube-apiserver", 330),
                ("kube-controller-manager", 75),
                ("kube-scheduler", 10),
                ("kubelet", 25),
                ("kube-proxy", 15),
                ("kubectl", 35),
            )
        ),
        Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", 45),
        Program("coredns", "coredns", ".", 130),
        Program("helm", "helm", "helm.sh/helm/v4/cmd/helm", 170, HELM_LDFLAGS),
        Program("pause", "pause", ".", 5),
        Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", 120),
    )
}
# kwok is for scale tests alone and is built when it is asked for.
DEFAULT_PROGRAMS = tuple(name for name in PROGRAMS if name != "kwok")


def go_version() -> str:
    """Version line of the Go toolchain. Raises LocalClusterError without one."""
    if not shutil.which("go"):
        raise LocalClusterError(
            "go is not on PATH; install Go 1.26 or later from https://go.dev/dl, "
            "or set KUBEBUILDER_ASSETS and put the other programs on it"
        )
    return run(["go", "version"]).strip()


def cache_path(program: Program, version: str) -> Path:
    """Where the built program lies for these module files, flags and Go version."""
    digest = hashlib.sha256(f"{version}\n{program.ldflags}\n".encode())
    module = go_modules() / program.module
    for file in sorted([module / "go.mod", module / "go.sum", *module.glob("*.go")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return cache_dir() / "bin" / digest.hexdigest()[:16] / program.name


def find(name: str) -> Path | None:
    """A ready program: from KUBEBUILDER_ASSETS, else from the cache, else None."""
    assets = kubebuilder_assets()
    if assets and (assets / name).exists():
        return assets / name
    built = cache_path(PROGRAMS[name], go_version())
    return built if built.exists() else None


def ensure_programs(names: tuple[str, ...], progress: Progress) -> dict[str, Path]:
    """Find or build the named programs, one after another; returns where each one lies."""
    if unknown := [name for name in names if name not in PROGRAMS]:
        raise LocalClusterError(f"unknown program {unknown[0]!r}; known: {', '.join(PROGRAMS)}")

    if any(find(name) is None for name in names):
        _build_missing(names, progress)
    return {name: path for name in names if (path := find(name))}


def _build_missing(names: tuple[str, ...], progress: Progress) -> None:
    def show_waiting() -> AbstractContextManager[object]:
        return progress.step("Waiting for another build of the cluster's programs")

    with file_lock(cache_dir() / "bin" / "build.lock", while_waiting=show_waiting):
        missing = [name for name in names if find(name) is None]
        for position, name in enumerate(missing, start=1):
            _build(PROGRAMS[name], f"{position} of {len(missing)}", progress)


def _build(program: Program, position: str, progress: Progress) -> None:
    target = cache_path(program, go_version())
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    module = go_modules() / program.module
    with progress.step(f"Building {program.name} ({position})", expected_s=program.expected_s):
        run_logged(
            ["go", "build", "-trimpath", "-ldflags", program.ldflags, "-o", str(partial), program.package],
            cache_dir() / "logs" / f"build-{program.name}.log",
            what=f"building {program.name} from {module}",
            hint="check that the module proxy is reachable (go env GOPROXY) and that the disk has room, then try again",
            cwd=module,
            env=environment(CGO_ENABLED="0"),
        )
    partial.rename(target)
