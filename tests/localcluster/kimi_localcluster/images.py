"""Container images without a builder or a registry.

An image here is a tar of empty mount points, a few tens of kilobytes. What a container runs comes from the machine
itself: containerd's base runtime spec binds /usr, the Python home and the pods' environments read-only into every
container, so manifests need nothing of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kimi_localcluster.shell import run

NONROOT_ID = 65532
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
LOADER_CACHE = Path("/etc/ld.so.cache")
READ_ONLY_HOST_PATHS = ("/usr", "/etc/ssl", "/etc/alternatives")
EMPTY_FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "sys", "usr", "var", "var/lib", "var/log")
OPEN_FOLDERS = ("tmp", "var/tmp")
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "var/run": "/run"}
FILES = {
    "etc/passwd": f"root:x:0:0::/root:/bin/sh\nnonroot:x:{NONROOT_ID}:{NONROOT_ID}::/home/nonroot:/bin/sh\n",
    "etc/group": f"root:x:0:\nnonroot:x:{NONROOT_ID}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


@dataclass(frozen=True, slots=True)
class Image:
    """Configuration of one image over a layer of mount points."""

    names: tuple[str, ...]
    command: tuple[str, ...]
    path: str
    """Value of PATH inside."""
    program: Path | None = None
    """A static program to carry at its own name in /."""


def write_images(target: Path, images: Iterable[Image], mounts: Iterable[Path]) -> None:
    """Write a docker-archive with the images, for `ctr images import`; `mounts` get mount points with all parents."""
    mounts = tuple(mounts)
    files = {}
    manifest = []
    for image in images:
        layer = _layer(mounts, image.program)
        layer_digest = hashlib.sha256(layer).hexdigest()
        files[f"{layer_digest}/layer.tar"] = layer
        config = _config(image, layer_digest)
        config_name = f"{hashlib.sha256(config).hexdigest()}.json"
        files[config_name] = config
        manifest.append({"Config": config_name, "RepoTags": list(image.names), "Layers": [f"{layer_digest}/layer.tar"]})
    files["manifest.json"] = json.dumps(manifest).encode()
    with tarfile.open(target, "w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def _layer(mounts: Iterable[Path], program: Path | None) -> bytes:
    """Folders are world-readable whatever the machine's own are, so that any user reaches what is mounted there."""
    folders = dict.fromkeys(EMPTY_FOLDERS, 0o755) | dict.fromkeys(OPEN_FOLDERS, 0o1777)
    for mount in mounts:
        for path in (*reversed(mount.parents), mount):
            folders.setdefault(str(path).strip("/"), 0o755)
    folders.pop("", None)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, mode in folders.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        home = tarfile.TarInfo("home/nonroot")
        home.type, home.mode, home.uid, home.gid = tarfile.DIRTYPE, 0o755, NONROOT_ID, NONROOT_ID
        archive.addfile(home)
        for name, destination in LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, destination
            archive.addfile(entry)
        for name, text in FILES.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
        # Without the loader's cache, ctypes.util.find_library starts a C compiler, if there is one, for each look-up.
        if LOADER_CACHE.exists():
            archive.add(LOADER_CACHE, str(LOADER_CACHE).strip("/"))
        if program:
            archive.add(program.resolve(), program.name)
    return buffer.getvalue()


def _config(image: Image, layer_digest: str) -> bytes:
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": {"Cmd": list(image.command), "Env": [f"PATH={image.path}"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        "history": [{"created_by": "kimi-localcluster"}],
    }
    return json.dumps(config).encode()


def write_base_spec(target: Path, mounts: Iterable[Path]) -> None:
    """Write containerd's base runtime spec: its default one plus read-only binds of the machine's own folders."""
    spec = json.loads(run(["ctr", "oci", "spec"]))
    # Its limit of 1024 open files is too small for a server; without it, containers inherit containerd's.
    spec["process"].pop("rlimits", None)
    for mount in mounts:
        spec["mounts"].append(
            {"destination": str(mount), "type": "bind", "source": str(mount), "options": ["rbind", "ro"]}
        )
    target.write_text(json.dumps(spec, indent=1))
