"""First process of a process namespace: starts daemons, restarts what dies, reaps orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kimi_localcluster.errors import CommandError

FIRST_RESTART_DELAY_S = 0.2
LONGEST_RESTART_DELAY_S = 5.0
# A daemon that ran this long starts with the first delay again.
STEADY_AFTER_S = 30.0


@dataclass(slots=True)
class Daemon:
    """A program that should run until it is stopped."""

    name: str
    argv: list[str]
    log: Path
    restart: bool = True
    wanted: bool = True
    process: subprocess.Popen[bytes] | None = None
    num_restarts: int = 0
    delay_s: float = FIRST_RESTART_DELAY_S
    started_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> str:
        if self.process is not None:
            return "running"
        return "restarting" if self.wanted and self.restart else "stopped"


class Init:
    """Owner of all child processes of this namespace. Lives in one event loop."""

    def __init__(self, logs: Path, on_exit: Callable[[Daemon, int], None]) -> None:
        self._logs = logs
        self._on_exit = on_exit
        self._daemons: dict[str, Daemon] = {}
        self._by_pid: dict[int, Daemon] = {}
        self._commands: dict[int, asyncio.Future[int]] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    @property
    def daemons(self) -> dict[str, Daemon]:
        return self._daemons

    def start(self, name: str, argv: list[str], *, restart: bool = True) -> Daemon:
        """Start a daemon with its output in NAME.log. `restart` starts it again whenever it ends."""
        daemon = Daemon(name, argv, self._logs / f"{name}.log", restart)
        daemon.log.parent.mkdir(parents=True, exist_ok=True)
        self._daemons[name] = daemon
        self._spawn(daemon)
        return daemon

    def resume(self, name: str) -> None:
        """Start a stopped daemon again; no effect on one that runs."""
        daemon = self._daemons[name]
        daemon.wanted, daemon.delay_s = True, FIRST_RESTART_DELAY_S
        if daemon.process is None:
            self._spawn(daemon)

    async def stop(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a daemon and keep it down."""
        daemon = self._daemons[name]
        daemon.wanted = False
        if daemon.process is not None:
            os.kill(daemon.process.pid, how)
            await daemon.ended.wait()

    async def run(self, argv: list[str], *, stdin: str = "") -> str:
        """Output of a short program, without blocking the loop. Raises CommandError."""
        output_fd = os.memfd_create("output")
        input_fd = os.memfd_create("input")
        os.write(input_fd, stdin.encode())
        os.lseek(input_fd, 0, os.SEEK_SET)
        try:
            # asyncio's own child watcher would compete with `_reap` for the exit status.
            process = subprocess.Popen(argv, stdin=input_fd, stdout=output_fd, stderr=output_fd)  # noqa: ASYNC220
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._commands[process.pid] = future
            process.returncode = await future
            output = os.pread(output_fd, os.fstat(output_fd).st_size, 0).decode(errors="replace")
        finally:
            os.close(output_fd)
            os.close(input_fd)
        if process.returncode != 0:
            raise CommandError(argv, process.returncode, output)
        return output

    def _spawn(self, daemon: Daemon) -> None:
        if not daemon.wanted or daemon.process is not None:
            return
        with daemon.log.open("ab") as log:
            daemon.process = subprocess.Popen(
                daemon.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        daemon.started_s = time.monotonic()
        daemon.ended.clear()
        self._by_pid[daemon.process.pid] = daemon

    def _reap(self) -> None:
        """Collect all ended children, orphans included: nobody else in this namespace does."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if daemon := self._by_pid.pop(pid, None):
                self._ended(daemon, code)
            elif future := self._commands.pop(pid, None):
                future.set_result(code)

    def _ended(self, daemon: Daemon, code: int) -> None:
        assert daemon.process is not None
        daemon.process.returncode = code
        daemon.process = None
        daemon.ended.set()
        if daemon.wanted:
            self._on_exit(daemon, code)
        if not (daemon.wanted and daemon.restart):
            return
        daemon.num_restarts += 1
        steady = time.monotonic() - daemon.started_s > STEADY_AFTER_S
        delay_s = FIRST_RESTART_DELAY_S if steady else daemon.delay_s
        daemon.delay_s = min(2 * delay_s, LONGEST_RESTART_DELAY_S)
        asyncio.get_running_loop().call_later(delay_s, self._spawn, daemon)
