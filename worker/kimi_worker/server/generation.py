"""One request's life in the API process: submit, wait for the lane, answer whole or as a stream, tidy up."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kimi_worker.protocol.engine import Failed, Output, Submit
from kimi_worker.protocol.openai import ApiError
from kimi_worker.server.answer import AnswerReader, AnswerWriter, Piece
from kimi_worker.server.http import SSE_DONE, HangUpResponse, error_response, sse_error, sse_event
from kimi_worker.server.lanes import Lane, RequestFailedError, Ticket
from kimi_worker.server.metrics import Metrics
from kimi_worker.server.text import Tokenizer
from kimi_worker.server.work import Work

log = structlog.get_logger()

_STATUS = {"queue_full": 429, "prefill_full": 429, "prompt_too_long": 400, "engine_error": 500}
"""Of the lane's failure codes; the others are 503."""


def failure(failed: Failed) -> ApiError:
    """The answer for a request that the lane has ended."""
    status = _STATUS.get(failed.code, 503)
    if failed.retryable and status == 500:
        status = 503
    return ApiError(
        status=status,
        message=failed.message,
        code="context_length_exceeded" if failed.code == "prompt_too_long" else failed.code,
        is_retryable=failed.retryable,
        retry_after_s=failed.retry_after_s if status in (429, 503) else 0.0,
    )


@dataclass(slots=True)
class Timing:
    """Of one request; times are of the monotonic clock."""

    start_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    reserved_s: float = 0.0

    def note(self, outputs: list[Output], metrics: Metrics) -> None:
        """Take in what has just arrived."""
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s
            metrics.first_token_s.observe(now_s - self.start_s)
        else:
            metrics.between_tokens_s.observe(now_s - self.last_s)
        self.last_s = now_s
        self.handoff_bytes = max(self.handoff_bytes, outputs[-1].handoff_bytes)
        self.handoff_s = max(self.handoff_s, outputs[-1].handoff_s)
        self.reserved_s = max(self.reserved_s, outputs[-1].reserved_s)

    @property
    def ttft_s(self) -> float:
        return (self.first_s or self.last_s) - self.start_s

    @property
    def per_token_s(self) -> float:
        """Mean time of the tokens after the first."""
        return (self.last_s - (self.first_s or self.last_s)) / max(1, self.num_tokens - 1)


class Generation(HangUpResponse):
    """The response to one request. It submits the work when it is called and cancels it when the client goes."""

    def __init__(self, work: Work, lane: Lane, prefill: str | None, tools: "Tools") -> None:
        super().__init__()
        self._work = work
        self._lane = lane
        self._prefill = prefill
        self._tools = tools
        self._reader = AnswerReader(work, tools.tokenizer)
        self._writer = AnswerWriter(work, tools.tokenizer)
        self._timing = Timing(time.monotonic())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._tools.metrics.in_flight.track_inprogress():
            await super().__call__(scope, receive, send)

    def client_gone(self) -> None:
        self._end("client_gone")

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        submit = Submit(self._work.request_id, self._work.token_ids, self._work.sampling, self._prefill)
        async with self._lane.request(submit) as ticket:
            try:
                await ticket.admitted(self._tools.admission_timeout_s)
                first = await self._next(ticket)
            except RequestFailedError as error:
                self.is_answered = True
                await error_response(failure(error.failed))(scope, receive, send)
                self._end(error.failed.code)
                return
            if self._work.is_stream:
                await self._stream(send, ticket, first)
            else:
                await self._whole(ticket, first, scope, receive, send)

    async def _next(self, ticket: Ticket) -> Piece:
        outputs = await ticket.outputs()
        self._timing.note(outputs, self._tools.metrics)
        piece = self._reader.feed(outputs)
        self._timing.num_tokens = self._reader.num_tokens
        return piece

    async def _pieces(self, ticket: Ticket, first: Piece) -> AsyncIterator[Piece]:
        """To the last one, which has a finish reason."""
        piece = first
        yield piece
        while piece.finish_reason is None:
            piece = await self._next(ticket)
            yield piece

    async def _whole(self, ticket: Ticket, first: Piece, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            pieces = [piece async for piece in self._pieces(ticket, first)]
            body = self._writer.whole(pieces, self._stats())
            response = Response(body, media_type="application/json")
            reason = pieces[-1].finish_reason or ""
        except RequestFailedError as error:
            response, reason = error_response(failure(error.failed)), error.failed.code
        self.is_answered = True
        await response(scope, receive, send)
        self._end(reason)

    async def _stream(self, send: Send, ticket: Ticket, first: Piece) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        reason = ""
        try:
            async for piece in self._pieces(ticket, first):
                reason = piece.finish_reason or ""
                data = self._writer.chunk(piece, self._stats() if reason else None)
                if data:
                    await send({"type": "http.response.body", "body": sse_event(data), "more_body": True})
            last = sse_event(self._writer.usage_chunk(self._reader.num_tokens)) if self._work.with_usage else b""
        except RequestFailedError as error:
            last, reason = sse_error(failure(error.failed)), error.failed.code
        self.is_answered = True
        await send({"type": "http.response.body", "body": last + SSE_DONE, "more_body": False})
        self._end(reason)

    def _stats(self) -> dict[str, object] | None:
        """What `x-kimi-stats: 1` asks for, in bytes and seconds."""
        if not self._tools.with_stats:
            return None
        timing = self._timing
        return {
            "lane": self._lane.index,
            "handoff_bytes": timing.handoff_bytes,
            "handoff_s": timing.handoff_s,
            "ttft_s": timing.ttft_s,
            "tpot_s": timing.per_token_s,
        }

    def _end(self, reason: str) -> None:
        """Count the request and log its one line."""
        metrics, timing = self._tools.metrics, self._timing
        if reason in ("stop", "length"):
            metrics.count_success(reason)
            metrics.request_s.observe(timing.last_s - timing.start_s)
            if timing.num_tokens > 1:
                metrics.per_token_s.observe(timing.per_token_s)
        else:
            metrics.failures.labels(reason).inc()
        metrics.generation_tokens.inc(timing.num_tokens)
        if timing.first_s is not None:
            metrics.prompt_tokens.inc(len(self._work.token_ids))
            metrics.prompt_length.observe(len(self._work.token_ids))
            metrics.output_length.observe(timing.num_tokens)
        if timing.handoff_bytes:
            metrics.handoff_bytes.inc(timing.handoff_bytes)
            metrics.handoff_s.observe(timing.handoff_s)
            metrics.reserved_s.observe(timing.reserved_s)
        log.info(
            "request_finished",
            request_id=self._work.request_id,
            lane=self._lane.index,
            prefill=self._prefill,
            prompt_tokens=len(self._work.token_ids),
            output_tokens=timing.num_tokens,
            reason=reason,
            ttft_s=round(timing.ttft_s, 4) if timing.first_s else None,
            total_s=round(time.monotonic() - timing.start_s, 4),
            handoff_bytes=timing.handoff_bytes,
            handoff_s=round(timing.handoff_s, 4),
        )


@dataclass(frozen=True, slots=True)
class Tools:
    """What a generation uses of its process."""

    tokenizer: Tokenizer
    metrics: Metrics
    admission_timeout_s: float
    with_stats: bool
