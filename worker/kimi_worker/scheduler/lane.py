"""The scheduler of one lane: what each step computes and who owns the memory.

A request is its tokens and how many of them are computed, so that a prompt, a chunk of one, a decode and a
recomputation are one thing. The queue is first in, first out, and memory for all tokens of a request is taken when it
leaves the queue: a large request at its head holds back smaller ones that would fit, and so never starves. Decodes go
first; when they run out of pages, the youngest request gives its memory back and is computed anew later.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kimi_worker.protocol.step import SequenceStep, StepPlan
from kimi_worker.scheduler.memory import LaneMemory
from kimi_worker.scheduler.requests import Goal, Phase, Request
from kimi_worker.settings import LimitSettings


class RequestRefusedError(Exception):
    """The lane cannot take the request; `code` is one of protocol.engine.Failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Share:
    """What one step computes of a request."""

    request: Request
    num_tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """A new token of a request, and why the request has ended, if it has.

    `token_id` is None when no token could be sampled: the request has ended without an answer.
    """

    request: Request
    token_id: int | None
    finish_reason: str | None


class LaneScheduler:
    """Owns the requests, pages and slots of a lane. Not thread-safe; time does not enter."""

    def __init__(
        self, limits: LimitSettings, max_model_len: int, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.memory = LaneMemory(limits.num_pages, limits.page_size_tokens, limits.num_state_slots)
        self.num_preemptions = 0
        self._limits = limits
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._ready: deque[Request] = deque()
        self._running: list[Request] = []
        self._num_submitted = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_owning(self) -> int:
        """Requests that hold memory without running: reserved, ready or prefilled."""
        return len(self._requests) - len(self._running) - len(self._waiting)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that this lane still has to compute."""
        mine = [request for request in self._waiting if request.goal is not Goal.GENERATE_FROM_HANDOFF]
        return sum(request.num_missing for request in (*mine, *self._running) if request.num_missing > 1)

    @property
    def has_work(self) -> bool:
        """Whether a step now would compute something, or might once the queue's head is admitted."""
        if self._running or self._ready:
            return True
        head = self._waiting[0] if self._waiting else None
        return (
            head is not None and head.goal is not Goal.GENERATE_FROM_HANDOFF and self.memory.fits(len(head.token_ids))
        )

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestRefusedError when the queue is full or the prompt can never be answered."""
        if request.request_id in self._requests:
            raise RequestRefusedError("engine_error", f"request id {request.request_id} is already in use")
        if not request.token_ids:
            raise RequestRefusedError("prompt_too_long", "the prompt has no tokens; send at least one")
        if request.num_prompt_tokens >= self._max_model_len:
            raise RequestRefusedError(
                "prompt_too_long",
                f"the prompt has {request.num_prompt_tokens} tokens; "
                f"at most {self._max_model_len - 1} leave room for an answer",
            )
        if (strange := max(request.token_ids)) >= self._vocab_size:
            # The API looks too, but prompts also come from peers: a row beyond the embedding would end a rank.
            raise RequestRefusedError(
                "engine_error", f"token id {strange} is not below the {self._vocab_size} of the model"
            )
        if len(self._waiting) >= self._limits.max_queued:
            raise RequestRefusedError("queue_full", f"{len(self._waiting)} requests wait already; try again later")
        request.arrival = self._num_submitted
        self._num_submitted += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def reserve_handoffs(self) -> list[Request]:
        """Take memory for the requests at the queue's head whose prompts are computed elsewhere: now RESERVED."""
        reserved = []
        while self._waiting and self._waiting[0].goal is Goal.GENERATE_FROM_HANDOFF:
            request = self._waiting[0]
            request.memory = self.memory.reserve(len(request.token_ids))
            if request.memory is None:
                break
            request.phase = Phase.RESERVED
            reserved.append(self._waiting.popleft())
        return reserved

    def activate(self, request: Request, first_token: int) -> Progress:
        """A prefill lane has filled the request's memory and sampled its first token; what is none ends the request."""
        assert request.phase is Phase.RESERVED, f"{request.request_id} is {request.phase}, not reserved"
        if first_token >= self._vocab_size:
            self._finish(request)
            return Progress(request, None, None)
        request.num_computed = len(request.token_ids)
        request.token_ids.append(first_token)
        reason = request.finish_reason(self._max_model_len, self._eos_token_ids)
        if reason is None:
            request.phase = Phase.READY
            self._ready.append(request)
        else:
            self._finish(request)
        return Progress(request, first_token, reason)

    def schedule(self) -> list[Share]:
        """Choose what the next step computes, within the limits of tokens, requests and pages."""
        self._admit()
        shares = [Share(request, 1, sample=True) for request in self._grown_decodes()]
        budget = self._limits.max_num_batched_tokens - len(shares)
        for request in self._running:
            num_tokens = min(request.num_missing, budget)
            if request.num_missing > 1 and num_tokens > 0:
                budget -= num_tokens
                shares.append(Share(request, num_tokens, sample=num_tokens == request.num_missing))
        return shares

    def complete(self, shares: Sequence[Share], sampled: Sequence[int | None]) -> list[Progress]:
        """Book a step. `sampled` holds one token for each share with `sample`, in order; None ends the request."""
        tokens = iter(sampled)
        progress = []
        for share in shares:
            request = share.request
            request.num_computed += share.num_tokens
            if not share.sample:
                continue
            token_id = next(tokens)
            if token_id is None:
                self._finish(request)
                progress.append(Progress(request, None, None))
                continue
            request.token_ids.append(token_id)
            if request.goal is Goal.PREFILL:
                self._running.remove(request)
                request.phase = Phase.PREFILLED
                progress.append(Progress(request, token_id, None))
                continue
            reason = request.finish_reason(self._max_model_len, self._eos_token_ids)
            if reason is not None:
                self._finish(request)
            progress.append(Progress(request, token_id, reason))
        return progress

    def cancel(self, request_id: str) -> Request | None:
        """Take a request out at any moment; None when it is unknown or has ended.

        Its memory is free at once, unless a peer may write into it or read from it: RESERVED memory is quarantined and
        PREFILLED memory stays taken, both until `release`.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.phase is Phase.RESERVED:
            assert request.memory is not None
            self.memory.quarantine(request.memory)
            self._forget(request)
        elif request.phase is Phase.PREFILLED:
            self._forget(request)
        else:
            self._finish(request)
        return request

    def release(self, request: Request) -> None:
        """Free the memory of a handoff that is over: no peer reads or writes it any more."""
        assert request.memory is not None, f"{request.request_id} owns no memory"
        if request.phase is not Phase.DONE:
            self._forget(request)
        self.memory.release(request.memory)
        request.memory = None

    def check(self) -> None:
        """Assert that requests, queues and memory agree."""
        self.memory.check()
        assert len(self._running) <= self._limits.max_num_seqs
        by_phase = {Phase.WAITING: self._waiting, Phase.READY: self._ready, Phase.RUNNING: self._running}
        for phase, queue in by_phase.items():
            expected = {request.request_id for request in self._requests.values() if request.phase is phase}
            assert {request.request_id for request in queue} == expected, f"the {phase.value} list is wrong"
            assert len(queue) == len(expected), f"a request is {phase.value} twice"
        for request in self._requests.values():
            assert request.phase is not Phase.DONE, f"{request.request_id} is done but kept"
            assert (request.memory is None) is (request.phase is Phase.WAITING), f"{request.request_id}: wrong memory"
            assert request.num_computed <= len(request.token_ids)

    def _admit(self) -> None:
        """Let ready and then waiting requests run while there is room, in order of arrival."""
        while self._ready and len(self._running) < self._limits.max_num_seqs:
            self._run(self._ready.popleft())
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            if request.goal is Goal.GENERATE_FROM_HANDOFF:
                return
            request.memory = self.memory.reserve(len(request.token_ids))
            if request.memory is None:
                return
            self._run(self._waiting.popleft())

    def _run(self, request: Request) -> None:
        request.phase = Phase.RUNNING
        self._running.append(request)

    def _grown_decodes(self) -> list[Request]:
        """The running requests that miss one token only, oldest first, each with the page for it."""
        decodes: list[Request] = []
        for request in sorted(self._running, key=lambda request: request.arrival):
            if request.phase is Phase.RUNNING and request.num_missing == 1 and self._grow(request):
                decodes.append(request)
        return [request for request in decodes if request.phase is Phase.RUNNING]

    def _grow(self, request: Request) -> bool:
        """Make room for all tokens of the request; False when it had to give way itself."""
        assert request.memory is not None
        while not self.memory.extend(request.memory, len(request.token_ids)):
            victim = max((*self._running, *self._ready), key=lambda other: other.arrival)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take the memory away; the request is computed anew, first of all that wait."""
        (self._ready if request.phase is Phase.READY else self._running).remove(request)
        assert request.memory is not None
        self.memory.release(request.memory)
        request.memory = None
        request.num_computed = 0
        if request.goal is Goal.GENERATE_FROM_HANDOFF:
            request.goal = Goal.GENERATE
        request.phase = Phase.WAITING
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _finish(self, request: Request) -> None:
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
        elif request.phase is Phase.READY:
            self._ready.remove(request)
        elif request.phase is Phase.RUNNING:
            self._running.remove(request)
        self._forget(request)
        if request.memory is not None:
            self.memory.release(request.memory)
            request.memory = None

    def _forget(self, request: Request) -> None:
        request.phase = Phase.DONE
        del self._requests[request.request_id]


def plan_of(step: int, shares: Sequence[Share], page_size_tokens: int) -> StepPlan:
    """The shares as the message that ranks execute."""
    sequences = []
    for share in shares:
        request = share.request
        assert request.memory is not None
        end = request.num_computed + share.num_tokens
        pages = request.memory.pages
        num_pages = -(-end // page_size_tokens)
        sequences.append(
            SequenceStep(
                token_ids=request.token_ids[request.num_computed : end],
                num_cached=request.num_computed,
                # Not copied where all are wanted: a long sequence has thousands. The plan is gone before they change.
                page_ids=cast("list[int]", pages if len(pages) == num_pages else pages[:num_pages]),
                slot=request.memory.slot.index,
                sample=share.sample,
            )
        )
    return StepPlan(step, sequences)
