"""The sockets between lanes and to the coordinator, over real TCP and IPC within one process."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from kimi_worker.engine.coordination import CoordinatorHost, CoordinatorMember, GroupLostError
from kimi_worker.engine.links import ClientLink, Context, FollowerLink, LeaderLink, PeerLink, new_context
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
from kimi_worker.protocol.engine import Admitted, FromEngine, Watch, api_socket
from kimi_worker.protocol.handoff import Abort, Disconnected, Revoke
from kimi_worker.protocol.step import SequenceStep, StepPlan

# Links live as long as their process and are never closed; in a test they are collected before their context ends.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Unclosed socket:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def context() -> Iterator[Context]:
    context = new_context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return tcp_address("127.0.0.1", server.getsockname()[1])


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


def test_addresses_of_both_families() -> None:
    assert tcp_address("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert tcp_address("fd00::1", 5) == "tcp://[fd00::1]:5"


def test_lone_lane_needs_no_socket(context: Context) -> None:
    host = CoordinatorHost(context, 1, "tcp://nowhere:0", 5.0)
    assert host.sockets == []
    host.send(Join(0))
    host.send(AskWave(1))
    host.send(AskWave(1))
    host.send(AskDrain())
    host.send(Empty(0))
    assert list(host.receive()) == [Assembled(), Wake(1), DrainGroup(), Drained()]


def test_group_assembles_wakes_and_drains(context: Context, address: str) -> None:
    host = CoordinatorHost(context, 3, address, 5.0)
    members = [CoordinatorMember(context, address, 5.0) for _ in range(2)]
    host.send(Join(0))
    members[0].send(Join(1))
    assert collect(host.receive, 0) == []
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
    host = CoordinatorHost(context, 2, address, 5.0)
    other = new_context()
    member = CoordinatorMember(other, address, 5.0)
    host.send(Join(0))
    member.send(Join(1))
    collect(host.receive, 1)
    other.destroy(linger=0)
    with pytest.raises(GroupLostError, match="another pod"):
        poll_until_lost(host.receive)


def test_lost_coordinator_is_noticed(context: Context, address: str) -> None:
    other = new_context()
    host = CoordinatorHost(other, 2, address, 5.0)
    member = CoordinatorMember(context, address, 5.0)
    member.send(Join(1))
    host.send(Join(0))
    collect(host.receive, 1)
    assert collect(member.receive, 1) == [Assembled()]
    other.destroy(linger=0)
    with pytest.raises(GroupLostError, match="rank 0's pod"):
        poll_until_lost(member.receive)


def test_end_of_a_drained_group_is_no_loss(context: Context, address: str) -> None:
    other = new_context()
    host = CoordinatorHost(other, 2, address, 5.0)
    member = CoordinatorMember(context, address, 5.0)
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


def test_peers_know_each_other_by_endpoint_and_ignore_garbage(context: Context, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = tcp_address("127.0.0.1", server.getsockname()[1])
    here, there = PeerLink(context, address), PeerLink(context, other)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(other)
    for garbage in (b"", b"\xff\xff", msgspec.msgpack.encode({"type": "hello"})):
        stranger.send(garbage)
    stranger.send_multipart([b"two", b"frames"])
    here.send(other, Abort(1, 2, 3), now=0.0)
    assert collect(there.receive, 1) == [(address, Abort(1, 2, 3))]
    there.send(address, Abort(4, 5, 6), now=0.0)
    assert collect(here.receive, 1) == [(other, Abort(4, 5, 6))]


def test_restarted_peer_takes_its_place(context: Context, address: str) -> None:
    """The same endpoint dials again, before anybody has noticed that its old connection is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = tcp_address("127.0.0.1", server.getsockname()[1])
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = tcp_address("127.0.0.1", server.getsockname()[1])
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
