"""Real worker pods on this machine: supervisors with all their processes, driven over the lanes' own sockets."""

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoint_factory
import msgspec
import zmq
from kimi_worker.protocol.engine import (
    Admitted,
    Cancel,
    Failed,
    FromEngine,
    LaneState,
    Output,
    Sampling,
    Submit,
    ToEngine,
    Watch,
    api_socket,
)
from ports import free_ports

START_S = 300.0
"""For a pod to become ready on a machine that is busy with other things; alone it takes a few seconds."""
END_S = 120.0
FIRST_SPECIAL = 256
VOCABULARY = 288


def write_random_checkpoint(folder: Path) -> None:
    """A random small Kimi-K3 with a tokenizer of single bytes."""
    config = checkpoint_factory.config_json()
    config["text_config"]["vocab_size"] = VOCABULARY
    config |= {"eos_token_id": FIRST_SPECIAL + 2, "bos_token_id": FIRST_SPECIAL, "pad_token_id": FIRST_SPECIAL + 7}
    config["media_placeholder_token_id"] = FIRST_SPECIAL + 6
    checkpoint_factory.write_checkpoint(folder, config=config)
    ranks = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (folder / "tiktoken.model").write_text("".join(ranks))
    names = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
    added = {str(FIRST_SPECIAL + at): {"content": name, "special": True} for at, name in enumerate(names)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "eos_token": "[EOS]"}))


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Poll a condition until it holds. Raises AssertionError at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


@dataclass
class Answer:
    """What has come for one request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    admitted: bool = False
    finish_reason: str | None = None
    failed: Failed | None = None
    handoff_bytes: int = 0

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.failed is not None


class LaneClient:
    """A client of one lane, as the API process is one."""

    def __init__(self, run_dir: Path, lane: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(api_socket(run_dir, lane))
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.state: LaneState | None = None
        self.answers: dict[str, Answer] = {}
        self._num_requests = 0
        self.send(Watch())

    def send(self, message: ToEngine) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def submit(self, prompt: list[int], prefill: str | None = None, **sampling: Any) -> str:
        self._num_requests += 1
        request_id = f"{id(self):x}-{self._num_requests}"
        values = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | sampling
        self.answers[request_id] = Answer()
        self.send(Submit(request_id, prompt, Sampling(**values), prefill))
        return request_id

    def cancel(self, request_id: str) -> None:
        self.send(Cancel(request_id))

    def receive(self, timeout_s: float) -> None:
        """Take what has arrived, waiting for a first message at most so long."""
        wait_ms = int(timeout_s * 1000)
        while self._socket.poll(wait_ms):
            self._take(self._decoder.decode(self._socket.recv()))
            wait_ms = 0

    def _take(self, message: FromEngine) -> None:
        match message:
            case LaneState():
                self.state = message
            case Admitted(request_id):
                self.answers[request_id].admitted = True
            case Failed(request_id):
                self.answers[request_id].failed = message
            case Output():
                answer = self.answers[message.request_id]
                assert not answer.is_done, "tokens after the end"
                answer.tokens += [token.token_id for token in message.tokens]
                answer.logprobs += [token.logprob for token in message.tokens]
                answer.finish_reason = message.finish_reason
                answer.handoff_bytes = message.handoff_bytes

    def wait(self, condition: Callable[[], object], timeout_s: float = END_S, what: str = "") -> None:
        """Receive until the condition holds. Raises AssertionError at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}; state {self.state}"
            self.receive(0.05)

    def finish(self, request_ids: Iterable[str], timeout_s: float = END_S) -> list[Answer]:
        """Wait for the last token of each request."""
        answers = [self.answers[request_id] for request_id in request_ids]
        self.wait(lambda: all(answer.is_done for answer in answers), timeout_s, "answers")
        return answers

    def wait_ready(self, timeout_s: float = START_S) -> None:
        self.wait(lambda: self.state is not None and self.state.ready, timeout_s, "the lane is ready")

    def wait_idle(self, timeout_s: float = END_S) -> None:
        """Every gauge is back where it was before the first request."""

        def is_idle() -> bool:
            state = self.state
            return (
                state is not None
                and (state.running, state.waiting, state.reserved, state.transfers) == (0, 0, 0, 0)
                and (state.quarantined, state.queued_tokens) == (0, 0)
                and (state.free_pages, state.free_slots) == (state.num_pages, state.num_slots)
            )

        self.wait(is_idle, timeout_s, "all gauges at rest")

    def close(self) -> None:
        self._context.destroy(linger=0)


class Pod:
    """One supervisor with its processes. `stop` or `kill` it; the factory does so at the end of a test otherwise."""

    def __init__(self, settings: dict[str, Any], ordinal: int, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kimi-pod-"))
        self.run_dir = self.folder / "run"
        self.settings = settings
        self.ordinal = ordinal
        self.log = self.folder / "log"
        self._path = self.folder / "worker.json"
        self._path.write_text(json.dumps(settings))
        self._termination = self.folder / "termination"
        self._termination.touch()
        self._env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("KIMI_")},
            "KIMI_SETTINGS": str(self._path),
            "KIMI_RUN_DIR": str(self.run_dir),
            "KIMI_TERMINATION_LOG": str(self._termination),
            "POD_NAME": f"{name}-{ordinal}",
            "POD_IP": "127.0.0.1",
        }
        self._clients: list[LaneClient] = []
        self.start()

    def start(self) -> None:
        # setpriv: a test run that is killed leaves no pod behind.
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "kimi_worker", "serve"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log)

    @property
    def message(self) -> str:
        """The termination message."""
        return self._termination.read_text()

    def client(self, lane: int = 0) -> LaneClient:
        client = LaneClient(self.run_dir, lane)
        self._clients.append(client)
        return client

    def wait_ready(self) -> list[LaneClient]:
        """A client of each lane, once all are ready."""
        parallel = self.settings["parallel"]
        clients = [self.client(lane) for lane in range(parallel["ranks_per_node"] // parallel["tensor_parallel"])]
        try:
            for client in clients:
                client.wait(
                    lambda c=client: (c.state is not None and c.state.ready) or self.process.poll() is not None, START_S
                )
                assert self.process.poll() is None, f"the pod has ended: {self.message}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()[-4000:]}") from None
        return clients

    def children(self) -> dict[str, int]:
        """Pids of the pod's other processes by name: ranks, rank-<local>, api."""
        by_parent: dict[int, dict[str, int]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                by_parent.setdefault(parent, {})[(entry / "comm").read_text().strip()] = int(entry.name)
        children = by_parent.get(self.process.pid, {})
        ranks = by_parent.get(children.get("kimi-ranks", -1), {})
        return {name.removeprefix("kimi-"): pid for name, pid in {**children, **ranks}.items()}

    def pids(self) -> list[int]:
        return [self.process.pid, *self.children().values()]

    def cpu_s(self) -> float:
        """CPU time that all processes of the pod have used so far, in seconds."""
        ticks = 0
        for pid in self.pids():
            ticks += sum(
                int(field) for field in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            )
        return ticks / os.sysconf("SC_CLK_TCK")

    def wakeups(self) -> int:
        """How often a thread of ours went to sleep so far; gloo's loops wake every 10 ms whatever we do."""
        threads = [thread for pid in self.pids() for thread in Path(f"/proc/{pid}/task").glob("*/status")]
        fields = [dict(line.split(":\t") for line in thread.read_text().splitlines()) for thread in threads]
        return sum(int(one["voluntary_ctxt_switches"]) for one in fields if one["Name"] != "gloo_tcp_loop")

    def wait_end(self, timeout_s: float = END_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the pod did not end within {timeout_s} s\n{self.log.read_text()[-4000:]}") from None

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End everything and remove the files."""
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def pod_settings(checkpoint: Path, **changes: dict[str, Any] | str) -> dict[str, Any]:
    """Settings of a small pod; `changes` are merged into the sections they name."""
    api, rendezvous, coordinator, handoff = free_ports(4)
    settings: dict[str, Any] = {
        "deployment": "test",
        "role": "both",
        "model": {"checkpoint": str(checkpoint), "served_name": "tiny", "max_model_len": 1024},
        "parallel": {"nodes_per_group": 1, "ranks_per_node": 1, "tensor_parallel": 1},
        "limits": {
            "max_num_seqs": 4,
            "max_queued": 8,
            "max_num_batched_tokens": 64,
            "num_pages": 80,
            "page_size_tokens": 16,
            "num_state_slots": 6,
        },
        "ports": {"api": api, "rendezvous": rendezvous, "coordinator": coordinator, "handoff": handoff},
        "timeouts": {"group_start_s": 300.0, "collective_s": 30.0, "drain_s": 60.0},
    }
    for section, change in changes.items():
        settings[section] = {**settings.get(section, {}), **change} if isinstance(change, dict) else change
    return settings


class Pods:
    """Starts pods and ends all of them."""

    def __init__(self) -> None:
        self._pods: list[Pod] = []

    def start(self, settings: dict[str, Any], ordinal: int = 0, name: str = "test") -> Pod:
        pod = Pod(settings, ordinal, name)
        self._pods.append(pod)
        return pod

    def start_group(self, settings: dict[str, Any], name: str = "test") -> list[Pod]:
        """One pod for each node of the group; each gets API and handoff ports of its own."""
        pods = []
        for ordinal in range(settings["parallel"]["nodes_per_group"]):
            api, *handoff = free_ports(3)
            own = {**settings, "ports": {**settings["ports"], "api": api, "handoff": handoff[0]}}
            pods.append(self.start(own, ordinal, name))
        return pods

    def close(self) -> None:
        for pod in self._pods:
            pod.close()

    def __enter__(self) -> "Pods":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the pids that still run; zombies do not."""
    running = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                running.append(pid)
    return running


def listening_ports(pod: Pod) -> set[int]:
    """TCP ports on which the pod's processes accept connections, whatever library opened them."""
    inodes = set()
    for pid in (pod.process.pid, *pod.children().values()):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


NOISE = (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", bytes(range(256)) * 64, b"\xff" * 4096)


def disturb(port: int) -> None:
    """Scan the port, talk nonsense to it, hang up in the middle of it."""
    for noise in NOISE:
        for close in (socket.SHUT_WR, socket.SHUT_RDWR):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as stranger:
                stranger.settimeout(0.2)
                stranger.sendall(noise)
                stranger.shutdown(close)
                stranger.recv(4096)


def assert_idle(pods: list[Pod], lane: LaneClient) -> None:
    """Nothing of the pods polls or spins while `lane` waits. Both bounds hold on a loaded machine too: a poll counts
    the same there, and a thread that spins takes most of a core."""
    wakeups, cpu_s, begun = sum(pod.wakeups() for pod in pods), sum(pod.cpu_s() for pod in pods), time.monotonic()
    while (elapsed := time.monotonic() - begun) < 3.0:
        lane.receive(3.0 - elapsed)  # returns at the first message
    rate = (sum(pod.wakeups() for pod in pods) - wakeups) / elapsed
    share = (sum(pod.cpu_s() for pod in pods) - cpu_s) / elapsed
    # uvicorn looks at its clock ten times a second in each API process.
    assert rate < 20 * len(pods) + 10, f"{len(pods)} idle pods woke {rate:.0f} times a second"
    assert share < 0.3, f"{len(pods)} idle pods used {share:.0%} of a core"
