"""What can go wrong with the local cluster, said so that the reader knows what to do."""

from __future__ import annotations

from pathlib import Path


class LocalClusterError(Exception):
    """A failure that the person at the prompt must act on: which step, what was seen, what to do."""


class CommandError(LocalClusterError):
    """A program ended with an exit status other than zero."""

    def __init__(self, argv: list[str], returncode: int, output: str) -> None:
        self.argv = argv
        self.returncode = returncode
        self.output = output
        super().__init__(f"`{' '.join(argv)}` ended with status {returncode}: {output.strip() or '(no output)'}")


class WaitTimeoutError(LocalClusterError):
    """A condition did not become true before its deadline."""


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log file, indented for use inside an error message."""
    if not log.exists():
        return f"  (no log at {log})"
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(f"  {line[:400]}" for line in text) or "  (the log is empty)"
