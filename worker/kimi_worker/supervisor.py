"""Process 1 of a worker pod: starts the ranks and the API process, and ends all of them when one ends.

A group's collectives cannot be resumed, so nothing is restarted here: the pod says why it ends, and the operator
replaces the whole group. Children are killed by the kernel when this process dies.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import zmq

from kimi_worker.discovery import PeerDiscovery
from kimi_worker.processes import read_last_words, told
from kimi_worker.protocol.engine import Drain, FromEngine, LaneState, ToEngine, Verify, Watch, api_socket
from kimi_worker.settings import PodIdentity, Role, WorkerSettings, child_environment

log = structlog.get_logger()

BLAME_S = 0.3
"""After a process has failed: time for the one that caused it to say so."""
STATE_GRACE_S = 5.0
"""After a signal: for lanes to say that they serve. A pod whose lanes do not has nothing to drain."""
API_GRACE_S = 10.0
"""For the API process to send what it still has, once the lanes are empty."""
MAX_MESSAGE_BYTES = 4000
"""Kubernetes keeps 4096 bytes of a termination message."""


class PodFailedError(Exception):
    """A process of the pod has ended; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that this one has started: `ranks`, from which the ranks are forked, or `api`."""

    process: str
    popen: "subprocess.Popen[bytes]"
    pidfd: int


class LaneStates:
    """What the pod's lanes have said of themselves."""

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self._states: dict[int, LaneState] = {}
        self.have_served = False
        """Whether the group had assembled, so that it drains as a whole. Lanes say so themselves: on a busy machine the
        first that is heard of them may be that they drain."""

    def take(self, lane: int, state: LaneState) -> None:
        self._states[lane] = state
        is_complete = len(self._states) == self._num_lanes
        self.have_served |= is_complete and all(state.assembled for state in self._states.values())

    @property
    def are_drained(self) -> bool:
        return all(state.drained for state in self._states.values())

    @property
    def num_left(self) -> int:
        """Requests under way."""
        return sum(state.running + state.waiting + state.reserved for state in self._states.values())


class Supervisor:
    """Owns the pod's processes from `run` until it returns."""

    def __init__(self, settings: WorkerSettings, identity: PodIdentity, settings_path: Path) -> None:
        self._settings = settings
        self._identity = identity
        self._settings_path = settings_path
        self._children: list[Child] = []
        self._states = LaneStates(settings.parallel.lanes_per_node)
        self._told = 0.0
        """When the first signal to end came."""
        self._drain_until: float | None = None
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._lanes: list[zmq.Socket[bytes]] = []
        self._discovery: PeerDiscovery | None = None
        self._signals, signal_writer = socket.socketpair()
        self._signals.setblocking(False)
        signal_writer.setblocking(False)
        signal.set_wakeup_fd(signal_writer.fileno())
        self._signal_writer = signal_writer
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._poller.register(self._signals, zmq.POLLIN)

    def run(self) -> None:
        """Start everything and return once the pod has been told to end and is drained. Raises PodFailedError."""
        try:
            self._start()
            while not self._is_over():
                self._poller.poll(self._wait_ms())
                self._take_signals()
                self._take_states()
                self._take_peers()
                self._check_children()
            self._end_api()
        finally:
            if self._discovery is not None:
                self._discovery.close()
            self._kill_all()
            self._context.destroy(linger=0)

    def _start(self) -> None:
        self._spawn("ranks")
        self._spawn("api")
        for lane in range(self._settings.parallel.lanes_per_node):
            link = self._context.socket(zmq.DEALER)
            link.connect(api_socket(self._identity.run_dir, lane))
            link.send(_encode(Watch()))
            self._poller.register(link, zmq.POLLIN)
            self._lanes.append(link)
        peers = self._settings.handoff.peers
        if self._settings.role is Role.DECODE and peers.service:
            self._discovery = PeerDiscovery(peers)
            self._poller.register(self._discovery.socket, zmq.POLLIN)

    def _spawn(self, process: str) -> None:
        command = [sys.executable, "-P", "-m", "kimi_worker", process, "--parent", str(os.getpid())]
        popen = subprocess.Popen(
            [*command, "--settings", str(self._settings_path)],
            env=child_environment(self._settings, self._identity),
            stdin=subprocess.DEVNULL,
            # A session of its own: a signal to the terminal or the group of this process is not for the children.
            start_new_session=True,
        )
        pidfd = os.pidfd_open(popen.pid)
        self._children.append(Child(process, popen, pidfd))
        self._poller.register(pidfd, zmq.POLLIN)

    def _is_over(self) -> bool:
        """Whether the pod was told to end and no lane of its group has anything left to do."""
        if self._drain_until is None:
            return False
        if not self._states.have_served:
            # Nothing was ever admitted, and lanes of a group that never assembles do not drain either.
            return time.monotonic() >= self._told + STATE_GRACE_S
        return self._states.are_drained

    def _wait_ms(self) -> int | None:
        if self._drain_until is None:
            return None
        until = self._drain_until if self._states.have_served else min(self._drain_until, self._told + STATE_GRACE_S)
        return max(0, math.ceil((until - time.monotonic()) * 1000))

    def _take_signals(self) -> None:
        try:
            numbers = self._signals.recv(64)
        except BlockingIOError:
            numbers = b""
        for number in numbers:
            if self._drain_until is not None:
                raise PodFailedError(f"told to end twice (the second time by {signal.Signals(number).name})")
            log.info("pod_draining", signal=signal.Signals(number).name, seconds=self._settings.timeouts.drain_s)
            self._told = time.monotonic()
            self._drain_until = self._told + self._settings.timeouts.drain_s
            for link in self._lanes:
                link.send(_encode(Drain()))
        if self._drain_until is not None and time.monotonic() >= self._drain_until and not self._is_over():
            left = self._states.num_left
            raise PodFailedError(f"{left} requests were still under way after {self._settings.timeouts.drain_s:g} s")

    def _take_states(self) -> None:
        had_served = self._states.have_served
        for lane, link in enumerate(self._lanes):
            while link.poll(0):
                message = msgspec.msgpack.decode(link.recv(), type=FromEngine)
                assert isinstance(message, LaneState)
                self._states.take(lane, message)
        if self._states.have_served and not had_served:
            log.info("pod_ready", lanes=len(self._lanes))

    def _take_peers(self) -> None:
        if self._discovery is not None and (endpoints := self._discovery.take()) is not None:
            log.info("prefill_lanes_found", endpoints=endpoints)
            for link in self._lanes:
                link.send(_encode(Verify(endpoints)))

    def _check_children(self) -> None:
        """Raises PodFailedError when one has ended."""
        ended = [child for child in self._children if child.popen.poll() is not None]
        if not ended or self._is_over():
            return
        first = ended[0]
        raise PodFailedError(blame(self._identity.run_dir, f"{first.process}: {_exit_text(first.popen.returncode)}"))

    def _end_api(self) -> None:
        """Let the API process send the last answers."""
        [api] = [child for child in self._children if child.process == "api"]
        api.popen.terminate()
        try:
            api.popen.wait(API_GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("api_process_killed", waited_s=API_GRACE_S)

    def _kill_all(self) -> None:
        for child in self._children:
            if child.popen.poll() is None:
                # Its whole session: the ranks, and helpers that libraries may have started.
                os.killpg(child.popen.pid, signal.SIGKILL)
        for child in self._children:
            child.popen.wait()
            os.close(child.pidfd)


def blame(run_dir: Path, otherwise: str) -> str:
    """The message of the process that caused the end, which need not be the first to be seen dead.

    `otherwise` is said when no process has left a message.
    """
    deadline = time.monotonic() + BLAME_S
    while True:
        said = read_last_words(run_dir)
        causes = [words for words in said if not words.is_consequence]
        if causes:
            return causes[0].message
        if time.monotonic() >= deadline:
            return said[0].message if said else otherwise
        time.sleep(0.02)


def run_pod(settings: WorkerSettings, identity: PodIdentity, settings_path: Path) -> int:
    """Run the pod's processes; the exit status. The reason of a failure is left as the termination message."""
    mark = identity.run_dir / "started"
    if mark.exists():
        return _wait_for_replacement(identity)
    try:
        identity.run_dir.mkdir(parents=True, exist_ok=True)
        mark.write_text(f"generation {identity.generation}\n")
    except OSError as error:
        leave_message(identity, f"{mark}: {error.strerror}; mount a writable emptyDir there or set KIMI_RUN_DIR")
        return 1
    try:
        Supervisor(settings, identity, settings_path).run()
    except PodFailedError as error:
        log.error("pod_failed", error=str(error))
        leave_message(identity, str(error))
        return 1
    except Exception as error:
        # The edge of the process: a bug of ours must be as visible as a dead rank.
        leave_message(identity, f"supervisor: {told(error)}")
        raise
    log.info("pod_ended")
    return 0


def leave_message(identity: PodIdentity, message: str) -> None:
    """Write the pod's termination message, one line, and say it on stderr."""
    line = " ".join(message.split())
    print(f"kimi-worker: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the last line of the log
    try:
        # Not created: only Kubernetes knows a path where somebody looks.
        with identity.termination_log.open("r+b") as file:
            file.write(line.encode()[:MAX_MESSAGE_BYTES])
            file.truncate()
    except FileNotFoundError:
        log.info("no_termination_log", path=str(identity.termination_log))
    except OSError as error:
        log.warning("termination_log_not_written", path=str(identity.termination_log), error=str(error))


def _wait_for_replacement(identity: PodIdentity) -> int:
    """A container that is restarted in place is alone, its group is gone: wait, not ready, to be deleted."""
    log.warning("container_restarted_in_place", run_dir=str(identity.run_dir), generation=identity.generation)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


def _exit_text(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _encode(message: ToEngine) -> bytes:
    return msgspec.msgpack.encode(message)
