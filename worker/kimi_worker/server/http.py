"""What the HTTP apps of the worker and of the router share."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kimi_worker.protocol.openai import ApiError, echo

log = structlog.get_logger()

CLIENT_GONE = "client_gone"
"""In a request's `state.outcome`, for whoever counts answers: nobody was left to read one."""


def error_response(error: ApiError) -> Response:
    return Response(msgspec.json.encode(error.body()), error.status, error.headers(), "application/json")


@dataclass(frozen=True, slots=True)
class Patience:
    """How slowly a body may come."""

    silence_s: float
    """Longest time without a byte."""
    bytes_per_s: float
    """Least rate. A client may fall behind it by `silence_s`, and not save up for more by being fast before."""

    def extend(self, deadline_s: float, now_s: float, num_bytes: int) -> float:
        """The next deadline, after a part that came now."""
        return min(deadline_s + num_bytes / self.bytes_per_s, now_s + self.silence_s)


PATIENCE = Patience(silence_s=30.0, bytes_per_s=2048.0)
"""Against clients that stop, or send a byte now and then, and would hold a request and its memory for ever. TCP sends a
lost packet again after about 1, 2, 4 and 8 s: four losses in a row are survived. The rate is half of what a telephone
modem sends (33.6 kbit/s)."""


async def read_body(
    request: Request, max_bytes: int, grow: Callable[[int], None] | None = None, patience: Patience = PATIENCE
) -> bytes:
    """Raises ApiError: 413 before a body that is too large is in memory, 408 for one that comes too slowly.

    `grow` is told the number of bytes of each part before it is kept; what it raises is passed on.
    """
    body = bytearray()
    now_s = asyncio.get_running_loop().time
    deadline_s = now_s() + patience.silence_s
    try:
        async with asyncio.timeout_at(deadline_s) as limit:
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise ApiError(413, f"body: more than {max_bytes} bytes", code="body_too_large", param="body")
                if grow:
                    grow(len(part))
                body += part
                deadline_s = patience.extend(deadline_s, now_s(), len(part))
                limit.reschedule(deadline_s)
    except TimeoutError:
        log.info("upload_given_up", path=request.url.path, num_bytes=len(body))
        raise _too_slow(len(body), patience) from None
    return bytes(body)


def _too_slow(num_bytes: int, patience: Patience) -> ApiError:
    message = (
        f"body: {num_bytes} bytes came, and then too little for too long; send without a pause of "
        f"{patience.silence_s:g} s and at least {patience.bytes_per_s:g} bytes a second"
    )
    return ApiError(408, message, code="body_too_slow", param="body")


def sse_event(data: bytes) -> bytes:
    """One event of a stream, as OpenAI's clients read it; `data` holds no line break."""
    return b"data: " + data + b"\n\n"


SSE_END = b"\n\n"
"""Ends an event. A blank line too many means nothing."""
SSE_DONE = sse_event(b"[DONE]")
"""The last event of every stream."""


def sse_error(error: ApiError) -> bytes:
    """The event for an error after a stream has begun."""
    return sse_event(msgspec.json.encode(error.body()))


class HangUpResponse(Response, ABC):
    """An answer that takes long: the work for it ends when the client goes. Its request must have been read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_answered = False
        """To be set just before the last message is sent: from then on a client that goes has its whole answer."""

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do the work and send everything. It is cancelled when the client goes."""

    @abstractmethod
    def client_gone(self) -> None:
        """Called when the client went before its answer was complete."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self.answer(scope, receive, send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            # a finished answer also ends `receive`
            if self.is_answered:
                await answer
        finally:
            for task in (answer, gone):
                task.cancel()
            results = await asyncio.gather(answer, gone, return_exceptions=True)
        if isinstance(results[0], asyncio.CancelledError):
            self.client_gone()
        elif isinstance(results[0], BaseException):
            raise results[0]


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def add_error_handlers(app: FastAPI) -> None:
    """Every error leaves in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {echo(request.url.path)}: {error.detail}"
        response = error_response(ApiError(error.status_code, message, code="unknown_url"))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone_while_sending(request: Request, _: ClientDisconnect) -> Response:
        request.state.outcome = CLIENT_GONE
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(Exception)
    async def our_bug(request: Request, error: Exception) -> Response:
        # the message may quote a prompt, so only the place is logged
        log.error("request_crashed", path=request.url.path, error=type(error).__name__)
        answer = error_response(ApiError(500, "internal error; the server's log has its place", code="internal_error"))
        # uvicorn then closes the connection: a client that is not told sends its next request into it
        answer.headers["connection"] = "close"
        return answer
