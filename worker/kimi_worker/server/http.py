"""What the HTTP apps of the worker and of the router share."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable

import msgspec
import structlog
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kimi_worker.protocol.openai import ApiError

log = structlog.get_logger()

KEEP_ALIVE_S = 120
"""How long an idle connection stays open: longer than clients keep one (httpx 5 s, aiohttp 15 s, nginx 60 s, Go 90 s),
or a request on one that is just being closed would be lost."""


def error_response(error: ApiError) -> Response:
    return Response(msgspec.json.encode(error.body()), error.status, error.headers(), "application/json")


async def read_body(request: Request, max_bytes: int, grow: Callable[[int], None] | None = None) -> bytes:
    """Raises ApiError (413) before a body that is too large is in memory, and what `grow` raises.

    `grow` is told the number of bytes of each part before it is kept.
    """
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > max_bytes:
            raise ApiError(413, f"body: more than {max_bytes} bytes", code="body_too_large", param="body")
        if grow:
            grow(len(part))
        body += part
    return bytes(body)


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


class HangUpResponse(Response):
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
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        response = error_response(ApiError(error.status_code, message, code="unknown_url"))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone_while_sending(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(Exception)
    async def our_bug(request: Request, error: Exception) -> Response:
        # the message may quote a prompt, so only the place is logged
        log.error("request_crashed", path=request.url.path, error=type(error).__name__)
        return error_response(ApiError(500, "internal error; the server's log has its place", code="internal_error"))
