"""The handoff over MoRI-IO's RDMA backend, AMD's one-sided transfers between GPUs.

Not run on hardware: written against the library's documented interface and tested against a recording double of it.

What its documentation and its users' reports make this module do:
- A successful status means that the sender's NIC is done; the bytes may not yet be visible in the peer's memory. So
  `handoff.fence` must be `read_back`: a read behind the writes of every region, over the session that wrote them,
  pushes them out. A session is between two memories, so the read brings the bytes back to where they came from.
- `session.batch_write` and `batch_read` want lists and return one status; the engine's methods of the same names
  return one status a copy. Only sessions are used here, and both shapes are accepted.
- Target-side notifications stay off: nobody here takes them, and a full queue of them fails later transfers.
- Queue pairs, threads and service levels are MoRI's own variables (`MORI_IO_*`), set by the hardware profile. They win
  over what is passed here, so nothing of it is.
- Posted work cannot be called back: a disconnected post completes when its queue pair has given up.
"""

import importlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kimi_worker.handoff.plan import Copy, read_back_targets
from kimi_worker.handoff.transport import Completion, Region, TransportError

if TYPE_CHECKING:
    from mori import io as mori_io

LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, OSError)
"""What its bindings raise: they translate C++ exceptions."""
HOST_DEVICE_ID = -1
"""MoRI's device of host memory."""


class _Descriptor(msgspec.Struct, frozen=True):
    """What a peer needs to write into this rank: packed EngineDesc, and a packed MemoryDesc a region."""

    key: str
    engine: bytes
    memories: list[bytes]
    num_bytes: list[int]


@dataclass(slots=True)
class _Peer:
    engine: "mori_io.EngineDesc"
    num_bytes: list[int]
    sessions: list["mori_io.IOEngineSession"]
    """By region; one for writes and for the reads behind them, which say nothing of another session's queue pairs."""


@dataclass(slots=True)
class _Post:
    peer: str
    statuses: list["mori_io.TransferStatus"] = field(default_factory=list)
    error: str = ""
    was_posted: bool = False


class MoriioTransport:
    """One IOEngine. `name` must differ from that of every engine a peer may still know (engine, epoch, rank).

    Raises TransportError when the `mori` package is missing.
    """

    def __init__(self, name: str, host: str = "") -> None:
        """`host` is where peers reach the engine's control port; empty: the address of this host's (pod's) name."""
        try:
            self._mori = importlib.import_module("mori.io")
        except ImportError as error:
            raise TransportError(
                f"handoff.transport moriio needs the mori package of the ROCm image: {error}"
            ) from error
        self._name = name
        self._host = host or socket.gethostbyname(socket.gethostname())
        self._num_engines = 0
        self._engine: mori_io.IOEngine | None = None
        self._regions: list[Region] = []
        self._memories: list[mori_io.MemoryDesc] = []
        self._peers: dict[str, _Peer] = {}
        self._posts: dict[int, _Post] = {}
        self._last_post = 0

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register the rank's memory once and return its descriptor for peers. Raises TransportError."""
        self._regions = list(regions)
        return self._open()

    def connect(self, descriptor: bytes) -> str:
        """Load a peer's descriptor and return its handle. Raises TransportError."""
        try:
            peer = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise TransportError(f"cannot read the peer's descriptor: {error}") from error
        if len(peer.memories) != len(self._regions):
            raise TransportError(f"engine {peer.key} has {len(peer.memories)} regions, this rank {len(self._regions)}")
        try:
            self._peers[peer.key] = self._meet(peer)
        except LIBRARY_ERRORS as error:
            raise TransportError(f"cannot connect to engine {peer.key}: {error}") from error
        return peer.key

    def _meet(self, peer: _Descriptor) -> _Peer:
        """Raises TransportError, or what the library raises."""
        engine = self._live()
        remote_engine = self._mori.EngineDesc.unpack(peer.engine)
        remotes = [self._mori.MemoryDesc.unpack(memory) for memory in peer.memories]
        engine.register_remote_engine(remote_engine)
        sessions = []
        try:
            for local, remote in zip(self._memories, remotes, strict=True):
                sessions.append(engine.create_session(local, remote))
                if sessions[-1] is None:
                    raise TransportError(f"no session to engine {peer.key}; check that RDMA devices reach each other")
        except (TransportError, *LIBRARY_ERRORS):
            engine.deregister_remote_engine(remote_engine)
            raise
        return _Peer(remote_engine, peer.num_bytes, sessions)

    def post_write(self, peer: str, copies: Sequence[Copy]) -> int:
        """Start writing into the peer's memory; the post's Completion comes from `poll`."""
        post = self._new_post(peer)
        known = self._peers.get(peer)
        if known is None:
            return self._last_post
        for region, session in enumerate(known.sessions):
            mine = [copy for copy in copies if copy.region == region]
            if not mine or post.error:
                continue
            if max(copy.remote_offset + copy.num_bytes for copy in mine) > known.num_bytes[region]:
                post.error = f"a copy ends beyond region {self._regions[region].layout.name} of {peer}"
                continue
            self._add(post, session.batch_write, mine, session)
        return self._last_post

    def post_read_back(self, peer: str, copies: Sequence[Copy]) -> int:
        """Start reading a few bytes of each region that the copies wrote, behind those writes.

        They come back to where they were written from: that they come is what counts, not what they bring.
        """
        post = self._new_post(peer)
        known = self._peers.get(peer)
        if known is None:
            return self._last_post
        targets = read_back_targets(copies)
        for region, session in enumerate(known.sessions):
            mine = [target for target in targets if target.region == region]
            if mine and not post.error:
                self._add(post, session.batch_read, mine, session)
        return self._last_post

    def poll(self) -> list[Completion]:
        """Return the posts that have ended since the last call; each exactly once. MoRI's threads make the progress."""
        ended = []
        for number, post in list(self._posts.items()):
            if any(status.InProgress() for status in post.statuses):
                continue
            failed = next((status for status in post.statuses if not status.Succeeded()), None)
            if failed is not None and not post.error:
                post.error = f"transfer with {post.peer}: {failed.Code()}: {failed.Message()}"
            del self._posts[number]
            ended.append(Completion(number, post.error, settled=not post.error or not post.was_posted))
        return ended

    def pump(self) -> None:
        """Nothing: the NIC writes without this side's help."""

    def disconnect(self, peer: str) -> None:
        """Forget the peer; its open posts complete with an error once their queue pairs have given up."""
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for post in self._posts.values():
            if post.peer == peer and not post.error:
                post.error = f"disconnected from {peer}"
        self._live().deregister_remote_engine(known.engine)

    def revoke(self) -> bytes:
        """Deregister all memory, which makes the NIC refuse late writes, and start anew under another name."""
        self.close()
        return self._open()

    def close(self) -> None:
        """Give everything back; open posts are dropped."""
        if self._engine is None:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        for memory in self._memories:
            self._engine.deregister_memory(memory)
        self._memories, self._posts, self._engine = [], {}, None

    def _open(self) -> bytes:
        self._num_engines += 1
        key = f"{self._name}/{self._num_engines}"
        try:
            return self._open_as(key)
        except LIBRARY_ERRORS as error:
            raise TransportError(
                f"MoRI-IO engine {key}: cannot register memory: {error}; check the RDMA devices and IPC_LOCK"
            ) from error

    def _open_as(self, key: str) -> bytes:
        """Raises what the library raises."""
        mori = self._mori
        engine = self._engine = mori.IOEngine(key, mori.IOEngineConfig(host=self._host, port=0))
        backend = mori.RdmaBackendConfig(enable_notification=False)
        engine.create_backend(mori.BackendType.RDMA, backend)
        places = {"cpu": mori.MemoryLocationType.CPU, "cuda": mori.MemoryLocationType.GPU}
        for region in self._regions:
            device_id = region.device_id if region.device == "cuda" else HOST_DEVICE_ID
            memory = engine.register_memory(region.pointer, region.num_bytes, device_id, places[region.device])
            self._memories.append(memory)
        exported = [memory.pack() for memory in self._memories]
        num_bytes = [region.num_bytes for region in self._regions]
        return msgspec.msgpack.encode(_Descriptor(key, engine.get_engine_desc().pack(), exported, num_bytes))

    def _live(self) -> "mori_io.IOEngine":
        assert self._engine is not None, f"transport {self._name} is used before register or after close"
        return self._engine

    def _new_post(self, peer: str) -> _Post:
        self._last_post += 1
        post = self._posts[self._last_post] = _Post(peer)
        if peer not in self._peers:
            post.error = f"not connected to {peer}"
        return post

    def _add(
        self,
        post: _Post,
        operation: "mori_io.BatchOperation",
        copies: Sequence[Copy],
        session: "mori_io.IOEngineSession",
    ) -> None:
        local_offsets = [copy.local_offset for copy in copies]
        remote_offsets = [copy.remote_offset for copy in copies]
        sizes = [copy.num_bytes for copy in copies]
        post.was_posted = True
        try:
            result = operation(local_offsets, remote_offsets, sizes, session.allocate_transfer_uid())
        except LIBRARY_ERRORS as error:
            post.error = f"transfer with {post.peer} was not posted: {error}"
            return
        post.statuses += list(result) if isinstance(result, (list, tuple)) else [result]
