"""How the lanes of a group reach the coordinator, which lives in rank 0's process.

Both ends know when the other is gone: a closed connection, or one without heartbeats, ends the group. Anybody can
reach the coordinator's port; only a connection that has brought a lane's Join counts.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from kimi_worker.engine.connections import SILENCE_S, Context, InboundConnections, OutboundConnection, Socket, drain
from kimi_worker.engine.messages import (
    AskDrain,
    AskWave,
    Assembled,
    Drained,
    DrainGroup,
    Empty,
    FromCoordinator,
    Join,
    ToCoordinator,
    Wake,
)
from kimi_worker.engine.wave import Coordinator

MAX_MESSAGE_BYTES = 4096


class GroupLostError(Exception):
    """Another pod of the group is gone; this one cannot go on without it."""


class Coordination(Protocol):
    """A lane's way to the coordinator. The lane sends Join first and nothing else until Assembled has come."""

    @property
    def sockets(self) -> list[Socket]:
        """What a loop must poll."""

    def send(self, message: ToCoordinator) -> None: ...

    def receive(self) -> Iterator[FromCoordinator]:
        """What has arrived. Raises GroupLostError."""


@dataclass(frozen=True, slots=True)
class _Member:
    """Another lane that has joined."""

    routing_id: bytes
    connection: int


class CoordinatorHost:
    """The coordinator and lane 0's way to it."""

    def __init__(self, context: Context, num_lanes: int, address: str, silence_s: float = SILENCE_S) -> None:
        """Listens at `address` when there are other lanes; a lane that is silent for `silence_s` is lost."""
        self._coordinator = Coordinator()
        self._num_lanes = num_lanes
        self._inbox: list[FromCoordinator] = []
        self._members: dict[int, _Member] = {}
        """By lane."""
        self._joined: set[int] = set()
        self._empty: set[int] = set()
        self._is_draining = False
        self._is_drained = False
        self._socket: Socket | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[ToCoordinator](ToCoordinator)
        if num_lanes > 1:
            self._socket = context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            self._connections = InboundConnections(self._socket, silence_s)
            self._socket.bind(address)

    @property
    def sockets(self) -> list[Socket]:
        return [self._socket, self._connections.monitor] if self._socket is not None else []

    def send(self, message: ToCoordinator) -> None:
        self._handle(message)

    def receive(self) -> Iterator[FromCoordinator]:
        if self._socket is not None:
            self._receive_from_members()
            self._check_members()
        while self._inbox:
            yield self._inbox.pop(0)

    def _receive_from_members(self) -> None:
        for arrival in self._connections.receive():
            # Garbage is a stranger's: it says nothing about the group.
            with contextlib.suppress(msgspec.ValidationError, msgspec.DecodeError, ValueError):
                routing_id, frame = arrival.frames
                message = self._decoder.decode(frame)
                if isinstance(message, Join):
                    self._join(message, _Member(routing_id, arrival.connection))
                elif any(member.routing_id == routing_id for member in self._members.values()):
                    self._handle(message)

    def _join(self, join: Join, member: _Member) -> None:
        if 0 < join.lane < self._num_lanes and join.lane not in self._members:
            self._members[join.lane] = member
            self._handle(join)

    def _check_members(self) -> None:
        """Raises GroupLostError."""
        for lane, member in self._members.items():
            if not self._is_drained and not self._connections.stands(member.connection):
                raise GroupLostError(f"lane {lane}, of another pod, has left the group or cannot be reached")

    def _handle(self, message: ToCoordinator) -> None:
        match message:
            case Join(lane):
                self._joined.add(lane)
                if len(self._joined) == self._num_lanes:
                    self._broadcast(Assembled())
            case AskWave(wave):
                if self._coordinator.ask(wave):
                    self._broadcast(Wake(wave))
            case AskDrain() if not self._is_draining:
                self._is_draining = True
                self._broadcast(DrainGroup())
            case Empty(lane):
                self._empty.add(lane)
                if len(self._empty) == self._num_lanes:
                    self._is_drained = True
                    self._broadcast(Drained())

    def _broadcast(self, message: FromCoordinator) -> None:
        self._inbox.append(message)
        for member in self._members.values():
            assert self._socket is not None
            self._socket.send_multipart([member.routing_id, self._encoder.encode(message)])


class CoordinatorMember:
    """Another lane's way to the coordinator."""

    def __init__(self, context: Context, address: str, silence_s: float = SILENCE_S) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._connection = OutboundConnection(self._socket, silence_s)
        self._socket.connect(address)
        self._is_drained = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromCoordinator](FromCoordinator)

    @property
    def sockets(self) -> list[Socket]:
        return [self._socket, self._connection.monitor]

    def send(self, message: ToCoordinator) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self) -> Iterator[FromCoordinator]:
        for (frame,) in drain(self._socket):
            message = self._decoder.decode(frame)
            self._is_drained = self._is_drained or isinstance(message, Drained)
            yield message
        self._connection.stands()
        if self._connection.was_lost and not self._is_drained:
            raise GroupLostError("rank 0's pod has left the group or cannot be reached")
