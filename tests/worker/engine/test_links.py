"""The sockets between lanes and to the coordinator, over real TCP and IPC within one process."""

import contextlib
import math
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from kimi_worker.engine.connections import Context
from kimi_worker.engine.coordination import CoordinatorHost, CoordinatorMember, GroupLostError
from kimi_worker.engine.links import MAX_PEERS, ClientLink, FollowerLink, LeaderLink, PeerLink, new_context
from kimi_worker.engine.messages import (
    AskDrain,
    AskWave,
    Assembled,
    Drained,
    DrainGroup,
    Empty,
    Join,
    Run,
    Started,
    Wake,
    tcp_address,
)
from kimi_worker.protocol.engine import Admitted, FromEngine, Sampling, Watch, api_socket
from kimi_worker.protocol.handoff import Abort, Disconnected, Prefill, Revoke, is_endpoint
from kimi_worker.protocol.step import SequenceStep, StepPlan
from ports import free_ports

# Links live as long as their process and are never closed; in a test they are collected before their context ends.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Unclosed socket:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


SILENCE_S = 4.0
"""Where a process is lost that answers no ping for so long: longer than a loaded machine keeps a living one from it."""
SILENCES_S = 3 * SILENCE_S
"""A living process is not lost in this time, and a stopped one is. It is less than the default silence and a ping."""


@pytest.fixture
def context() -> Iterator[Context]:
    context = new_context()
    yield context
    context.destroy(linger=0)


def free_address() -> str:
    return tcp_address("127.0.0.1", *free_ports(1))


@pytest.fixture
def address() -> str:
    return free_address()


def split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


GARBAGE = (
    b"",
    b"\xff\xff",
    msgspec.msgpack.encode({"type": "join"}),
    msgspec.msgpack.encode({"type": "join", "lane": 7}),
    msgspec.msgpack.encode({"type": "join", "lane": -1}),
    msgspec.msgpack.encode({"type": "ask", "wave": 9}),
    msgspec.msgpack.encode({"type": "empty", "lane": 1}),
    msgspec.msgpack.encode({"type": "hello"}),
    b"x" * 100_000,
)


def disturb(context: Context, address: str) -> None:
    """What port scans, probes and misdirected clients do, and more; returns once the port has seen all of it."""
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", bytes(range(256)) * 300):
        with socket.create_connection(split(address)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    for garbage in ([frame] for frame in GARBAGE):
        speak(context, address, garbage)
    speak(context, address, [b"two", b"frames"])
    speak(context, address, [])


def speak(context: Context, address: str, frames: list[bytes]) -> None:
    """Connect as ZeroMQ does, say something, and leave."""
    stranger = context.socket(zmq.DEALER)
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stranger.connect(address)
    assert monitor.poll(20_000)
    if frames:
        stranger.send_multipart(frames)
    stranger.disable_monitor()
    stranger.close(linger=1000)


def collect(receive: Callable[[], Iterator[object]], count: int) -> list[object]:
    """The next `count` messages. Raises AssertionError when they do not come."""
    found: list[object] = []
    deadline = time.monotonic() + 20.0
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {found} came"
        found.extend(receive())
        time.sleep(0.005)
    assert len(found) == count
    return found


def nothing_comes(host: CoordinatorHost) -> bool:
    """In a time that is many times that of a message; a slow machine can only miss one that should not come."""
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        if list(host.receive()):
            return False
        time.sleep(0.005)
    return True


def until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_addresses_of_both_families() -> None:
    assert tcp_address("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert tcp_address("fd00::1", 5) == "tcp://[fd00::1]:5"


def test_lone_lane_needs_no_socket(context: Context) -> None:
    host = CoordinatorHost(context, 1, "tcp://nowhere:0")
    assert host.sockets == []
    host.send(Join(0))
    host.send(AskWave(1))
    host.send(AskWave(1))
    host.send(AskDrain())
    host.send(Empty(0))
    assert list(host.receive()) == [Assembled(), Wake(1), DrainGroup(), Drained()]


def test_group_assembles_wakes_and_drains(context: Context, address: str) -> None:
    host = CoordinatorHost(context, 3, address)
    members = [CoordinatorMember(context, address) for _ in range(2)]
    host.send(Join(0))
    members[0].send(Join(1))
    assert nothing_comes(host)
    members[1].send(Join(2))
    assert collect(host.receive, 1) == [Assembled()]
    members[0].send(AskWave(1))
    assert collect(host.receive, 1) == [Wake(1)]
    host.send(AskWave(1))
    members[1].send(AskDrain())
    assert collect(host.receive, 1) == [DrainGroup()]
    for lane, sender in enumerate((host, *members)):
        sender.send(Empty(lane))
    assert collect(host.receive, 1) == [Drained()]
    for member in members:
        assert collect(member.receive, 4) == [Assembled(), Wake(1), DrainGroup(), Drained()]


def poll_until_lost(receive: Callable[[], Iterator[object]]) -> None:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        list(receive())
        time.sleep(0.005)


def test_lost_member_is_noticed_while_nothing_happens(context: Context, address: str) -> None:
    host = CoordinatorHost(context, 2, address)
    other = new_context()
    member = CoordinatorMember(other, address)
    host.send(Join(0))
    member.send(Join(1))
    collect(host.receive, 1)
    other.destroy(linger=0)
    with pytest.raises(GroupLostError, match="another pod"):
        poll_until_lost(host.receive)


def test_lost_coordinator_is_noticed(context: Context, address: str) -> None:
    other = new_context()
    host = CoordinatorHost(other, 2, address)
    member = CoordinatorMember(context, address)
    member.send(Join(1))
    host.send(Join(0))
    collect(host.receive, 1)
    assert collect(member.receive, 1) == [Assembled()]
    other.destroy(linger=0)
    with pytest.raises(GroupLostError, match="rank 0's pod"):
        poll_until_lost(member.receive)


def test_end_of_a_drained_group_is_no_loss(context: Context, address: str) -> None:
    other = new_context()
    host = CoordinatorHost(other, 2, address)
    member = CoordinatorMember(context, address)
    member.send(Join(1))
    host.send(Join(0))
    collect(host.receive, 1)
    member.send(Empty(1))
    host.send(Empty(0))
    assert collect(member.receive, 1) == [Assembled()]
    assert collect(host.receive, 1) == [Drained()]
    assert collect(member.receive, 1) == [Drained()]
    [_, monitor] = member.sockets
    other.destroy(linger=0)
    assert monitor.poll(20_000)
    assert list(member.receive()) == []


def test_strangers_neither_end_a_group_nor_count_as_lanes(context: Context, address: str) -> None:
    host = CoordinatorHost(context, 3, address)
    host.send(Join(0))
    disturb(context, address)
    members = [CoordinatorMember(context, address) for _ in range(2)]
    members[0].send(Join(1))
    assert nothing_comes(host)
    members[1].send(Join(2))
    assert collect(host.receive, 1) == [Assembled()]
    disturb(context, address)
    members[0].send(AskWave(1))
    assert collect(host.receive, 1) == [Wake(1)]
    assert [collect(member.receive, 2) for member in members] == [[Assembled(), Wake(1)]] * 2


@pytest.mark.parametrize("seed", range(5))
def test_members_are_told_from_strangers_in_any_order(context: Context, address: str, seed: int) -> None:
    """Connections come and go and share descriptors; the loss of a member is the only one that counts."""
    rng = random.Random(seed)
    other = new_context()
    host = CoordinatorHost(context, 4, address)
    host.send(Join(0))
    strangers: list[socket.socket] = []
    seen: list[object] = []

    def churn() -> None:
        for _ in range(rng.randint(1, 5)):
            if strangers and rng.random() < 0.5:
                strangers.pop(rng.randrange(len(strangers))).close()
            else:
                strangers.append(socket.create_connection(split(address)))
            if rng.random() < 0.3:
                seen.extend(host.receive())

    churn()
    victim = CoordinatorMember(other, address)
    churn()
    members = [CoordinatorMember(context, address) for _ in range(2)]
    for lane, member in enumerate((victim, *members), 1):
        member.send(Join(lane))
        churn()
    until(lambda: seen.extend(host.receive()) or seen == [Assembled()])
    for wave in range(1, 20):
        churn()
        members[wave % 2].send(AskWave(wave))
        until(lambda wave=wave: seen.extend(host.receive()) or seen[1:] == [Wake(at + 1) for at in range(wave)])
    other.destroy(linger=0)
    strangers += [socket.create_connection(split(address)) for _ in range(5)]
    with pytest.raises(GroupLostError, match="lane 1, of another pod"):
        poll_until_lost(host.receive)
    for stranger in strangers:
        stranger.close()


def stopped_process(code: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """A process that has run the code until it printed a line; its last argument is its silence."""
    child = subprocess.Popen([sys.executable, "-c", code, *arguments, str(SILENCE_S)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline()
    return child


MEMBER = """
import sys, time
from kimi_worker.engine.coordination import CoordinatorMember
from kimi_worker.engine.links import new_context
from kimi_worker.engine.messages import Join
member = CoordinatorMember(new_context(), sys.argv[1], float(sys.argv[2]))
member.send(Join(1))
while not list(member.receive()):
    time.sleep(0.01)
print("assembled", flush=True)
time.sleep(600)
"""


def test_a_long_step_is_no_loss_and_a_stopped_process_is_one(context: Context, address: str) -> None:
    """The member does nothing for several times the limit of silence; then it is stopped, as by a power failure."""
    host = CoordinatorHost(context, 2, address, SILENCE_S)
    host.send(Join(0))
    child: list[subprocess.Popen[bytes]] = []
    starter = threading.Thread(target=lambda: child.append(stopped_process(MEMBER, address)))
    starter.start()
    try:
        assert collect(host.receive, 1) == [Assembled()]
        starter.join()
        deadline = time.monotonic() + SILENCES_S
        while time.monotonic() < deadline:
            assert list(host.receive()) == []
            host.sockets[0].poll(50)
        child[0].send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(GroupLostError):
            poll_until_lost(host.receive)
        assert time.monotonic() - begun < SILENCES_S
    finally:
        starter.join()
        child[0].kill()
        child[0].communicate()


def test_peers_know_each_other_by_endpoint_and_ignore_garbage(context: Context, address: str) -> None:
    other = free_address()
    here, there = PeerLink(context, address), PeerLink(context, other)
    disturb(context, other)
    here.send(other, Abort(1, 2, 3), now=0.0)
    assert collect(there.receive, 1) == [(address, Abort(1, 2, 3))]
    disturb(context, address)
    there.send(address, Abort(4, 5, 6), now=0.0)
    assert collect(here.receive, 1) == [(other, Abort(4, 5, 6))]


BAD_ENDPOINTS = [
    "tcp://!:1",
    "tcp://prefill:1",
    "tcp://10.0.0.1:0",
    "tcp://10.0.0.1:65536",
    "tcp://10.0.0.256:1",
    "tcp://[::g]:1",
    "tcp://[]:1",
    "tcp://10.0.0.1",
    "tcp://10.0.0.1:1;tcp://10.0.0.2:1",
    "tcp://*:1",
    "ipc:///tmp/x",
    "inproc://x",
    "udp://10.0.0.1:1",
    "tcp://10.0.0.1:1\n",
    "",
    "\0",
]


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
def test_what_is_no_endpoint_is_neither_dialled_nor_answered(context: Context, address: str, endpoint: str) -> None:
    assert not is_endpoint(endpoint)
    here = PeerLink(context, address)
    here.send(endpoint, Abort(1, 2, 3), now=0.0)
    assert here.reached() == []
    stranger = context.socket(zmq.DEALER)
    if endpoint.strip("\0"):
        stranger.setsockopt(zmq.ROUTING_ID, endpoint.encode())
    stranger.connect(address)
    stranger.send(msgspec.msgpack.encode(Abort(1, 2, 3)))
    friend = PeerLink(context, free_address())
    friend.send(address, Abort(4, 5, 6), now=0.0)
    assert [message for _, message in collect(here.receive, 1)] == [Abort(4, 5, 6)]


def test_endpoints_of_both_families() -> None:
    assert is_endpoint("tcp://10.0.0.1:29600")
    assert is_endpoint("tcp://[fd00::1]:1")


def test_more_peers_than_sockets_are_served_in_turn(context: Context, address: str) -> None:
    here, there = PeerLink(context, address), PeerLink(context, other := free_address())
    for number in range(3 * MAX_PEERS):
        here.send(f"tcp://127.0.0.1:{10_000 + number}", Abort(1, 2, 3), now=float(number) / 100)
    came: list[object] = []

    def try_again() -> list[object]:
        """As sessions do: on a busy machine closed sockets are there for a while, and leave no room for another."""
        here.send(other, Abort(1, 2, 3), now=10.0)
        came.extend(there.receive())
        return came

    until(try_again)
    assert came[0] == (address, Abort(1, 2, 3))


PEER = """
import sys, time
from kimi_worker.engine.links import PeerLink, new_context
from kimi_worker.protocol.handoff import Abort
own, other, silence_s = sys.argv[1:]
link = PeerLink(new_context(), own, float(silence_s))
while not list(link.receive()):
    time.sleep(0.01)
link.send(other, Abort(4, 5, 6), 0.0)
print("answered", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_busy_peer_is_seen_and_one_that_has_ended_is_not(context: Context, address: str, end: signal.Signals) -> None:
    here, other = PeerLink(context, address, SILENCE_S), free_address()
    assert (here.reached(), here.heard()) == ([], [])
    here.send(other, Abort(1, 2, 3), now=0.0)
    child = stopped_process(PEER, other, address)
    try:
        assert collect(here.receive, 1) == [(other, Abort(4, 5, 6))]
        deadline = time.monotonic() + SILENCES_S
        while time.monotonic() < deadline:
            list(here.receive())
            assert (here.reached(), here.heard()) == ([other], [other])
            time.sleep(0.05)
        child.send_signal(end)
        until(lambda: not [*here.receive(), *here.reached(), *here.heard()], SILENCES_S)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    "greeting",
    [b"\x01\x00" + b"\x02\x00a", bytes.fromhex("ff00000000000000017f 0105 0000 0001") + b"a"],
    ids=["ZMTP 1", "ZMTP 2"],
)
def test_speakers_of_an_old_protocol_are_passed_over(context: Context, address: str, greeting: bytes) -> None:
    here = PeerLink(context, address)
    with socket.create_connection(split(address)) as stranger:
        stranger.sendall(greeting)
        assert here.socket.poll(5_000), "the message has arrived"
        assert list(here.receive()) == []
    other = PeerLink(context, free_address())
    other.send(address, Abort(1, 2, 3), now=0.0)
    assert [message for _, message in collect(here.receive, 1)] == [Abort(1, 2, 3)]


def test_impossible_sampling_is_no_message(context: Context, address: str) -> None:
    """It would be found out in the middle of a step, which all ranks of a group run together."""
    here, other = PeerLink(context, address), PeerLink(context, free_address())
    for sampling in (
        Sampling(0), Sampling(1, temperature=-1.0), Sampling(1, temperature=math.nan), Sampling(1, temperature=1e300),
        Sampling(1, top_p=0.0), Sampling(1, top_p=math.nan), Sampling(1, logprobs=-1), Sampling(1, logprobs=2**40),
    ):  # fmt: skip
        other.send(address, Prefill(1, 2, 3, [1], sampling, [1], 0, 1.0), now=0.0)
    other.send(address, Abort(1, 2, 3), now=0.0)
    assert [message for _, message in collect(here.receive, 1)] == [Abort(1, 2, 3)]


def test_impossible_pages_are_no_message(context: Context, address: str) -> None:
    here, other = PeerLink(context, address), PeerLink(context, free_address())
    sampling = Sampling(1)
    for pages, slot in (([1, 2**60], 0), ([-1], 0), ([1], 2**60), ([1], -1)):
        other.send(address, Prefill(1, 2, 3, [1], sampling, pages, slot, 1.0), now=0.0)
    other.send(address, Abort(1, 2, 3), now=0.0)
    assert [message for _, message in collect(here.receive, 1)] == [Abort(1, 2, 3)]


def test_a_successor_at_the_same_endpoint_is_not_its_predecessor(context: Context, address: str) -> None:
    here, other = PeerLink(context, address), free_address()
    old = new_context()
    try:
        predecessor = PeerLink(old, other)  # kept: with it its sockets would close, and drop what they have not sent
        predecessor.send(address, Abort(1, 2, 3), now=0.0)
        assert collect(here.receive, 1) == [(other, Abort(1, 2, 3))]
        assert here.heard() == [other]
    finally:
        old.destroy(linger=0)
    new = context.socket(zmq.DEALER)
    new.setsockopt(zmq.ROUTING_ID, other.encode())
    new.connect(address)
    until(lambda: not list(here.receive()) and not here.heard())
    new.send(msgspec.msgpack.encode(Abort(4, 5, 6)))
    assert collect(here.receive, 1) == [(other, Abort(4, 5, 6))]
    assert here.heard() == [other]


def test_restarted_peer_takes_its_place(context: Context, address: str) -> None:
    """The same endpoint dials again, before anybody has noticed that its old connection is gone."""
    other = free_address()
    there = PeerLink(context, other)
    dialled = []
    for number in range(2):
        socket_ = context.socket(zmq.DEALER)
        socket_.setsockopt(zmq.ROUTING_ID, address.encode())
        socket_.connect(other)
        socket_.send(msgspec.msgpack.encode(Abort(number, 0, 0)))
        assert collect(there.receive, 1) == [(address, Abort(number, 0, 0))]
        dialled.append(socket_)


def test_unused_connections_are_closed_and_dialled_anew(context: Context, address: str) -> None:
    other = free_address()
    here, there = PeerLink(context, address), PeerLink(context, other)
    here.send(other, Abort(1, 0, 0), now=0.0)
    assert collect(there.receive, 1) == [(address, Abort(1, 0, 0))]
    here.send(other, Abort(2, 0, 0), now=1000.0)
    assert collect(there.receive, 1) == [(address, Abort(2, 0, 0))]


def test_unreachable_peer_never_blocks_the_sender(context: Context, address: str) -> None:
    here = PeerLink(context, address)
    began = time.monotonic()
    for number in range(3000):
        here.send("tcp://127.0.0.1:9", Abort(number, 0, 0), now=0.0)
    assert time.monotonic() - began < 5.0


def test_follower_and_leader_exchange_steps_commands_and_reports(context: Context, tmp_path: Path) -> None:
    leader, follower = FollowerLink(context, tmp_path, 1), LeaderLink(context, tmp_path, 1)
    follower.send(Started(1, b"descriptor", 10, 0))
    assert collect(leader.receive, 1) == [Started(1, b"descriptor", 10, 0)]
    plan = StepPlan(3, [SequenceStep([1, 2], 0, [7], 4, True)])
    leader.send(Run(plan))
    leader.send(Revoke())
    assert collect(follower.receive, 2) == [Run(plan), Revoke()]
    follower.send(Disconnected(1, "peer", 9))
    assert collect(leader.receive, 1) == [Disconnected(1, "peer", 9)]


def test_answers_go_to_the_client_that_asked(context: Context, tmp_path: Path) -> None:
    lane = ClientLink(context, tmp_path, 0)
    clients = [context.socket(zmq.DEALER) for _ in range(2)]
    for client in clients:
        client.connect(api_socket(tmp_path, 0))
    clients[0].send(msgspec.msgpack.encode(Watch()))
    [(first, message)] = collect(lane.receive, 1)  # type: ignore[misc]
    assert message == Watch()
    lane.send(first, Admitted("r"))
    lane.send(b"gone", Admitted("lost"))
    assert clients[0].poll(20_000)
    assert msgspec.msgpack.decode(clients[0].recv(), type=FromEngine) == Admitted("r")
    assert not clients[1].poll(0)
