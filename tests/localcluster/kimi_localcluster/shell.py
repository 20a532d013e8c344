"""Running short programs and turning their failures into errors with the output inside."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from kimi_localcluster.errors import CommandError, LocalClusterError, tail

# New namespaces whose first process, a child of unshare, dies with it and takes all others in them along.
UNSHARE = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def run(
    argv: list[str], *, stdin: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 60
) -> str:
    """Standard output of a program. Raises CommandError with its output, or LocalClusterError if it is missing."""
    try:
        done = subprocess.run(
            argv, input=stdin, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise LocalClusterError(f"program {argv[0]} not found; `localcluster up` installs what is missing") from None
    except subprocess.TimeoutExpired:
        raise LocalClusterError(f"`{' '.join(argv)}` did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise CommandError(argv, done.returncode, done.stderr + done.stdout)
    return done.stdout


def ip_batch(commands: list[str]) -> None:
    """Several `ip` commands in one call; the first that fails ends it."""
    run(["ip", "-batch", "-"], stdin="\n".join(commands) + "\n")


@contextmanager
def file_lock(path: Path, while_waiting: Callable[[], AbstractContextManager[object]] = nullcontext) -> Iterator[None]:
    """Hold an exclusive lock on a file, across processes; `while_waiting` surrounds a wait for another holder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with while_waiting():
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_logged(
    argv: list[str], log: Path, *, what: str, hint: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Run a long program with its output in a log file; it and its children end when this process does.

    Raises LocalClusterError that names `what` failed, the log with its last lines, and the `hint`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *argv],
            cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0,
        )  # fmt: skip
        try:
            process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        raise LocalClusterError(
            f"{what} failed: `{' '.join(argv)}` ended with status {process.returncode}; log {log}:\n{tail(log)}\n{hint}"
        )
