"""The sockets of a lane's leader. Each link sends and receives one kind of message; none ever blocks on sending."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import zmq

from kimi_worker.engine.messages import FromRank, ToRank, rank_socket
from kimi_worker.protocol.engine import FromEngine, ToEngine, api_socket
from kimi_worker.protocol.handoff import LaneMessage

PEER_IDLE_S = 300.0
"""A connection to another lane that was not used for so long is closed."""

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


def new_context() -> Context:
    context: Context = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)
    context.setsockopt(zmq.LINGER, 0)
    # Messages are bounded by the lanes' limits; a dropped one would be a request without an answer.
    context.setsockopt(zmq.SNDHWM, 0)
    context.setsockopt(zmq.RCVHWM, 0)
    return context


def drain(socket: Socket) -> Iterator[list[bytes]]:
    """All messages that have arrived."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)


class ClientLink:
    """The lane's clients: the API process, the supervisor."""

    def __init__(self, context: Context, run_dir: Path, local_lane: int) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(api_socket(run_dir, local_lane))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[ToEngine](ToEngine)

    def send(self, client: bytes, message: FromEngine) -> None:
        """A client that has gone misses it."""
        self.socket.send_multipart([client, self._encoder.encode(message)])

    def receive(self) -> Iterator[tuple[bytes, ToEngine]]:
        for client, frame in drain(self.socket):
            yield client, self._decoder.decode(frame)


class PeerLink:
    """Control messages of the handoff. Lanes are known by the endpoints at which they receive."""

    def __init__(self, context: Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        # A peer that reconnects, or restarts at the same address, takes its old connection's place.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(endpoint)
        self._context = context
        self._endpoint = endpoint
        self._peers: dict[str, tuple[Socket, float]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(LaneMessage)

    def send(self, peer: str, message: LaneMessage, now: float) -> None:
        """Delivered when the peer can be reached soon; the sessions repeat what is lost."""
        for name, (_, used) in list(self._peers.items()):
            if now - used > PEER_IDLE_S:
                self._peers.pop(name)[0].close()
        socket = self._peers[peer][0] if peer in self._peers else self._dial(peer)
        self._peers[peer] = (socket, now)
        # Full: the peer cannot be reached, and has enough to read when it can.
        with contextlib.suppress(zmq.Again):
            socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> Iterator[tuple[str, LaneMessage]]:
        """Messages with their senders' endpoints. Raises nothing for garbage: anybody can reach the port."""
        for frames in drain(self.socket):
            with contextlib.suppress(msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, ValueError):
                sender, frame = frames
                yield sender.decode(), self._decoder.decode(frame)

    def _dial(self, peer: str) -> Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._endpoint.encode())
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.connect(peer)
        return socket


class FollowerLink:
    """One follower of the lane."""

    def __init__(self, context: Context, run_dir: Path, local: int) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.bind(rank_socket(run_dir, local))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

    def send(self, message: ToRank) -> None:
        self.socket.send(self._encoder.encode(message))

    def receive(self) -> Iterator[FromRank]:
        for (frame,) in drain(self.socket):
            yield self._decoder.decode(frame)


class LeaderLink:
    """A follower's end of FollowerLink."""

    def __init__(self, context: Context, run_dir: Path, local: int) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.connect(rank_socket(run_dir, local))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)

    def send(self, message: FromRank) -> None:
        self.socket.send(self._encoder.encode(message))

    def receive(self) -> Iterator[ToRank]:
        for (frame,) in drain(self.socket):
            yield self._decoder.decode(frame)
