"""The sockets of a lane's leader. Each link sends and receives one kind of message; none ever blocks on sending."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import zmq

from kimi_worker.engine.connections import (
    GONE,
    SILENCE_S,
    Context,
    InboundConnections,
    OutboundConnection,
    Socket,
    drain,
)
from kimi_worker.engine.messages import FromRank, ToRank, rank_socket
from kimi_worker.protocol.engine import FromEngine, ToEngine, api_socket
from kimi_worker.protocol.handoff import LaneMessage, is_endpoint

log = structlog.get_logger()

PEER_IDLE_S = 300.0
"""A connection to another lane that was not used for so long is closed."""
MAX_PEERS = 256
"""Connections to other lanes at once; ZeroMQ holds about a thousand sockets. The one unused longest makes room."""
MAX_MESSAGE_BYTES = 64 << 20
"""Of a control message: a prompt of several million tokens."""


def new_context() -> Context:
    context: Context = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)
    context.setsockopt(zmq.LINGER, 0)
    # Messages are bounded by the lanes' limits; a dropped one would be a request without an answer.
    context.setsockopt(zmq.SNDHWM, 0)
    context.setsockopt(zmq.RCVHWM, 0)
    return context


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


@dataclass(slots=True)
class _Dialled:
    """A connection on which a peer is sent messages."""

    socket: Socket
    connection: OutboundConnection
    used: float

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close()


class PeerLink:
    """Control messages of the handoff. Lanes are known by the endpoints at which they receive.

    Anybody can reach the port, and endpoints come from messages and headers: neither may end this process.
    """

    def __init__(self, context: Context, endpoint: str, silence_s: float = SILENCE_S) -> None:
        self.socket = context.socket(zmq.ROUTER)
        # A peer that reconnects, or restarts at the same address, takes its old connection's place.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._inbound = InboundConnections(self.socket, silence_s)
        self.socket.bind(endpoint)
        self._context = context
        self._endpoint = endpoint
        self._silence_s = silence_s
        self._dialled: dict[str, _Dialled] = {}
        self._heard: dict[str, int] = {}
        """Connection of each peer's last message."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(LaneMessage)

    def send(self, peer: str, message: LaneMessage, now: float) -> None:
        """Delivered when the peer can be reached soon; the sessions repeat what is lost, and give up in the end."""
        self._close_unused(now)
        try:
            if peer not in self._dialled:
                self._dial(peer, now)
            self._dialled[peer].used = now
            self._dialled[peer].socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # Full: the peer cannot be reached, and has enough to read when it can.
            return
        except (zmq.ZMQError, ValueError) as error:
            log.warning("peer_not_dialled", peer=peer[:100], error=str(error))

    def receive(self) -> Iterator[tuple[str, LaneMessage]]:
        """Messages with their senders' endpoints. Raises nothing for garbage."""
        for arrival in self._inbound.receive():
            with contextlib.suppress(msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, ValueError):
                sender, frame = arrival.frames
                peer, message = sender.decode(), self._decoder.decode(frame)
                if is_endpoint(peer):
                    self._heard[peer] = arrival.connection if arrival.is_certain else GONE
                    yield peer, message

    def reached(self) -> list[str]:
        """Peers whose process answers pings on the connection to them."""
        return [peer for peer, dialled in self._dialled.items() if dialled.connection.stands()]

    def heard(self) -> list[str]:
        """Peers whose process still holds the connection that brought its last message: it is still the same one."""
        self._heard = {peer: number for peer, number in self._heard.items() if self._inbound.stands(number)}
        return list(self._heard)

    def _close_unused(self, now: float) -> None:
        for peer, dialled in list(self._dialled.items()):
            if now - dialled.used > PEER_IDLE_S:
                self._dialled.pop(peer).close()

    def _dial(self, peer: str, now: float) -> None:
        """Raises ValueError or ZMQError when there cannot be such a peer."""
        if not is_endpoint(peer):
            raise ValueError("want tcp://<IPv4 address>:<port> or tcp://[<IPv6 address>]:<port>")
        if len(self._dialled) >= MAX_PEERS:
            self._dialled.pop(min(self._dialled, key=lambda name: self._dialled[name].used)).close()
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.ROUTING_ID, self._endpoint.encode())
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            socket.setsockopt(zmq.SNDHWM, 1000)
            connection = OutboundConnection(socket, self._silence_s)
            socket.connect(peer)
        except zmq.ZMQError:
            socket.disable_monitor()
            socket.close()
            raise
        self._dialled[peer] = _Dialled(socket, connection, now)


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
