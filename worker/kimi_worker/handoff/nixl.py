"""The handoff over NIXL with its UCX backend: CPU memory, or GPU memory where UCX supports the device.

The agent's own progress thread spins even when idle, so it stays off and `pump` makes the progress. UCX reports a write
as done only after flushing it, so completion is remote and no fence is needed.

Revoking works by ending the agent: its sockets or queue pairs and its registrations go, and with them every way into
this memory. (Removing the peer's agent does not: a peer that still has our address writes on. It also leaves two
sockets open for as long as both agents live, so idle connections are kept for hours rather than closed and made anew.)
That excludes UCX's shared-memory transports (cma, xpmem), by which a process of the same host writes
without asking: set UCX_TLS to tcp or to RDMA transports where decode and prefill may share a kernel.
"""

import contextlib
import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import nixl_cu12
import numpy as np
from nixl_cu12 import _bindings as bindings

from kimi_worker.handoff.plan import READ_BACK_BYTES, READ_BACK_LIMIT, Copy, read_back_targets
from kimi_worker.handoff.transport import Completion, Region, TransportError

NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")
)
# NIXL logs a line to stdout for each agent and backend
logging.getLogger("nixl").setLevel(logging.WARNING)

CONNECT_ERRORS: tuple[type[Exception], ...] = (msgspec.MsgspecError, *NIXL_ERRORS)
POST_ERRORS: tuple[type[Exception], ...] = (TransportError, *NIXL_ERRORS)
SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}
SCRATCH_BYTES = READ_BACK_BYTES * READ_BACK_LIMIT


class _RemoteRegion(msgspec.Struct, frozen=True, array_like=True):
    name: str
    pointer: int
    num_bytes: int
    device_id: int


class _Descriptor(msgspec.Struct, frozen=True):
    """What a peer needs to write into this rank."""

    agent: str
    segment: str
    metadata: bytes
    regions: list[_RemoteRegion]


@dataclass(slots=True)
class _Post:
    peer: str
    handle: "nixl_cu12.nixl_xfer_handle | None"
    settled: bool = False
    error: str = ""
    """Set once it has failed; it completes when NIXL lets go of the handle."""
    scratch: "ctypes.Array[ctypes.c_char] | None" = None
    expected: bytes = b""
    """What a read-back must find; empty where the local bytes are not in host memory."""


class NixlTransport:
    """One NIXL agent. `name` must differ from that of every agent a peer may still know (engine, epoch, rank)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_agents = 0
        self._agent: nixl_cu12.nixl_agent | None = None
        self._regions: list[Region] = []
        self._registered: list[bindings.nixlRegDList] = []
        self._peers: dict[str, _Descriptor] = {}
        self._posts: dict[int, _Post] = {}
        self._last_post = 0
        self._free_scratch: list[ctypes.Array[ctypes.c_char]] = []

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register the rank's memory once and return its descriptor for peers. Raises TransportError."""
        devices = {region.device for region in regions}
        if len(devices) != 1 or not devices <= SEGMENTS.keys():
            raise TransportError(f"regions on devices {sorted(devices)}: all must be on one of {sorted(SEGMENTS)}")
        self._regions = list(regions)
        return self._open()

    def connect(self, descriptor: bytes) -> str:
        """Load a peer's descriptor and return its handle. Raises TransportError."""
        try:
            peer = msgspec.msgpack.decode(descriptor, type=_Descriptor)
            if [region.name for region in peer.regions] != [region.layout.name for region in self._regions]:
                raise TransportError(f"agent {peer.agent} has regions {[region.name for region in peer.regions]}")
            self._live().add_remote_agent(peer.metadata)
        except CONNECT_ERRORS as error:
            raise TransportError(f"cannot load the peer's descriptor: {error}; is its agent still alive?") from error
        self._peers[peer.agent] = peer
        return peer.agent

    def post_write(self, peer: str, copies: Sequence[Copy]) -> int:
        """Start writing into the peer's memory; the post's Completion comes from `poll`."""
        segment = SEGMENTS[self._regions[0].device]
        return self._post("WRITE", peer, copies, (segment, self._local_ranges(copies)), None)

    def post_read_back(self, peer: str, copies: Sequence[Copy]) -> int:
        """Start reading a few bytes of each region that the copies wrote, behind those writes."""
        targets = read_back_targets(copies)
        scratch = self._free_scratch.pop() if self._free_scratch else self._new_scratch()
        ctypes.memset(scratch, 0, SCRATCH_BYTES)
        ranges, offset = np.empty((len(targets), 3), np.uint64), ctypes.addressof(scratch)
        for row, target in enumerate(targets):
            ranges[row] = (offset, target.num_bytes, 0)
            offset += target.num_bytes
        post = self._post("READ", peer, targets, ("DRAM", ranges), scratch)
        if self._regions[0].device == "cpu":
            self._posts[post].expected = b"".join(
                ctypes.string_at(self._regions[target.region].pointer + target.local_offset, target.num_bytes)
                for target in targets
            )
        return post

    def poll(self) -> list[Completion]:
        """Make progress and return the posts that have ended since the last call; each exactly once."""
        ended = []
        for number, post in list(self._posts.items()):
            if self._has_ended(post):
                del self._posts[number]
                if post.scratch is not None:
                    self._free_scratch.append(post.scratch)
                ended.append(Completion(number, post.error, post.settled))
        return ended

    def pump(self) -> None:
        """Make progress only, for the side that is written to."""
        self._live().get_new_notifs()

    def disconnect(self, peer: str) -> None:
        """Forget the peer; its open posts complete with an error and touch local memory no more."""
        if self._peers.pop(peer, None) is None:
            return
        for post in self._posts.values():
            if post.peer == peer and not post.error:
                post.error = f"disconnected from {peer}"
        # NIXL has forgotten a peer by itself when its connection broke
        with contextlib.suppress(bindings.nixlNotFoundError):
            self._live().remove_remote_agent(peer)

    def revoke(self) -> bytes:
        """Drop all connections and registrations, register anew, return the new descriptor. Raises TransportError."""
        self.close()
        return self._open()

    def close(self) -> None:
        """Give everything back; open posts are dropped. Raises TransportError."""
        if self._agent is None:
            return
        for post in self._posts.values():
            _release(post)
        try:
            for registered in self._registered:
                self._agent.deregister_memory(registered)
        except NIXL_ERRORS as error:
            raise TransportError(f"NIXL agent of {self._name} does not give its memory back: {error}") from error
        self._posts, self._registered, self._peers, self._free_scratch = {}, [], {}, []
        # Dropping the last reference ends the agent: its destructor closes the connections
        self._agent = None

    def _open(self) -> bytes:
        self._num_agents += 1
        name = f"{self._name}/{self._num_agents}"
        segment = SEGMENTS[self._regions[0].device]
        try:
            config = nixl_cu12.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            agent = self._agent = nixl_cu12.nixl_agent(name, config)
            ranges = [(region.pointer, region.num_bytes, region.device_id, "") for region in self._regions]
            self._registered.append(agent.register_memory(ranges, segment))
            metadata = agent.get_agent_metadata()
        except NIXL_ERRORS as error:
            raise TransportError(f"NIXL agent {name}: cannot register {segment} memory over UCX: {error}") from error
        regions = [
            _RemoteRegion(region.layout.name, region.pointer, region.num_bytes, region.device_id)
            for region in self._regions
        ]
        return msgspec.msgpack.encode(_Descriptor(name, segment, metadata, regions))

    def _live(self) -> "nixl_cu12.nixl_agent":
        assert self._agent is not None, f"transport {self._name} is used before register or after close"
        return self._agent

    def _new_scratch(self) -> "ctypes.Array[ctypes.c_char]":
        scratch = ctypes.create_string_buffer(SCRATCH_BYTES)
        ranges = [(ctypes.addressof(scratch), SCRATCH_BYTES, 0, "")]
        self._registered.append(self._live().register_memory(ranges, "DRAM"))
        return scratch

    def _post(
        self,
        operation: str,
        peer: str,
        copies: Sequence[Copy],
        local: tuple[str, np.ndarray],
        scratch: "ctypes.Array[ctypes.c_char] | None",
    ) -> int:
        self._last_post += 1
        post = self._posts[self._last_post] = _Post(peer, None, scratch=scratch)
        if peer not in self._peers:
            post.error, post.settled = f"not connected to {peer}", True
            return self._last_post
        agent = self._live()
        try:
            remote = agent.get_xfer_descs(self._remote_ranges(peer, copies), self._peers[peer].segment)
            post.handle = agent.initialize_xfer(operation, agent.get_xfer_descs(local[1], local[0]), remote, peer)
        except POST_ERRORS as error:
            post.error, post.settled = f"{operation} to {peer}: {error}", True
            return self._last_post
        try:
            if agent.transfer(post.handle) == "ERR":
                post.error = f"{operation} to {peer} failed when it was posted"
        except NIXL_ERRORS as error:
            post.error = f"{operation} to {peer}: {error}"
        return self._last_post

    def _has_ended(self, post: _Post) -> bool:
        if not post.error:
            try:
                state = self._live().check_xfer_state(post.handle)
            except NIXL_ERRORS as error:
                state, post.error = "ERR", f"transfer with {post.peer}: {error}"
            if state == "PROC":
                return False
            if state == "DONE":
                post.settled = True
                if (
                    post.expected
                    and post.scratch is not None
                    and post.scratch.raw[: len(post.expected)] != post.expected
                ):
                    post.error = f"read-back from {post.peer} does not find the bytes that were written"
            elif not post.error:
                post.error = f"transfer with {post.peer} failed"
        return _release(post)

    def _local_ranges(self, copies: Sequence[Copy]) -> np.ndarray:
        places = [(region.pointer, region.device_id) for region in self._regions]
        ranges = [(places[region][0] + offset, size, places[region][1]) for region, offset, _, size in copies]
        return np.array(ranges, np.uint64).reshape(-1, 3)

    def _remote_ranges(self, peer: str, copies: Sequence[Copy]) -> np.ndarray:
        places = [(region.pointer, region.num_bytes, region.device_id) for region in self._peers[peer].regions]
        ranges = []
        for region, _, offset, size in copies:
            pointer, region_bytes, device_id = places[region]
            if offset + size > region_bytes:
                name = self._peers[peer].regions[region].name
                raise TransportError(f"region {name} has {region_bytes} bytes, the copy ends at {offset + size}")
            ranges.append((pointer + offset, size, device_id))
        return np.array(ranges, np.uint64).reshape(-1, 3)


def _release(post: _Post) -> bool:
    """Give the handle back; False while NIXL still works on it and must be asked again."""
    if post.handle is None:
        return True
    try:
        post.handle.release()
    except NIXL_ERRORS:
        return False
    post.handle = None
    return True
