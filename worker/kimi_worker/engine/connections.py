"""Which connections of a socket stand. ZeroMQ hides them; its events and the origin of a message show them.

Heartbeats are answered by the other process's I/O thread, also while its loop is busy with a long step. So a standing
connection says that the process lives, and nothing about what it is doing.
"""

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import zmq

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

HEARTBEAT_S = 2.0
"""Between pings on a connection."""
SILENCE_S = 15.0
"""A connection on which no ping is answered for so long is closed: the process is stopped, or cannot be reached."""
GONE = 0
"""The connection of a message whose origin is closed already, or not certain."""


def drain(socket: Socket) -> Iterator[list[bytes]]:
    """All messages that have arrived."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)


def keep_alive(socket: Socket, silence_s: float) -> None:
    """Close connections of the socket whose other end is silent; call it before the socket binds or connects."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(min(HEARTBEAT_S, silence_s / 2) * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(silence_s * 1000))


def _events(monitor: Socket) -> Iterator[tuple[int, int]]:
    """(event, value) of what has happened, in order."""
    for event, *_ in drain(monitor):
        yield struct.unpack("=hi", event)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message and the connection that brought it."""

    connection: int
    """GONE when it is closed already."""
    is_certain: bool
    """False when several connections had the same descriptor since the last look; then it is the newest of them."""
    frames: list[bytes]


class InboundConnections:
    """The connections to a socket that listens. Strangers may come and go: they have a connection and nothing else."""

    def __init__(self, socket: Socket, silence_s: float = SILENCE_S) -> None:
        """Make it before the socket binds."""
        keep_alive(socket, silence_s)
        self._socket = socket
        self.monitor: Socket = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        """Readable when connections have come or gone."""
        self._by_descriptor: dict[int, int] = {}
        self._standing: set[int] = set()
        self._last = GONE

    def stands(self, connection: int) -> bool:
        """As of the last `receive`."""
        return connection in self._standing

    def receive(self) -> list[Arrival]:
        """All messages that have arrived."""
        messages: list[tuple[int, list[bytes]]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                # The oldest versions of the protocol do not say whose message it is. Nobody of ours speaks them.
                with contextlib.suppress(zmq.ZMQError):
                    messages.append((int(frames[-1].get(zmq.SRCFD)), [frame.bytes for frame in frames]))
        # Afterwards: a message that has arrived has left the event of its connection before.
        reused = self._update()
        return [
            Arrival(self._by_descriptor.get(descriptor, GONE), descriptor not in reused, frames)
            for descriptor, frames in messages
        ]

    def _update(self) -> set[int]:
        """Take the events; the descriptors that more than one connection has had since the last look."""
        reused = set()
        had = set(self._by_descriptor)
        for event, descriptor in _events(self.monitor):
            self._standing.discard(self._by_descriptor.pop(descriptor, GONE))
            if event == zmq.EVENT_ACCEPTED:
                if descriptor in had:
                    reused.add(descriptor)
                had.add(descriptor)
                self._last += 1
                self._by_descriptor[descriptor] = self._last
                self._standing.add(self._last)
        return reused


class OutboundConnection:
    """The one connection of a socket that connects, and connects anew by itself."""

    def __init__(self, socket: Socket, silence_s: float = SILENCE_S) -> None:
        """Make it before the socket connects."""
        keep_alive(socket, silence_s)
        self.monitor: Socket = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        """Readable when the connection has come or gone."""
        self.was_lost = False
        """Whether it has ever gone, as of the last `stands`."""
        self._stands = False

    def stands(self) -> bool:
        for event, _ in _events(self.monitor):
            self._stands = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.was_lost = self.was_lost or not self._stands
        return self._stands
