"""How the lanes of a group reach the coordinator, which lives in rank 0's process.

Both ends know when the other is gone: a closed connection, or one without heartbeats, ends the group.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec
import zmq

from kimi_worker.engine.links import Context, Socket, drain
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

HEARTBEAT_S = 2.0
"""Between pings on an idle connection."""


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


class CoordinatorHost:
    """The coordinator and lane 0's way to it."""

    def __init__(self, context: Context, num_lanes: int, address: str, silence_s: float) -> None:
        """Listens at `address` when there are other lanes; a lane that is silent for `silence_s` is lost."""
        self._coordinator = Coordinator()
        self._num_lanes = num_lanes
        self._inbox: list[FromCoordinator] = []
        self._members: dict[bytes, int] = {}
        self._joined: set[int] = set()
        self._empty: set[int] = set()
        self._is_draining = False
        self._is_drained = False
        self._socket: Socket | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[ToCoordinator](ToCoordinator)
        if num_lanes > 1:
            self._socket = context.socket(zmq.ROUTER)
            self._monitor = _watched(self._socket, silence_s)
            self._socket.bind(address)

    @property
    def sockets(self) -> list[Socket]:
        return [self._socket, self._monitor] if self._socket is not None else []

    def send(self, message: ToCoordinator) -> None:
        self._handle(message)

    def receive(self) -> Iterator[FromCoordinator]:
        if self._socket is not None:
            self._receive_from_members()
            if _was_lost(self._monitor) and not self._is_drained:
                raise GroupLostError("a lane of another pod has left the group")
        while self._inbox:
            yield self._inbox.pop(0)

    def _receive_from_members(self) -> None:
        assert self._socket is not None
        for member, frame in drain(self._socket):
            message = self._decoder.decode(frame)
            if isinstance(message, Join):
                self._members[member] = message.lane
            self._handle(message)

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
        for member in self._members:
            assert self._socket is not None
            self._socket.send_multipart([member, self._encoder.encode(message)])


class CoordinatorMember:
    """Another lane's way to the coordinator."""

    def __init__(self, context: Context, address: str, silence_s: float) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._monitor = _watched(self._socket, silence_s)
        self._socket.connect(address)
        self._is_drained = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromCoordinator](FromCoordinator)

    @property
    def sockets(self) -> list[Socket]:
        return [self._socket, self._monitor]

    def send(self, message: ToCoordinator) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self) -> Iterator[FromCoordinator]:
        for (frame,) in drain(self._socket):
            message = self._decoder.decode(frame)
            self._is_drained = self._is_drained or isinstance(message, Drained)
            yield message
        if _was_lost(self._monitor) and not self._is_drained:
            raise GroupLostError("rank 0's pod has left the group")


def _watched(socket: Socket, silence_s: float) -> Socket:
    """Make the socket notice a peer that is gone or silent; returns the socket that tells so."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(silence_s * 1000))
    monitor: Socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    return monitor


def _was_lost(monitor: Socket) -> bool:
    return any(True for _ in drain(monitor))
