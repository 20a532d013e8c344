"""A rank's hand in the handoff: performs its leader's commands on its own memory and transport."""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_worker.handoff.plan import digest_of_copies, num_bytes, plan_copies
from kimi_worker.handoff.transport import Completion, Region, Transport, TransportError
from kimi_worker.protocol.handoff import (
    Connect,
    Disconnect,
    Disconnected,
    Fence,
    Fenced,
    RankCommand,
    RankReport,
    Revoke,
    Revoked,
    TransferKey,
    Watch,
    Write,
    Wrote,
)


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

    def __init__(self, rank: int, transport: Transport, regions: Sequence[Region]) -> None:
        """`rank` is the TP rank within the lane, from 0. The regions must outlive the port."""
        self._rank = rank
        self._transport = transport
        self._layout = tuple(region.layout for region in regions)
        self._peers: dict[tuple[str, int], str] = {}
        self._unreachable: dict[tuple[str, int], str] = {}
        self._posts: dict[int, _Post] = {}
        self._reports: list[RankReport] = []
        self.is_watching = False
        """Transfers may be open: call `poll` about every millisecond."""
        self.descriptor = transport.register(regions)

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

    def _peer_of(self, key: TransferKey) -> tuple[str | None, str]:
        name = (key.peer, key.epoch)
        return self._peers.get(name), self._unreachable.get(name, f"not connected to {key.peer}")

    def _ended(self, done: Completion) -> RankReport | None:
        post = self._posts.pop(done.post, None)
        if post is None:
            return None
        if post.is_fence:
            return Fenced(self._rank, post.key, done.error)
        return Wrote(self._rank, post.key, done.error, done.settled, post.digest, post.num_bytes)
