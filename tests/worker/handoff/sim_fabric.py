"""A simulated fabric and network on a virtual clock, with seeded faults, over real bytes.

`Loop` runs events in virtual time. `SimTransport` moves bytes between bytearrays in pieces that are read late, land
late and out of order, complete before they land where the fabric is told so, break off, and land after the breaking.
`SimNetwork` delays, reorders, repeats and loses control messages, and cuts endpoints off from each other for a while.
`sim_lanes.py` puts lanes with toy engines on top and checks the invariants of the handoff.
"""

import functools
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kimi_worker.handoff.fabric import SCRATCH_UNITS
from kimi_worker.handoff.plan import Copy, RegionLayout, Unit, read_back_targets
from kimi_worker.handoff.transport import Completion, Region, TransportError
from kimi_worker.protocol.handoff import LaneMessage

SCRATCH_LAYOUT = RegionLayout("scratch", Unit.SCRATCH, 40)


class Loop:
    """Events in virtual time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + max(0.0, delay), next(self._order), event))

    def run(self, until: float, max_events: int = 100_000) -> None:
        """Run all events up to a time. Raises RuntimeError when there are too many: they chase each other."""
        for _ in range(max_events):
            if not self._events or self._events[0][0] > until:
                self.now = until
                return
            self.now, _, event = heapq.heappop(self._events)
            event()
        raise RuntimeError(f"{max_events} events by {self.now:.3f} s of virtual time, and no end")


@dataclass(slots=True)
class Faults:
    """Chances are per message or per post; times in seconds."""

    lose_message: float = 0.0
    repeat_message: float = 0.0
    late_message: float = 0.0
    latest_message_s: float = 8.0
    slow_write: float = 0.0
    """Chance that a piece takes up to slowest_write_s instead of milliseconds."""
    slowest_write_s: float = 4.0
    drop_writes: bool = False
    """Bytes are lost on the way, and the writes are reported done all the same."""
    break_wire: float = 0.0
    """Chance that a connection breaks while a post is under way."""

    def stop(self) -> None:
        self.lose_message = self.repeat_message = self.late_message = self.slow_write = self.break_wire = 0.0


class SimNetwork:
    """Carries control messages between endpoints, badly."""

    def __init__(self, loop: Loop, rng: random.Random, faults: Faults) -> None:
        self._loop = loop
        self._rng = rng
        self._faults = faults
        self.receivers: dict[str, Callable[[str, LaneMessage], None]] = {}
        """By endpoint; a lane that is down has none."""
        self.cut: set[frozenset[str]] = set()
        """Pairs of endpoints that do not reach each other now."""
        self._speakers: dict[tuple[str, str], object] = {}
        """Who sent the last message that a target got from a source: a process, not only its endpoint."""

    def reached(self, source: str) -> list[str]:
        """Endpoints whose process would answer a ping, as its connection does also while it is busy."""
        return [target for target in self.receivers if frozenset((source, target)) not in self.cut]

    def heard(self, target: str) -> list[str]:
        """Endpoints of which the process that sent the last message still holds its connection."""
        return [
            source
            for source in self.reached(target)
            if self._speakers.get((source, target)) is self.receivers.get(source)
        ]

    def send(self, source: str, target: str, message: LaneMessage) -> None:
        speaker = self.receivers.get(source)
        copies = 2 if self._rng.random() < self._faults.repeat_message else 1
        for _ in range(copies):
            if self._rng.random() < self._faults.lose_message:
                continue
            late = self._rng.random() < self._faults.late_message
            delay = self._rng.uniform(0, self._faults.latest_message_s if late else 0.02)
            self._loop.after(delay, lambda: self._deliver(source, target, message, speaker))

    def _deliver(self, source: str, target: str, message: LaneMessage, speaker: object) -> None:
        if frozenset((source, target)) in self.cut:
            return
        receiver = self.receivers.get(target)
        if receiver is not None:
            self._speakers[source, target] = speaker
            receiver(source, message)


@dataclass(slots=True)
class _Wire:
    """One connection from a transport to a peer's memory."""

    target: str
    is_broken: bool = False
    in_flight: int = 0
    """Pieces that have been read and not yet landed."""


@dataclass(slots=True)
class _Post:
    number: int
    wire: _Wire
    unread: int
    unlanded: int
    error: str = ""
    has_ended: bool = False


@dataclass(slots=True)
class Fabric:
    """All registered memories, by descriptor; a revoked or dead one is no longer here."""

    loop: Loop
    rng: random.Random
    faults: Faults
    completes_locally: bool = False
    """Writes complete when they have been read, before they land: only a read-back shows that they did."""
    piece_bytes: int = 24
    memories: dict[str, "SimTransport"] = field(default_factory=dict)
    check_source: Callable[["SimTransport", int, int], None] = lambda *_: None
    """Called with each range of local memory when a write reads it."""
    check_landing: Callable[["SimTransport", "SimTransport"], None] = lambda *_: None
    """Called with source and target when bytes land."""


class SimScratch:
    """The part of a rank's memory where test writes go, from a given address on."""

    def __init__(self, memory: bytearray, start: int) -> None:
        self._memory = memory
        self.region = Region(SCRATCH_LAYOUT, start, SCRATCH_UNITS)

    def fill(self, unit: int, data: bytes) -> None:
        start = self.region.pointer + unit * SCRATCH_LAYOUT.bytes_per_unit
        self._memory[start : start + len(data)] = data

    def read(self, unit: int) -> bytes:
        start = self.region.pointer + unit * SCRATCH_LAYOUT.bytes_per_unit
        return bytes(self._memory[start : start + SCRATCH_LAYOUT.bytes_per_unit])


class SimTransport:
    """A transport whose memory is `memory`; a region's pointer is an offset into it."""

    def __init__(self, fabric: Fabric, name: str, memory: bytearray) -> None:
        self._fabric = fabric
        self._name = name
        self._num_registered = 0
        self._descriptor = ""
        self._regions: list[Region] = []
        self._wires: dict[str, _Wire] = {}
        self._posts: dict[int, _Post] = {}
        self._ended: list[Completion] = []
        self._last_post = 0
        self.memory = memory
        self.is_alive = True
        self.on_ended: Callable[[], None] = lambda: None
        """Called when `poll` has something to return."""
        self.makes_progress: Callable[[], bool] = lambda: True
        """Whether the owner pumps: writes land here only while it does."""

    def register(self, regions: Sequence[Region]) -> bytes:
        self._regions = list(regions)
        return self.revoke()

    def revoke(self) -> bytes:
        self._fabric.memories.pop(self._descriptor, None)
        self._num_registered += 1
        self._descriptor = f"{self._name}/{self._num_registered}"
        self._fabric.memories[self._descriptor] = self
        for peer in list(self._wires):
            self.disconnect(peer)
        return self._descriptor.encode()

    def close(self) -> None:
        """The process ends: what has not been read is never sent, what has been read is still under way."""
        self.is_alive = False
        self._fabric.memories.pop(self._descriptor, None)

    def connect(self, descriptor: bytes) -> str:
        peer = descriptor.decode()
        if peer not in self._fabric.memories:
            raise TransportError(f"no memory {peer}: its process is gone or has revoked it")
        self._wires[peer] = _Wire(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        wire = self._wires.pop(peer, None)
        if wire is not None:
            self._break(wire, f"disconnected from {peer}")

    def break_wires(self) -> None:
        """The fabric loses this transport's connections; the process notices when it uses them."""
        for wire in self._wires.values():
            self._break(wire, "the connection broke")

    def post_write(self, peer: str, copies: Sequence[Copy]) -> int:
        pieces = [piece for copy in copies for piece in self._pieces(copy)]
        post = self._new_post(peer, len(pieces))
        if post.has_ended:
            return post.number
        for piece in pieces:
            self._fabric.loop.after(self._delay(), functools.partial(self._read, post, *piece))
        if self._fabric.rng.random() < self._fabric.faults.break_wire:
            self._fabric.loop.after(self._delay(), lambda: self._break(post.wire, "the connection broke"))
        return post.number

    def post_read_back(self, peer: str, copies: Sequence[Copy]) -> int:
        post = self._new_post(peer, len(read_back_targets(copies)))
        if not post.has_ended:
            self._fabric.loop.after(self._delay(), lambda: self._read_back(post))
        return post.number

    def poll(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def pump(self) -> None:
        """Progress is `makes_progress`."""

    def _new_post(self, peer: str, num_pieces: int) -> _Post:
        self._last_post += 1
        wire = self._wires.get(peer)
        if wire is None or wire.is_broken:
            post = _Post(self._last_post, wire or _Wire(peer, True), 0, 0, has_ended=True)
            self._ended.append(Completion(post.number, f"not connected to {peer}"))
            self._fabric.loop.after(0.001, self.on_ended)
            return post
        post = self._posts[self._last_post] = _Post(self._last_post, wire, num_pieces, num_pieces)
        return post

    def _delay(self) -> float:
        rng, faults = self._fabric.rng, self._fabric.faults
        return rng.uniform(0.0, faults.slowest_write_s if rng.random() < faults.slow_write else 0.01)

    def _pieces(self, copy: Copy) -> list[tuple[int, int, int]]:
        """Cut a copy into (local address, remote offset in the peer's region order, size)."""
        start = self._regions[copy.region].pointer + copy.local_offset
        remote = self._regions[copy.region].pointer + copy.remote_offset
        step = self._fabric.piece_bytes
        return [(start + at, remote + at, min(step, copy.num_bytes - at)) for at in range(0, copy.num_bytes, step)]

    def _read(self, post: _Post, source: int, target: int, size: int) -> None:
        if not self.is_alive or post.has_ended:
            return
        self._fabric.check_source(self, source, source + size)
        data = bytes(self.memory[source : source + size])
        post.unread -= 1
        post.wire.in_flight += 1
        self._fabric.loop.after(self._delay(), lambda: self._land(post, target, data))
        if post.unread == 0 and self._fabric.completes_locally:
            self._end(post)

    def _land(self, post: _Post, target: int, data: bytes) -> None:
        memory = self._fabric.memories.get(post.wire.target)
        if memory is None:
            post.wire.in_flight -= 1
            self._break(post.wire, "the peer is gone")
            return
        if not memory.makes_progress():
            self._fabric.loop.after(0.02, lambda: self._land(post, target, data))
            return
        self._fabric.check_landing(self, memory)
        if not self._fabric.faults.drop_writes:
            memory.memory[target : target + len(data)] = data
        post.wire.in_flight -= 1
        post.unlanded -= 1
        if post.unlanded == 0:
            self._end(post)

    def _read_back(self, post: _Post) -> None:
        if post.has_ended or not self.is_alive:
            return
        if post.wire.target not in self._fabric.memories:
            self._break(post.wire, "the peer is gone")
        elif post.wire.in_flight:
            self._fabric.loop.after(0.005, lambda: self._read_back(post))
        else:
            self._end(post)

    def _break(self, wire: _Wire, reason: str) -> None:
        wire.is_broken = True
        for post in [post for post in self._posts.values() if post.wire is wire]:
            self._end(post, reason)

    def _end(self, post: _Post, error: str = "") -> None:
        if post.has_ended or not self.is_alive:
            return
        post.has_ended = True
        del self._posts[post.number]
        self._ended.append(Completion(post.number, error, settled=not error))
        self._fabric.loop.after(self._delay(), self.on_ended)
