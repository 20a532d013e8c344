"""A rank's hand in the handoff: performs its leader's commands on its own memory and transport."""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_worker.handoff.fabric import pattern
from kimi_worker.handoff.plan import Copy, digest_of_copies, num_bytes, plan_copies
from kimi_worker.handoff.transport import Completion, Region, Scratch, Transport, TransportError
from kimi_worker.protocol.handoff import (
    Connect,
    Disconnect,
    Disconnected,
    Fence,
    Fenced,
    Inspect,
    Inspected,
    RankCommand,
    RankReport,
    Revoke,
    Revoked,
    Stamp,
    Stamped,
    TransferKey,
    Watch,
    Write,
    Wrote,
)


@dataclass(frozen=True, slots=True)
class _StampPost:
    """A test write; `read_back` is what to read before it counts."""

    key: TransferKey
    peer: str
    read_back: list[Copy]


@dataclass(frozen=True, slots=True)
class _Post:
    """What is to be reported when a post of the transport ends."""

    key: TransferKey
    is_fence: bool
    digest: str = ""
    num_bytes: int = 0


class RankPort:
    """One rank's transport and its regions. `descriptor` goes to the leader for its Hello.

    Errors of peers become reports; TransportError is raised only when this rank's own transport fails.
    """

    def __init__(
        self, rank: int, transport: Transport, regions: Sequence[Region], scratch: Scratch | None = None
    ) -> None:
        """`rank` is the TP rank within the lane, from 0. The regions must outlive the port.

        Without a scratch test writes fail. Both ends have one or neither has.
        """
        self._rank = rank
        self._transport = transport
        self._layout = tuple(region.layout for region in regions)
        self._peers: dict[tuple[str, int], str] = {}
        self._unreachable: dict[tuple[str, int], str] = {}
        self._posts: dict[int, _Post | _StampPost] = {}
        self._scratch = scratch
        self._num_stamps = 0
        self._reports: list[RankReport] = []
        self.is_watching = False
        """Transfers may be open: call `poll` about every millisecond."""
        self.descriptor = transport.register(regions if scratch is None else [*regions, scratch.region])

    def execute(self, command: RankCommand) -> None:
        """Start what the leader asks for; the answers come from `poll`."""
        match command:
            case Connect():
                self._connect(command)
            case Disconnect():
                self._disconnect(command)
            case Write():
                self._write(command)
            case Fence():
                self._fence(command.write)
            case Stamp():
                self._stamp(command)
            case Inspect():
                self._inspect(command)
            case Watch():
                self.is_watching = command.active
            case Revoke():
                self.descriptor = self._transport.revoke()
                self._reports.append(Revoked(self._rank, self.descriptor))

    def poll(self) -> list[RankReport]:
        """Make progress (on the written side too) and return what has ended."""
        self._transport.pump()
        reports = [report for done in self._transport.poll() if (report := self._ended(done)) is not None]
        reports += self._reports
        self._reports = []
        return reports

    def close(self) -> None:
        self._transport.close()

    def _connect(self, command: Connect) -> None:
        name = (command.peer, command.epoch)
        try:
            self._peers[name] = self._transport.connect(command.ranks[self._rank])
        except TransportError as error:
            self._unreachable[name] = str(error)

    def _disconnect(self, command: Disconnect) -> None:
        name = (command.peer, command.epoch)
        self._unreachable.pop(name, None)
        if name in self._peers:
            self._transport.disconnect(self._peers.pop(name))
        self._reports.append(Disconnected(self._rank, command.peer, command.epoch))

    def _write(self, write: Write) -> None:
        peer, reason = self._peer_of(write.key)
        try:
            copies = plan_copies(self._layout, write)
        except ValueError as error:
            peer, reason, copies = None, str(error), []
        if peer is None:
            self._reports.append(Wrote(self._rank, write.key, reason, settled=True, digest="", num_bytes=0))
            return
        post = self._transport.post_write(peer, copies)
        self._posts[post] = _Post(write.key, False, digest_of_copies(copies), num_bytes(copies))

    def _fence(self, write: Write) -> None:
        peer, reason = self._peer_of(write.key)
        if peer is None:
            self._reports.append(Fenced(self._rank, write.key, reason))
            return
        post = self._transport.post_read_back(peer, plan_copies(self._layout, write))
        self._posts[post] = _Post(write.key, is_fence=True)

    def _stamp(self, stamp: Stamp) -> None:
        peer, reason = self._peer_of(stamp.key)
        if peer is None or self._scratch is None:
            self._reports.append(Stamped(self._rank, stamp.key, reason if peer is None else "this rank has no scratch"))
            return
        region = self._scratch.region
        size = region.layout.bytes_per_unit
        local, remote = self._num_stamps % region.num_units, stamp.key.number % region.num_units
        self._num_stamps += 1
        self._scratch.fill(local, pattern(stamp.nonce, self._rank, size))
        copies = [Copy(len(self._layout), local * size, remote * size, size)]
        post = self._transport.post_write(peer, copies)
        self._posts[post] = _StampPost(stamp.key, peer, copies if stamp.fence else [])

    def _inspect(self, inspect: Inspect) -> None:
        error = "this rank has no scratch"
        if self._scratch is not None:
            region = self._scratch.region
            found = self._scratch.read(inspect.number % region.num_units)
            is_there = found == pattern(inspect.nonce, self._rank, region.layout.bytes_per_unit)
            error = "" if is_there else f"found {found[:8].hex()}... instead of the pattern"
        self._reports.append(Inspected(self._rank, inspect.number, error))

    def _peer_of(self, key: TransferKey) -> tuple[str | None, str]:
        name = (key.peer, key.epoch)
        return self._peers.get(name), self._unreachable.get(name, f"not connected to {key.peer}")

    def _ended(self, done: Completion) -> RankReport | None:
        post = self._posts.pop(done.post, None)
        if post is None:
            return None
        if isinstance(post, _StampPost):
            return self._stamp_ended(post, done)
        if post.is_fence:
            return Fenced(self._rank, post.key, done.error)
        return Wrote(self._rank, post.key, done.error, done.settled, post.digest, post.num_bytes)

    def _stamp_ended(self, post: _StampPost, done: Completion) -> RankReport | None:
        if done.error or not post.read_back:
            return Stamped(self._rank, post.key, done.error)
        fence = self._transport.post_read_back(post.peer, post.read_back)
        self._posts[fence] = _StampPost(post.key, post.peer, [])
        return None
