"""Prefill's half of the handoff: transfers that decode lanes asked for. See session.py for the story."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kimi_worker.handoff.actions import (
    Action,
    CancelCompute,
    Enqueue,
    FreeSource,
    LaneIdentity,
    Send,
    Timing,
    ToRanks,
)
from kimi_worker.handoff.plan import digest_of_reservation, transfer_bytes
from kimi_worker.protocol.engine import SampledToken
from kimi_worker.protocol.handoff import (
    Abort,
    Aborted,
    Accepted,
    Connect,
    Disconnect,
    Disconnected,
    Fence,
    Fenced,
    Hello,
    Prefill,
    Probe,
    Probed,
    Query,
    RankReport,
    Ready,
    Refused,
    Release,
    Stamp,
    Stamped,
    ToDecode,
    ToPrefill,
    TransferKey,
    Watch,
    Write,
    Wrote,
)

FAULTY_WRITE_DELAY_S = 0.2
"""With the fault notify_before_writes_land: from Ready to the writes, as on a fabric whose completion is only local."""

LINEAGE = 2**20
"""Epochs of one process follow each other from a random first one; those of two processes are further apart."""


class TransferState(Enum):
    QUEUED = "queued"
    WRITING = "writing"
    FENCED = "fenced"
    RELEASED = "released"
    ABORTED = "aborted"


class LinkState(Enum):
    OPEN = "open"
    CLOSING = "closing"
    """Being disconnected; writes are still ending."""
    CLOSED = "closed"
    """Only remembered, to answer repetitions truthfully."""


@dataclass(slots=True)
class _Transfer:
    key: TransferKey
    request: Prefill | None
    """None once ended, and for an Abort that came before its Prefill."""
    state: TransferState
    deadline: float
    is_wanted: bool = True
    source: tuple[list[int], int] | None = None
    """Local pages and slot, held from `computed` until FreeSource."""
    pending: set[int] = field(default_factory=set)
    """Ranks that have not yet reported the writes, or the fence."""
    error: str = ""
    settled: bool = True
    started: float = 0.0
    write_at: float | None = None
    """When the writes go out; only with the fault notify_before_writes_land."""
    write: Write | None = None
    ready: Ready | None = None
    answer: Refused | Aborted | None = None
    """What repetitions are answered with after the end."""
    next_send: float = 0.0
    interval: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.state in (TransferState.QUEUED, TransferState.WRITING, TransferState.FENCED)


@dataclass(slots=True)
class _Probe:
    """The last test write that a decode lane has asked for."""

    number: int
    started: float
    pending: set[int]
    error: str = ""


@dataclass(slots=True)
class _Link:
    """One epoch of a decode lane."""

    peer: str
    epoch: int
    heard_at: float
    state: LinkState = LinkState.OPEN
    oldest: int = 0
    """Numbers below are closed at decode."""
    transfers: dict[int, _Transfer] = field(default_factory=dict)
    disconnecting: set[int] = field(default_factory=set)
    probe: _Probe | None = None

    @property
    def is_probing(self) -> bool:
        return self.probe is not None and bool(self.probe.pending)

    @property
    def is_busy(self) -> bool:
        return self.is_probing or bool(self.open_transfers())

    def open_transfers(self) -> list[_Transfer]:
        return [transfer for transfer in self.transfers.values() if transfer.is_open]


class PrefillSide:
    """Table of the transfers of one prefill lane. Every call returns the actions to perform, in order."""

    def __init__(
        self, identity: LaneIdentity, timing: Timing, *, fence: bool = False, notify_before_writes_land: bool = False
    ) -> None:
        self._identity = identity
        self._timing = timing
        self._fence = fence
        self._notify_early = notify_before_writes_land
        self._links: dict[tuple[str, int], _Link] = {}
        self._current: dict[str, int] = {}
        self._watching = False

    @property
    def num_open(self) -> int:
        """Transfers that are queued, being written, or not yet released."""
        return sum(len(link.open_transfers()) for link in self._links.values())

    def receive(self, peer: str, message: ToPrefill, now: float) -> list[Action]:
        if isinstance(message, Hello):
            return self._finish(self._meet(peer, message, now))
        return self._finish(self._told(peer, message, now))

    def see(self, peer: str, now: float) -> None:
        """The process that sent the peer's last message lives, however long it says nothing: it is in a long step."""
        epoch = self._current.get(peer)
        link = self._links.get((peer, epoch)) if epoch is not None else None
        if link is not None and link.state is LinkState.OPEN and link.is_busy:
            link.heard_at = now

    def computed(
        self, key: TransferKey, page_ids: list[int], slot: int, first: SampledToken, now: float
    ) -> list[Action]:
        """The prompt is in these pages and this slot; they are the session's until FreeSource."""
        transfer = self._find(key)
        if transfer is None or transfer.state is not TransferState.QUEUED:
            return [FreeSource(key)]
        assert transfer.request is not None, f"{key} is queued without a request"
        request = transfer.request
        if len(page_ids) != len(request.page_ids):
            text = f"the prompt fills {len(page_ids)} pages, decode reserved {len(request.page_ids)}"
            return self._finish([FreeSource(key), *self._refuse(transfer, "handoff_failed", text)])
        transfer.state, transfer.source, transfer.started = TransferState.WRITING, (page_ids, slot), now
        num_bytes = transfer_bytes(self._identity.layout, len(page_ids)) * self._identity.num_ranks
        transfer.ready = Ready(
            number=key.number,
            epoch=self._identity.epoch,
            peer_epoch=key.epoch,
            digest=digest_of_reservation(self._identity.layout, request.page_ids, request.slot),
            first=first,
            num_bytes=num_bytes,
            seconds=0.0,
        )
        if not self._notify_early:
            return self._finish([self._write(transfer, now)])
        transfer.write_at = now + FAULTY_WRITE_DELAY_S
        return self._finish([self._send_ready(transfer, now)])

    def fail(self, key: TransferKey, code: str, message: str, now: float) -> list[Action]:
        """The scheduler does not take the request or cannot compute it; nothing is held for it any more."""
        del now
        transfer = self._find(key)
        if transfer is None or transfer.state is not TransferState.QUEUED:
            return []
        return self._finish(self._refuse(transfer, code, message))

    def report(self, report: RankReport, now: float) -> list[Action]:
        match report:
            case Wrote():
                actions = self._wrote(report, now)
            case Fenced():
                actions = self._fenced(report, now)
            case Stamped():
                actions = self._stamped(report)
            case Disconnected():
                link = self._links.get((report.peer, report.epoch))
                if link is not None:
                    link.disconnecting.discard(report.rank)
                actions = []
            case _:
                actions = []
        return self._finish(actions)

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for link in list(self._links.values()):
            actions += self._tick_link(link, now)
            for transfer in link.open_transfers():
                actions += self._tick_transfer(link, transfer, now)
        return self._finish(actions)

    def next_deadline(self) -> float | None:
        """When `tick` is next wanted, in the clock of `now`; None when nothing is open."""
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        for link in self._links.values():
            if link.state is LinkState.OPEN and link.is_busy:
                yield link.heard_at + self._timing.silence_s
            if link.state is LinkState.OPEN and link.is_probing and link.probe is not None:
                yield link.probe.started + self._timing.write_timeout_s
            for transfer in link.open_transfers():
                if transfer.state is TransferState.QUEUED:
                    yield transfer.deadline
                elif transfer.state is TransferState.FENCED:
                    yield transfer.next_send
                elif transfer.write_at is not None:
                    yield transfer.write_at
                elif link.state is LinkState.OPEN:
                    yield transfer.started + self._timing.write_timeout_s

    def _find(self, key: TransferKey) -> _Transfer | None:
        link = self._links.get((key.peer, key.epoch))
        return None if link is None else link.transfers.get(key.number)

    # Links

    def _meet(self, peer: str, hello: Hello, now: float) -> list[Action]:
        answer = self._hello(peer, hello.epoch)
        if hello.layout_hash != self._identity.layout_hash:
            # Decode sees the difference in the answer; without a link nothing is ever written
            return [answer]
        if len(hello.ranks) != self._identity.num_ranks:
            return []
        actions: list[Action] = []
        current = self._current.get(peer)
        if current is not None and 0 < current - hello.epoch < LINEAGE:
            # Overtaken by one of a newer epoch of the same process
            return []
        if current is not None and current != hello.epoch:
            actions += self._close(self._links[peer, current], f"{peer} took a new epoch")
        link = self._links.get((peer, hello.epoch))
        if link is None or link.state is LinkState.CLOSED:
            if link is None:
                link = self._links[peer, hello.epoch] = _Link(peer, hello.epoch, now)
            link.state = LinkState.OPEN
            self._current[peer] = hello.epoch
            actions.append(ToRanks(Connect(peer, hello.epoch, hello.ranks)))
        if link.state is LinkState.CLOSING:
            return actions
        link.heard_at = now
        return [*actions, *self._close_numbers_below(link, hello.oldest), answer]

    def _hello(self, peer: str, peer_epoch: int) -> Action:
        me = self._identity
        return Send(peer, Hello(me.engine, me.epoch, me.layout_hash, [], peer_epoch))

    def _answer_stranger(self, peer: str, message: Prefill | Query | Abort | Release | Probe) -> list[Action]:
        """A peer that was forgotten: whether its old writes have ended is not known any more."""
        if isinstance(message, Release | Probe):
            return []
        key = TransferKey(peer, message.epoch, message.number)
        return [Send(peer, self._aborted(key, "the peer was forgotten after a long silence", settled=False))]

    def _close_numbers_below(self, link: _Link, oldest: int) -> list[Action]:
        """Decode has closed these; what they hold here goes, and they are not remembered."""
        link.oldest = max(link.oldest, oldest)
        actions: list[Action] = []
        for transfer in list(link.transfers.values()):
            if transfer.key.number >= link.oldest:
                continue
            actions += self._stop(transfer, "decode has closed the transfer")
            # One whose writes are still ending goes with a later Hello
            if not transfer.is_open:
                del link.transfers[transfer.key.number]
        return actions

    def _close(self, link: _Link, reason: str) -> list[Action]:
        if link.state is not LinkState.OPEN:
            return []
        link.state = LinkState.CLOSING
        actions = [action for transfer in link.open_transfers() for action in self._stop(transfer, reason)]
        link.disconnecting = set(range(self._identity.num_ranks))
        return [*actions, ToRanks(Disconnect(link.peer, link.epoch))]

    def _tick_link(self, link: _Link, now: float) -> list[Action]:
        # Compare with the same sums as `_deadlines`: rounding must not let a tick at its own deadline do nothing
        patience = self._timing.silence_s if link.is_busy else self._timing.forget_s
        if link.state is LinkState.OPEN and now >= link.heard_at + patience:
            return self._close(link, f"{link.peer} has been silent for {patience:g} s")
        limit_s = self._timing.write_timeout_s
        if link.state is LinkState.OPEN and link.is_probing and link.probe and now >= link.probe.started + limit_s:
            return self._close(link, f"a test write did not end within {limit_s:g} s")
        if link.state is LinkState.CLOSED and now >= link.heard_at + self._timing.forget_s:
            del self._links[link.peer, link.epoch]
            if self._current.get(link.peer) == link.epoch:
                del self._current[link.peer]
        return []

    # One transfer

    def _told(self, peer: str, message: Prefill | Query | Abort | Release | Probe, now: float) -> list[Action]:
        if message.peer_epoch != self._identity.epoch:
            return [self._hello(peer, message.epoch)]
        link = self._links.get((peer, message.epoch))
        if link is None:
            return self._answer_stranger(peer, message)
        if link.state is LinkState.OPEN:
            link.heard_at = now
        if isinstance(message, Probe):
            return self._test(link, message, now)
        return [] if message.number < link.oldest else self._told_on_link(link, message, now)

    def _told_on_link(self, link: _Link, message: Prefill | Query | Abort | Release, now: float) -> list[Action]:
        match message:
            case Prefill():
                return self._asked(link, message, now)
            case Query():
                return self._asked_where(link, message, now)
            case Abort():
                return self._abort(link, message, now)
            case Release():
                return self._release(link, message)

    def _test(self, link: _Link, message: Probe, now: float) -> list[Action]:
        """Have every rank write into its peer's scratch, or repeat how that ended."""
        if link.probe is not None and link.probe.number == message.number:
            return [] if link.probe.pending else [self._probed(link, link.probe)]
        if link.state is not LinkState.OPEN:
            return []
        link.probe = _Probe(message.number, now, set(range(self._identity.num_ranks)))
        key = TransferKey(link.peer, link.epoch, message.number)
        return [ToRanks(Stamp(key, message.nonce, self._fence))]

    def _stamped(self, report: Stamped) -> list[Action]:
        link = self._links.get((report.key.peer, report.key.epoch))
        if link is None or link.probe is None or link.probe.number != report.key.number:
            return []
        probe = link.probe
        probe.pending.discard(report.rank)
        if report.error:
            probe.error = f"rank {report.rank}: {report.error}"
        if probe.pending:
            return []
        answer = self._probed(link, probe)
        # A connection that does not carry a test write carries nothing: decode's next Hello makes a new one
        broken = bool(probe.error) and not link.open_transfers()
        return [answer, *(self._close(link, probe.error) if broken else [])]

    def _probed(self, link: _Link, probe: _Probe) -> Action:
        return Send(link.peer, Probed(probe.number, self._identity.epoch, link.epoch, probe.error))

    def _asked(self, link: _Link, message: Prefill, now: float) -> list[Action]:
        key = TransferKey(link.peer, link.epoch, message.number)
        known = link.transfers.get(message.number)
        if known is not None:
            return self._repeat(known, now)
        if link.state is not LinkState.OPEN or len(set(message.page_ids)) != len(message.page_ids):
            transfer = self._remember(key, TransferState.QUEUED)
            text = "the connection is being closed" if link.state is not LinkState.OPEN else "a page is named twice"
            return self._refuse(transfer, "handoff_failed", text)
        transfer = _Transfer(key, message, TransferState.QUEUED, now + message.deadline_s)
        link.transfers[key.number] = transfer
        return [*self._repeat(transfer, now), Enqueue(key, message.token_ids, message.sampling)]

    def _asked_where(self, link: _Link, message: Query, now: float) -> list[Action]:
        known = link.transfers.get(message.number)
        if known is not None:
            return self._repeat(known, now)
        key = TransferKey(link.peer, link.epoch, message.number)
        return self._end(self._remember(key, TransferState.QUEUED), "the transfer is not known")

    def _remember(self, key: TransferKey, state: TransferState) -> _Transfer:
        transfer = _Transfer(key, None, state, deadline=0.0)
        self._links[key.peer, key.epoch].transfers[key.number] = transfer
        return transfer

    def _repeat(self, transfer: _Transfer, now: float) -> list[Action]:
        """Answer a repetition with where the transfer is."""
        key = transfer.key
        if transfer.state in (TransferState.QUEUED, TransferState.WRITING):
            return [self._send(key, Accepted(key.number, self._identity.epoch, key.epoch))]
        if transfer.state is TransferState.FENCED:
            return [self._send_ready(transfer, now)]
        return [] if transfer.answer is None else [self._send(key, transfer.answer)]

    def _abort(self, link: _Link, message: Abort, now: float) -> list[Action]:
        key = TransferKey(link.peer, link.epoch, message.number)
        transfer = link.transfers.get(message.number)
        if transfer is None:
            # Its Prefill may still be on the way and must find the transfer ended
            return self._end(self._remember(key, TransferState.QUEUED), "decode gave up")
        if transfer.state is TransferState.WRITING and transfer.write_at is None:
            transfer.is_wanted = False
            return []
        if transfer.is_open:
            return self._stop(transfer, "decode gave up")
        if transfer.answer is None:
            transfer.answer = self._aborted(key, "decode gave up", settled=True)
        return self._repeat(transfer, now)

    def _release(self, link: _Link, message: Release) -> list[Action]:
        transfer = link.transfers.get(message.number)
        if transfer is None:
            return []
        if transfer.state is not TransferState.FENCED:
            # Only the fault notify_before_writes_land brings a Release this early: the writes still have to go out
            transfer.is_wanted = transfer.is_wanted and transfer.state is not TransferState.WRITING
            return []
        transfer.state = TransferState.RELEASED
        return self._free_source(transfer)

    def _stop(self, transfer: _Transfer, reason: str) -> list[Action]:
        """Nobody wants the transfer any more: end it now, or when its writes have ended."""
        match transfer.state:
            case TransferState.QUEUED:
                return [CancelCompute(transfer.key), *self._end(transfer, reason)]
            case TransferState.WRITING if transfer.pending:
                transfer.is_wanted = False
                return []
            case TransferState.WRITING | TransferState.FENCED:
                return self._end(transfer, reason)
            case _:
                return []

    def _end(self, transfer: _Transfer, reason: str, *, settled: bool = True) -> list[Action]:
        transfer.state, transfer.write_at = TransferState.ABORTED, None
        transfer.answer = self._aborted(transfer.key, reason, settled)
        return [*self._free_source(transfer), self._send(transfer.key, transfer.answer)]

    def _refuse(self, transfer: _Transfer, code: str, text: str) -> list[Action]:
        key = transfer.key
        transfer.state, transfer.request = TransferState.ABORTED, None
        transfer.answer = Refused(key.number, self._identity.epoch, key.epoch, code, text)
        return [self._send(key, transfer.answer)]

    def _free_source(self, transfer: _Transfer) -> list[Action]:
        transfer.request = transfer.write = transfer.ready = None
        if transfer.source is None:
            return []
        transfer.source = None
        return [FreeSource(transfer.key)]

    def _write(self, transfer: _Transfer, now: float) -> Action:
        assert transfer.request is not None, f"{transfer.key} is written without a request"
        assert transfer.source is not None, f"{transfer.key} is written without a source"
        transfer.write_at, transfer.started = None, now
        transfer.pending = set(range(self._identity.num_ranks))
        pages, slot = transfer.source
        transfer.write = Write(transfer.key, pages, transfer.request.page_ids, slot, transfer.request.slot)
        return ToRanks(transfer.write)

    def _wrote(self, report: Wrote, now: float) -> list[Action]:
        transfer = self._find(report.key)
        if transfer is None or transfer.state is not TransferState.WRITING or transfer.ready is None:
            return []
        error = report.error
        if not error and report.digest != transfer.ready.digest:
            error = f"wrote to other places than asked (digest {report.digest}, expected {transfer.ready.digest})"
        if error:
            transfer.error = f"rank {report.rank}: {error}"
        # Without the fence, which an error skips, a write that completed locally may still be under way
        transfer.settled = transfer.settled and report.settled and (bool(report.error) or not self._fence)
        transfer.pending.discard(report.rank)
        if transfer.pending:
            return []
        if transfer.error:
            return self._broke(transfer, settled=transfer.settled)
        if self._fence:
            assert transfer.write is not None, f"{transfer.key} was written without a Write"
            transfer.pending = set(range(self._identity.num_ranks))
            return [ToRanks(Fence(transfer.write))]
        return self._landed(transfer, now)

    def _fenced(self, report: Fenced, now: float) -> list[Action]:
        transfer = self._find(report.key)
        if transfer is None or transfer.state is not TransferState.WRITING:
            return []
        if report.error:
            transfer.error = f"rank {report.rank}: fence: {report.error}"
        transfer.pending.discard(report.rank)
        if transfer.pending:
            return []
        if transfer.error:
            return self._broke(transfer, settled=False)
        return self._landed(transfer, now)

    def _broke(self, transfer: _Transfer, *, settled: bool) -> list[Action]:
        """End a transfer whose writes failed, and the connection with it: decode's next Hello makes a new one."""
        ended = self._end(transfer, transfer.error, settled=settled)
        return [*ended, *self._close(self._links[transfer.key.peer, transfer.key.epoch], transfer.error)]

    def _landed(self, transfer: _Transfer, now: float) -> list[Action]:
        if not transfer.is_wanted:
            return self._end(transfer, "decode gave up")
        assert transfer.ready is not None, f"{transfer.key} landed without a Ready"
        transfer.state = TransferState.FENCED
        ready = transfer.ready
        transfer.ready = Ready(
            ready.number,
            ready.epoch,
            ready.peer_epoch,
            ready.digest,
            ready.first,
            ready.num_bytes,
            seconds=now - transfer.started,
        )
        return [self._send_ready(transfer, now)]

    def _send_ready(self, transfer: _Transfer, now: float) -> Action:
        assert transfer.ready is not None, f"{transfer.key} has no Ready"
        transfer.interval = min(max(transfer.interval * 2, self._timing.resend_s), self._timing.resend_max_s)
        transfer.next_send = now + transfer.interval
        return self._send(transfer.key, transfer.ready)

    def _tick_transfer(self, link: _Link, transfer: _Transfer, now: float) -> list[Action]:
        match transfer.state:
            case TransferState.QUEUED if now >= transfer.deadline:
                text = "the prompt was not computed before decode's deadline"
                return [CancelCompute(transfer.key), *self._refuse(transfer, "handoff_failed", text)]
            case TransferState.WRITING if transfer.write_at is not None:
                return [self._write(transfer, now)] if now >= transfer.write_at else []
            case TransferState.WRITING if now >= transfer.started + self._timing.write_timeout_s:
                return self._close(link, f"writes did not end within {self._timing.write_timeout_s:g} s")
            case TransferState.FENCED if now >= transfer.next_send:
                return [self._send_ready(transfer, now)]
            case _:
                return []

    def _aborted(self, key: TransferKey, text: str, settled: bool) -> Aborted:
        return Aborted(key.number, self._identity.epoch, key.epoch, settled, "handoff_failed", text)

    def _send(self, key: TransferKey, message: ToDecode) -> Action:
        return Send(key.peer, message)

    def _finish(self, actions: list[Action]) -> list[Action]:
        """Add what follows from any event: links that have closed, watching or not."""
        busy = False
        for link in self._links.values():
            num_open = len(link.open_transfers())
            if link.state is LinkState.CLOSING and not link.disconnecting and not num_open:
                link.state = LinkState.CLOSED
            busy = busy or link.state is LinkState.CLOSING or num_open > 0 or link.is_probing
        if busy != self._watching:
            self._watching = busy
            actions = [*actions, ToRanks(Watch(busy))]
        return actions
