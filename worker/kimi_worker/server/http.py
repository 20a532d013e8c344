"""What the HTTP apps of the worker and of the router share."""

import msgspec
import structlog
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from kimi_worker.protocol.openai import ApiError

log = structlog.get_logger()

KEEP_ALIVE_S = 60
"""How long a pod keeps an idle connection of the router."""


def error_response(error: ApiError) -> Response:
    return Response(msgspec.json.encode(error.body()), error.status, error.headers(), "application/json")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError (413) before a body that is too large is in memory."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(413, f"body: more than {max_bytes} bytes", code="body_too_large")
    return bytes(body)


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client has gone or has its whole answer; its request must have been read."""
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
