"""What a lane leader decides: messages in, steps and messages out. No sockets, no torch; the clock is an argument.

Requests of clients and of decode lanes enter one scheduler. `effects` collects what is to be sent; the rank's loop
sends it in order. Every request that was admitted ends in exactly one Output with a finish reason or one Failed, unless
its client cancels it.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import structlog

from kimi_worker.handoff.session import (
    Action,
    Activate,
    CancelCompute,
    DecodeSide,
    Enqueue,
    Fail,
    FreeReservation,
    FreeSource,
    HandoffRequest,
    PrefillSide,
    Send,
    ToRanks,
)
from kimi_worker.protocol.engine import (
    Admitted,
    Cancel,
    Drain,
    Failed,
    FromEngine,
    LaneState,
    Output,
    SampledToken,
    Sampling,
    Submit,
    ToEngine,
    Verify,
    Watch,
)
from kimi_worker.protocol.handoff import LaneMessage, RankReport, ToDecode, ToPrefill, TransferKey
from kimi_worker.scheduler.lane import LaneScheduler, Progress, RequestRefusedError, Share
from kimi_worker.scheduler.requests import Goal, Phase, Request

log = structlog.get_logger()

RETRYABLE = frozenset({"queue_full", "draining"})


@dataclass(frozen=True, slots=True)
class ToClient:
    """A message for one client of the lane's socket."""

    client: bytes
    message: FromEngine


Effect: TypeAlias = ToClient | Send | ToRanks


@dataclass(slots=True)
class Caller:
    """Who waits for a request's answer, and what the handoff of its prompt cost."""

    client: bytes
    request: Request
    prefill: str | None
    received: float
    first_token: float | None = None
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    reserved_at: float = 0.0
    reserved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A prompt that a decode lane wants."""

    key: TransferKey
    request: Request


class LaneEngine:
    """Joins the scheduler with the lane's clients and with its side of the handoff."""

    def __init__(
        self,
        scheduler: LaneScheduler,
        facts: LaneState,
        decode: DecodeSide | None = None,
        prefill: PrefillSide | None = None,
    ) -> None:
        """`facts` holds what never changes of the state that the lane reports."""
        self.scheduler = scheduler
        self.effects: list[Effect] = []
        self.is_assembled = False
        """Whether the lane's whole group has started."""
        self.is_draining = False
        self.is_drained = False
        """Whether no lane of the group has anything left to do."""
        self._facts = facts
        self._decode = decode
        self._prefill = prefill
        self._callers: dict[str, Caller] = {}
        self._transfers: dict[str, Transfer] = {}
        self._reserved: dict[str, Request] = {}
        """Memory that the decode side of the handoff holds, by request."""
        self._watchers: dict[bytes, LaneState | None] = {}
        """The state that each client saw last."""
        self._num_steps = 0
        self._step_s = 0.0

    @property
    def is_transferring(self) -> bool:
        """Whether the transport of the lane's ranks must be polled."""
        decode = self._decode is not None and self._decode.num_open + self._decode.num_quarantined > 0
        return decode or (self._prefill is not None and self._prefill.num_open > 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left that a peer or a client waits for."""
        return self.scheduler.num_requests == 0 and not self.is_transferring

    @property
    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        sides = [side.next_deadline() for side in (self._decode, self._prefill) if side is not None]
        return min((deadline for deadline in sides if deadline is not None), default=None)

    def receive(self, client: bytes, message: ToEngine, now: float) -> None:
        """A message of a client."""
        match message:
            case Watch():
                self._watchers[client] = None
            case Submit():
                self._submit(client, message, now)
            case Cancel(request_id):
                self._cancel(request_id, now)
            case Drain():
                self.is_draining = True
            case Verify(endpoints):
                if self._decode is not None:
                    self._perform(self._decode.verify(endpoints, now), now)

    def receive_from_peer(self, peer: str, message: LaneMessage, now: float) -> None:
        """A control message of another lane; one that this lane's role has no use for is dropped."""
        if self._decode is not None and isinstance(message, ToDecode):
            self._perform(self._decode.receive(peer, message, now), now)
        elif self._prefill is not None and isinstance(message, ToPrefill):
            self._perform(self._prefill.receive(peer, message, now), now)
        else:
            log.warning("handoff_message_of_wrong_role", peer=peer, message=type(message).__name__)

    def see_peers(self, reached: Sequence[str], heard: Sequence[str], now: float) -> None:
        """Peers that may be silent because they are in a long step: their processes live.

        `reached` answer pings; `heard` are still the processes that sent their peers' last messages.
        """
        if self._decode is not None:
            for peer in reached:
                self._decode.see(peer, now)
        if self._prefill is not None:
            for peer in heard:
                self._prefill.see(peer, now)

    def report(self, report: RankReport, now: float) -> None:
        """A rank of the lane has finished something of the handoff."""
        for side in (self._decode, self._prefill):
            if side is not None:
                self._perform(side.report(report, now), now)

    def tick(self, now: float) -> None:
        """Let deadlines pass and give memory that has become free to handoffs that wait for it."""
        for side in (self._decode, self._prefill):
            deadline = side.next_deadline() if side is not None else None
            if side is not None and deadline is not None and deadline <= now:
                self._perform(side.tick(now), now)
        while self._decode is not None and (requests := self.scheduler.reserve_handoffs()):
            for request in requests:
                self._begin(request, now)

    def complete(self, shares: Sequence[Share], sampled: Sequence[SampledToken | None], now: float) -> None:
        """Book a step: one result for each share with `sample`, in order; None where the logits were not finite."""
        token_ids = [token.token_id if token is not None else None for token in sampled]
        for progress, token in zip(self.scheduler.complete(shares, token_ids), sampled, strict=True):
            if progress.request.goal is Goal.PREFILL:
                self._prefilled(progress.request, token, now)
            else:
                self._answer(progress, token, now)

    def count_step(self, seconds: float) -> None:
        self._num_steps += 1
        self._step_s = seconds

    def publish_state(self, *, is_due: bool) -> None:
        """Tell every watcher that has not seen the lane's books as they are; all of them when it `is_due`.

        A busy lane's count of steps alone is no news.
        """
        state = self.state()
        view = (lambda state: state) if self.is_empty else _without_steps
        for client, seen in self._watchers.items():
            if is_due or seen is None or view(seen) != view(state):
                self._watchers[client] = state
                self.effects.append(ToClient(client, state))

    def state(self) -> LaneState:
        scheduler, memory = self.scheduler, self.scheduler.memory
        fabric = self._decode.fabric if self._decode is not None else None
        open_transfers = sum(side.num_open for side in (self._decode, self._prefill) if side is not None)
        return msgspec.structs.replace(
            self._facts,
            ready=self.is_assembled and not self.is_draining,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            reserved=scheduler.num_owning + memory.num_quarantined,
            queued_tokens=scheduler.num_queued_tokens,
            free_pages=memory.pages.num_free,
            free_slots=memory.slots.num_free,
            transfers=open_transfers,
            quarantined=memory.num_quarantined,
            steps=self._num_steps,
            step_s=self._step_s,
            preemptions=scheduler.num_preemptions,
            draining=self.is_draining,
            drained=self.is_drained,
            assembled=self.is_assembled,
            fabric_peers=fabric.num_peers if fabric is not None else 0,
            fabric_verified=fabric.num_verified if fabric is not None else 0,
            fabric_error=fabric.error if fabric is not None else "",
        )

    # Clients

    def _submit(self, client: bytes, message: Submit, now: float) -> None:
        if self.is_draining or not self.is_assembled:
            reason = "is going away" if self.is_draining else "is still starting"
            self._fail(client, message.request_id, "draining", f"this pod {reason}; another one may answer")
            return
        if message.prefill is not None and self._decode is None:
            self._fail(client, message.request_id, "engine_error", "this pod's role takes no handoffs")
            return
        if message.request_id in self._reserved:
            self._fail(client, message.request_id, "engine_error", f"request id {message.request_id} is still in use")
            return
        goal = Goal.GENERATE if message.prefill is None else Goal.GENERATE_FROM_HANDOFF
        request = _request(message.request_id, message.token_ids, message.sampling, goal)
        try:
            self.scheduler.submit(request)
        except RequestRefusedError as refused:
            self._fail(client, message.request_id, refused.code, str(refused))
            return
        self._callers[request.request_id] = Caller(client, request, message.prefill, now)
        self.effects.append(ToClient(client, Admitted(request.request_id)))

    def _cancel(self, request_id: str, now: float) -> None:
        caller = self._callers.pop(request_id, None)
        if caller is None:
            return
        is_reserved = caller.request.phase is Phase.RESERVED
        self.scheduler.cancel(request_id)
        if is_reserved and self._decode is not None:
            self._perform(self._decode.cancel(request_id, now), now)
        _log_end(caller, "cancelled", now)

    def _answer(self, progress: Progress, token: SampledToken | None, now: float) -> None:
        caller = self._callers[progress.request.request_id]
        if token is None:
            del self._callers[progress.request.request_id]
            self._fail(caller.client, progress.request.request_id, "engine_error", "the model's logits are not finite")
            _log_end(caller, "not_finite", now)
            return
        caller.first_token = caller.first_token or now
        done = progress.finish_reason is not None
        output = Output(
            progress.request.request_id,
            [token],
            progress.finish_reason,
            handoff_bytes=caller.handoff_bytes,
            handoff_s=caller.handoff_s,
            reserved_s=caller.reserved_s,
        )
        self.effects.append(ToClient(caller.client, output))
        if done:
            del self._callers[progress.request.request_id]
            _log_end(caller, str(progress.finish_reason), now)

    def _fail(self, client: bytes, request_id: str, code: str, message: str, retryable: bool | None = None) -> None:
        retry = code in RETRYABLE if retryable is None else retryable
        self.effects.append(ToClient(client, Failed(request_id, code, message, retry)))

    # Handoff

    def _perform(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            match action:
                case Send() | ToRanks():
                    self.effects.append(action)
                case Activate():
                    self._activate(action, now)
                case Fail():
                    self._handoff_failed(action, now)
                case FreeReservation(request_id):
                    self.scheduler.release(self._reserved.pop(request_id))
                case Enqueue():
                    self._enqueue(action, now)
                case CancelCompute(key):
                    self.scheduler.cancel(self._transfers.pop(_transfer_id(key)).request.request_id)
                case FreeSource(key):
                    self.scheduler.release(self._transfers.pop(_transfer_id(key)).request)

    def _begin(self, request: Request, now: float) -> None:
        """Ask the prefill lane to fill what has been reserved."""
        assert self._decode is not None
        assert request.memory is not None
        caller = self._callers[request.request_id]
        assert caller.prefill is not None
        self._reserved[request.request_id] = request
        caller.reserved_at = now
        handoff = HandoffRequest(
            request_id=request.request_id,
            prefill=caller.prefill,
            token_ids=request.token_ids,
            sampling=msgspec.structs.replace(request.sampling, seed=request.seed),
            page_ids=[int(page) for page in request.memory.pages],
            slot=request.memory.slot.index,
        )
        self._perform(self._decode.begin(handoff, now), now)

    def _activate(self, action: Activate, now: float) -> None:
        request = self._reserved.pop(action.request_id)
        caller = self._callers[action.request_id]
        caller.handoff_bytes, caller.handoff_s = action.num_bytes, action.seconds
        caller.reserved_s = now - caller.reserved_at
        progress, first = self.scheduler.activate(request, action.first.token_id), action.first
        if progress.token_id is None:
            del self._callers[action.request_id]
            text = f"prefill sampled token id {first.token_id}, which this model does not have"
            self._fail(caller.client, action.request_id, "handoff_failed", text, retryable=True)
            _log_end(caller, "handoff_failed", now)
            return
        self._answer(progress, first, now)

    def _handoff_failed(self, action: Fail, now: float) -> None:
        self.scheduler.cancel(action.request_id)
        caller = self._callers.pop(action.request_id)
        self._fail(caller.client, action.request_id, action.code, action.message, action.retryable)
        _log_end(caller, action.code, now)

    def _enqueue(self, action: Enqueue, now: float) -> None:
        assert self._prefill is not None
        request = _request(_transfer_id(action.key), action.token_ids, action.sampling, Goal.PREFILL)
        if self.is_draining:
            self._perform(self._prefill.fail(action.key, "draining", "the prefill pod is going away", now), now)
            return
        try:
            self.scheduler.submit(request)
        except RequestRefusedError as refused:
            code = "prefill_full" if refused.code == "queue_full" else refused.code
            self._perform(self._prefill.fail(action.key, code, str(refused), now), now)
            return
        self._transfers[request.request_id] = Transfer(action.key, request)

    def _prefilled(self, request: Request, token: SampledToken | None, now: float) -> None:
        assert self._prefill is not None
        key = self._transfers[request.request_id].key
        if token is None:
            del self._transfers[request.request_id]
            self._perform(self._prefill.fail(key, "engine_error", "the model's logits are not finite", now), now)
            return
        assert request.memory is not None
        pages, slot = [int(page) for page in request.memory.pages], request.memory.slot.index
        self._perform(self._prefill.computed(key, pages, slot, token, now), now)


def _request(request_id: str, token_ids: list[int], sampling: Sampling, goal: Goal) -> Request:
    """A request with a seed of its own when its client gave none; decode passes it on, so both sides draw alike."""
    seed = sampling.seed if sampling.seed is not None else secrets.randbits(62)
    return Request(request_id, list(token_ids), sampling, goal, seed=seed)


def _transfer_id(key: TransferKey) -> str:
    return f"{key.peer}/{key.epoch}/{key.number}"


def _without_steps(state: LaneState) -> LaneState:
    return msgspec.structs.replace(state, steps=0, step_s=0.0)


def _log_end(caller: Caller, reason: str, now: float) -> None:
    log.info(
        "request_finished",
        request_id=caller.request.request_id,
        reason=reason,
        prompt_tokens=caller.request.num_prompt_tokens,
        output_tokens=caller.request.num_generated,
        first_token_s=round(caller.first_token - caller.received, 4) if caller.first_token is not None else None,
        total_s=round(now - caller.received, 4),
        handoff_s=round(caller.handoff_s, 4),
        handoff_bytes=caller.handoff_bytes,
    )
