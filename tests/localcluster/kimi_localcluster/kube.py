"""kubectl and helm against a cluster, and waiting for conditions; the same for a local and for an existing one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kimi_localcluster.errors import CommandError, LocalClusterError, WaitTimeoutError
from kimi_localcluster.progress import Step

T = TypeVar("T")
Manifest = Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | Path
POLL_S = 0.3


class Kube(ABC):
    """A cluster that can be talked to."""

    doing: Step | None = None
    """What a caller waits for now."""

    @abstractmethod
    def command(self, argv: Sequence[str], node: int | None = None) -> list[str]:
        """The command line that runs `argv` where the cluster is reachable, or on one of its nodes."""

    @abstractmethod
    def command_env(self) -> dict[str, str]:
        """Environment for such commands: KUBECONFIG, and PATH with the cluster's programs."""

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Name what goes on while the block runs, unless it is part of a step that has a name."""
        if self.doing:
            yield
            return
        self.doing = Step(what, None)
        try:
            yield
        finally:
            self.doing = None

    def popen(self, argv: Sequence[str], *, node: int | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a command there; `options` are those of subprocess.Popen. End it with `end_process`.

        It leads a process group of its own, since the entry into the namespaces puts a process in between.
        """
        env = {**self.command_env(), **options.pop("env", {})}
        return subprocess.Popen(self.command(argv, node), env=env, process_group=0, **options)

    def exec(
        self,
        argv: Sequence[str],
        *,
        node: int | None = None,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command there and return its captured output. Raises CommandError (unless check=False)."""
        pipe = subprocess.PIPE
        process = self.popen(argv, node=node, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=dict(env or {}))
        try:
            with self.step(f"running {' '.join(argv)}"):
                out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise LocalClusterError(f"`{' '.join(argv)}` did not end within {timeout_s:g} s") from None
        finally:
            end_process(process)
        if check and process.returncode != 0:
            raise CommandError(list(argv), process.returncode, err + out)
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def kubectl(self, *args: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Standard output of kubectl. Raises CommandError with its error output."""
        return self.exec(["kubectl", *args], stdin=stdin, timeout_s=timeout_s).stdout

    def helm(self, *args: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """Standard output of helm. Raises CommandError with its error output."""
        return self.exec(["helm", *args], stdin=stdin, timeout_s=timeout_s).stdout

    def get(self, resource: str, name: str | None = None, *, namespace: str | None = None, selector: str = "") -> Any:
        """One object, or a list of objects when no name is given, as kubectl's JSON. `namespace="*"` means all."""
        args = ["get", resource, *([name] if name else []), "-o", "json", *_namespace(namespace)]
        if selector:
            args += ["-l", selector]
        parsed = json.loads(self.kubectl(*args))
        return parsed if name else parsed["items"]

    def find(self, resource: str, name: str, *, namespace: str | None = None) -> Any | None:
        """One object, or None when it does not exist."""
        try:
            return self.get(resource, name, namespace=namespace)
        except CommandError as error:
            if "NotFound" in error.output:
                return None
            raise

    def apply(self, manifest: Manifest, *, namespace: str | None = None) -> str:
        """Server-side apply of a mapping, a list of them, YAML text, or a file or folder."""
        args = ["apply", "--server-side", *_namespace(namespace), "-f"]
        if isinstance(manifest, Path):
            return self.kubectl(*args, str(manifest))
        return self.kubectl(*args, "-", stdin=_to_yaml(manifest))

    def delete(self, manifest: Manifest, *, namespace: str | None = None, timeout_s: float = 60) -> str:
        """Delete what a manifest names and wait until it is gone; absent objects are fine."""
        args = ["delete", "--ignore-not-found", f"--timeout={timeout_s:g}s", *_namespace(namespace), "-f"]
        if isinstance(manifest, Path):
            return self.kubectl(*args, str(manifest), timeout_s=timeout_s + 10)
        return self.kubectl(*args, "-", stdin=_to_yaml(manifest), timeout_s=timeout_s + 10)

    def wait(self, resource: str, condition: str, *, namespace: str | None = None, timeout_s: float = 120) -> None:
        """`kubectl wait`: for example wait("pod/a", "condition=Ready") or wait("pod/a", "delete")."""
        args = ["wait", resource, f"--for={condition}", f"--timeout={timeout_s:g}s", *_namespace(namespace)]
        try:
            self.kubectl(*args, timeout_s=timeout_s + 10)
        except CommandError as error:
            if "timed out" not in error.output:
                raise
            raise WaitTimeoutError(
                f"{resource}: {condition} not seen within {timeout_s:g} s: {error.output}"
            ) from error

    def wait_for(self, what: str, probe: Callable[[], T | None], *, timeout_s: float = 120) -> T:
        """Call `probe` until it returns something true, and return that.

        A CommandError inside the probe counts as "not yet". Raises WaitTimeoutError that says `what` was awaited and
        what the probe last returned or raised.
        """
        with self.step(f"waiting for {what}"):
            return self._wait_for(what, probe, timeout_s)

    def _wait_for(self, what: str, probe: Callable[[], T | None], timeout_s: float) -> T:
        deadline = time.monotonic() + timeout_s
        while True:
            last: object
            try:
                result = probe()
                if result:
                    return result
                last = result
            except CommandError as error:
                last = error
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"{what}: not seen within {timeout_s:g} s; last look: {last}")
            time.sleep(POLL_S)

    def is_node_ready(self, name: str) -> bool:
        conditions = self.get("node", name)["status"].get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def end_process(process: subprocess.Popen[Any]) -> None:
    """End a command that `popen` started, with everything in its process group; no effect once it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()


def _namespace(namespace: str | None) -> list[str]:
    if namespace == "*":
        return ["--all-namespaces"]
    return ["--namespace", namespace] if namespace else []


def _to_yaml(manifest: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str) -> str:
    if isinstance(manifest, str):
        return manifest
    objects = [manifest] if isinstance(manifest, Mapping) else manifest
    return yaml.safe_dump_all([dict(item) for item in objects], sort_keys=False)
