"""What the processes of a pod share about their lives and deaths."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import zmq

from kimi_worker.logs import configure_logs
from kimi_worker.server.private_logs import frames, places

log = structlog.get_logger()

PR_SET_PDEATHSIG = 1
CONSEQUENCES = frozenset({"CollectiveError", "GroupLostError"})
"""Errors of a process that is sound itself: another one has left it."""
_ABOUT_THE_MACHINE = (OSError, RuntimeError, MemoryError, ImportError, zmq.ZMQError)
"""Errors of files, addresses and memory; torch tells of a device by RuntimeError."""


class LastWords(msgspec.Struct, frozen=True):
    """Why a process has ended."""

    message: str
    is_consequence: bool


def read_last_words(run_dir: Path) -> list[LastWords]:
    """What the processes of the pod have said so far, in order."""
    files = sorted(run_dir.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    return [msgspec.json.decode(file.read_bytes(), type=LastWords) for file in files]


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, of the given pid, dies; at once when it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the parent process {parent} is gone")


def run_child(process: str, run_dir: Path, name: str, body: Callable[[], None]) -> None:
    """Run a child process's work. An error ends the process at once, with its message where the supervisor finds it.

    `process` names it in files and in `ps`; `name` is for people, such as `rank 3`.
    """
    Path("/proc/self/comm").write_text(f"kimi-{process}")
    try:
        body()
    except Exception as error:  # noqa: BLE001 - the edge of the process
        _leave(run_dir, process, LastWords(f"{name}: {told(error)}", type(error).__name__ in CONSEQUENCES))
        log.error("process_failed", process=process, errors=places(error))
        sys.stderr.flush()
        # Destructors of collectives and transports may wait for peers that are gone.
        os._exit(1)


def fork_child(process: str, run_dir: Path, name: str, body: Callable[[], None]) -> int:
    """Run a child's work in a copy of this process, which must have no threads; the copy's pid."""
    parent = os.getpid()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with(parent)
        configure_logs(process)
        run_child(process, run_dir, name, body)
    finally:
        os._exit(1)


def wait_for_first(names: dict[int, str], run_dir: Path, collectives: str) -> None:
    """Wait until one of the forked children, by pid, has ended; leaves last words for one that could not.

    With `collectives` nccl a watchdog thread of the library aborts a rank whose peer is gone: a consequence, then.
    """
    pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        process = names[pid].replace(" ", "-")
        is_consequence = collectives == "nccl" and -code == signal.SIGABRT
        _leave(run_dir, process, LastWords(f"{names[pid]}: killed by {signal.Signals(-code).name}", is_consequence))


def told(error: Exception) -> str:
    """An error for the pod's termination message, which anybody may read who sees the pod.

    In its own words where they are about the machine or say what to do; those of a bug may quote a prompt, so that only
    its place is told.
    """
    kind = type(error).__name__
    is_ours = type(error).__module__.split(".")[0] in ("kimi_worker", "kimi_kernels")
    if is_ours or isinstance(error, _ABOUT_THE_MACHINE):
        return f"{kind}: {error}"
    return f"{kind} at {frames(error)[-1]}"


def _leave(run_dir: Path, process: str, words: LastWords) -> None:
    unfinished = run_dir / f".{process}"
    unfinished.write_bytes(msgspec.json.encode(words))
    unfinished.rename(run_dir / f"{process}.error")
