"""The NIXL transport between two real processes, over UCX's TCP and over what UCX picks by itself."""

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from kimi_worker.handoff.transport import Completion, TransportError
from kimi_worker.protocol.handoff import TransferKey, Write

pytestmark = pytest.mark.multiproc

SCRIPT = Path(__file__).parent / "nixl_peer.py"
DEADLINE_S = 60.0
NUM_PAGES, NUM_SLOTS = 96, 4
TCP = "tcp"
ANY = "all"


class Process:
    """A child process that holds one rank; attributes are orders to it."""

    def __init__(self, folder: Path, name: str, tls: str) -> None:
        address = str(folder / name)
        with Listener(address) as listener:
            self.child = subprocess.Popen(
                [sys.executable, str(SCRIPT), address, name],
                env={**os.environ, "UCX_TLS": tls, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self.orders: Connection[Any, Any] = listener.accept()

    def ask(self, *order: object) -> Any:
        """Give an order and return its answer; the child raised it when it is a TransportError."""
        self.orders.send(order)
        assert self.orders.poll(DEADLINE_S), f"no answer to {order[0]}"
        answer = self.orders.recv()
        if isinstance(answer, TransportError):
            raise answer
        return answer

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def close(self) -> None:
        if self.child.poll() is None:
            self.orders.send(("stop",))
        self.orders.close()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


Start = Callable[[str], Process]


@pytest.fixture(params=[TCP, ANY])
def tls(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(tmp_path: Path, tls: str) -> Iterator[Start]:
    """Start a process; all are ended with the test."""
    started: list[Process] = []
    names = itertools.count()

    def start_one(role: str) -> Process:
        started.append(Process(tmp_path, f"{role}-{next(names)}", tls))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


def placement(rng: random.Random, number: int, num_pages: int) -> Write:
    """A transfer of scattered pages, the first half of them neighbours on both sides."""
    half = num_pages // 2
    local, remote = ([*range(half), *rng.sample(range(half, NUM_PAGES), num_pages - half)] for _ in range(2))
    return Write(TransferKey("decode", 1, number), local, remote, rng.randrange(NUM_SLOTS), rng.randrange(NUM_SLOTS))


def finished(process: Process, post: int) -> Completion:
    completion = process.ask("wait", post, DEADLINE_S - 10)
    assert completion is not None, "the post never ended"
    return completion


def arrived(prefill: Process, decode: Process, write: Write) -> bool:
    sent = prefill.ask("digest", write.local_pages, write.local_slot)
    return bool(sent == decode.ask("digest", write.remote_pages, write.remote_slot))


def test_bytes_are_right_at_every_completion(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    peer = prefill.ask("connect", decode.ask("describe"))
    rng = random.Random(1)
    for number, num_pages in enumerate([1, 2, 7, 32, 64, 96, 5, 48]):
        write = placement(rng, number, num_pages)
        prefill.ask("randomise", number)
        assert finished(prefill, prefill.ask("write", peer, write)) == Completion(number * 2 + 1)
        assert arrived(prefill, decode, write)
        assert finished(prefill, prefill.ask("read_back", peer, write)) == Completion(number * 2 + 2)


def test_read_back_sees_bytes_that_are_not_there(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    peer = prefill.ask("connect", decode.ask("describe"))
    prefill.ask("randomise", 1)
    write = placement(random.Random(2), 1, 16)
    finished(prefill, prefill.ask("write", peer, write))
    decode.ask("fill", 0)
    assert "does not find" in finished(prefill, prefill.ask("read_back", peer, write)).error


def test_many_transfers_at_once_complete_each_once(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    peer = prefill.ask("connect", decode.ask("describe"))
    prefill.ask("randomise", 3)
    writes = [
        Write(TransferKey("decode", 1, slot), pages := list(range(slot * 24, slot * 24 + 24)), pages, slot, slot)
        for slot in range(NUM_SLOTS)
    ]
    posts = [prefill.ask("write", peer, write) for write in writes]
    assert [finished(prefill, post) for post in posts] == [Completion(post) for post in posts]
    assert all(arrived(prefill, decode, write) for write in writes)


def test_killed_peer_ends_an_open_write_with_an_error(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    peer = prefill.ask("connect", decode.ask("describe"))
    write = placement(random.Random(4), 1, 96)
    finished(prefill, prefill.ask("write", peer, write))
    decode.child.send_signal(signal.SIGSTOP)
    post = prefill.ask("write", peer, write)
    decode.kill()
    completion = finished(prefill, post)
    # Shared memory is written without the peer's help: then the write may have ended before the peer did
    assert completion.error or completion.settled
    later = finished(prefill, prefill.ask("write", peer, write))
    assert later.error
    prefill.ask("disconnect", peer)


def test_restarted_peer_is_reached_under_its_new_name(start: Start) -> None:
    prefill, old = start("prefill"), start("decode")
    lost = prefill.ask("connect", old.ask("describe"))
    write = placement(random.Random(5), 1, 32)
    finished(prefill, prefill.ask("write", lost, write))
    old.kill()
    new = start("decode")
    peer = prefill.ask("connect", new.ask("describe"))
    assert peer != lost
    prefill.ask("disconnect", lost)
    prefill.ask("randomise", 5)
    assert finished(prefill, prefill.ask("write", peer, write)).error == ""
    assert arrived(prefill, new, write)


def test_write_to_an_unknown_peer_is_settled(start: Start) -> None:
    prefill = start("prefill")
    completion = finished(prefill, prefill.ask("write", "nobody", placement(random.Random(6), 1, 4)))
    assert completion.error == "not connected to nobody"
    assert completion.settled


def test_broken_descriptor_is_refused(start: Start) -> None:
    prefill = start("prefill")
    with pytest.raises(TransportError, match="descriptor"):
        prefill.ask("connect", b"no descriptor")


@pytest.mark.parametrize("tls", [TCP])
def test_disconnect_ends_open_writes(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    peer = prefill.ask("connect", decode.ask("describe"))
    write = placement(random.Random(7), 1, 96)
    finished(prefill, prefill.ask("write", peer, write))
    decode.child.send_signal(signal.SIGSTOP)
    try:
        post = prefill.ask("write", peer, write)
        prefill.ask("disconnect", peer)
        completion = finished(prefill, post)
    finally:
        decode.child.send_signal(signal.SIGCONT)
    assert completion.error == f"disconnected from {peer}"
    assert not completion.settled
    # The same process can be met again
    again = prefill.ask("connect", decode.ask("describe"))
    prefill.ask("randomise", 7)
    assert finished(prefill, prefill.ask("write", again, write)).error == ""
    assert arrived(prefill, decode, write)


@pytest.mark.parametrize("tls", [TCP])
def test_nothing_lands_after_a_revoke(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    old = decode.ask("describe")
    peer = prefill.ask("connect", old)
    prefill.ask("fill", 7)
    write = placement(random.Random(8), 1, 64)
    finished(prefill, prefill.ask("write", peer, write))
    decode.child.send_signal(signal.SIGSTOP)
    post = prefill.ask("write", peer, write)
    decode.child.send_signal(signal.SIGCONT)
    new = decode.ask("revoke")
    decode.ask("fill", 1)
    untouched = decode.ask("digest", list(range(NUM_PAGES)), 0)
    # The waking process may take the write in just before it revokes: then it has ended, and landed before the fill.
    prefill.ask("wait", post, DEADLINE_S - 10)
    assert finished(prefill, prefill.ask("write", peer, write)).error
    prefill.ask("disconnect", peer)
    assert decode.ask("digest", list(range(NUM_PAGES)), 0) == untouched
    peer = prefill.ask("connect", new)
    assert finished(prefill, prefill.ask("write", peer, write)).error == ""
    assert arrived(prefill, decode, write)


def test_many_transfers_leak_nothing(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    peer = prefill.ask("connect", decode.ask("describe"))
    rng = random.Random(9)

    def transfers(count: int) -> list[tuple[int, int]]:
        for number in range(count):
            write = placement(rng, number, 8)
            assert finished(prefill, prefill.ask("write", peer, write)).error == ""
            assert finished(prefill, prefill.ask("read_back", peer, write)).error == ""
        return [process.ask("usage") for process in (prefill, decode)]

    for (bytes_before, files_before), (bytes_after, files_after) in zip(transfers(20), transfers(60), strict=True):
        assert bytes_after - bytes_before < 4 << 20, f"{(bytes_after - bytes_before) >> 10} KiB more for 60 transfers"
        assert files_after == files_before


def test_reconnecting_after_revokes_leaks_nothing(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    rng = random.Random(10)

    def rounds(count: int) -> list[tuple[int, int]]:
        for number in range(count):
            peer = prefill.ask("connect", decode.ask("revoke"))
            assert finished(prefill, prefill.ask("write", peer, placement(rng, number, 8))).error == ""
            prefill.ask("disconnect", peer)
        decode.ask("revoke")
        return [process.ask("usage") for process in (prefill, decode)]

    for (bytes_before, files_before), (bytes_after, files_after) in zip(rounds(2), rounds(6), strict=True):
        assert bytes_after - bytes_before < 16 << 20, f"{(bytes_after - bytes_before) >> 10} KiB more for 6 agents"
        assert files_after <= files_before + 2
