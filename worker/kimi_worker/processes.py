"""What the processes of a pod share about their lives and deaths."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

log = structlog.get_logger()

PR_SET_PDEATHSIG = 1
CONSEQUENCES = frozenset({"CollectiveError", "GroupLostError"})
"""Errors of a process that is sound itself: another one has left it."""


class LastWords(msgspec.Struct, frozen=True):
    """Why a process has ended."""

    message: str
    is_consequence: bool


def last_words_file(run_dir: Path, process: str) -> Path:
    """Where a process leaves its LastWords, as JSON."""
    return run_dir / f"{process}.error"


def read_last_words(run_dir: Path, process: str) -> LastWords | None:
    """What the process has said, if it could."""
    try:
        return msgspec.json.decode(last_words_file(run_dir, process).read_bytes(), type=LastWords)
    except (OSError, msgspec.DecodeError):
        return None


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, of the given pid, dies; at once when it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the parent process {parent} is gone")


def run_child(process: str, run_dir: Path, name: str, body: Callable[[], None]) -> None:
    """Run a child process's work. An error ends the process at once, with its message where the supervisor finds it.

    `name` is how an operator on call knows the process, such as `rank 3`.
    """
    try:
        body()
    except Exception as error:  # noqa: BLE001 - the edge of the process
        kind = type(error).__name__
        words = LastWords(f"{name}: {kind}: {error}", kind in CONSEQUENCES)
        unfinished = last_words_file(run_dir, f".{process}")
        unfinished.write_bytes(msgspec.json.encode(words))
        unfinished.rename(last_words_file(run_dir, process))
        log.error("process_failed", error=words.message, traceback=traceback.format_exc())
        sys.stderr.flush()
        # Destructors of collectives and transports may wait for peers that are gone.
        os._exit(1)
