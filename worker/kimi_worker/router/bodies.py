"""The bodies of requests that wait for their answer to begin: a retry needs them whole, so all together are bounded."""

from dataclasses import dataclass

from fastapi import Request

from kimi_worker.protocol.openai import ApiError
from kimi_worker.server.http import PATIENCE, Patience, read_body


class Bodies:
    """Counts the bytes that this router holds."""

    def __init__(self, max_bytes: int, patience: Patience = PATIENCE) -> None:
        self.max_bytes = max_bytes
        self._patience = patience
        self.num_bytes = 0

    async def read(self, request: Request, max_bytes: int) -> "Body":
        """The body is to be released. Raises ApiError: 413 above `max_bytes`, 429 without room for it, 408 if slow."""
        body = Body(self)
        try:
            body.content = await read_body(request, max_bytes, body.grow, self._patience)
        except BaseException:
            body.release()
            raise
        return body


@dataclass(slots=True)
class Body:
    """One request's body."""

    _held: Bodies
    content: bytes = b""
    _num_bytes: int = 0

    def grow(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises ApiError (429)."""
        held = self._held
        if held.num_bytes + num_bytes > held.max_bytes:
            message = (
                f"this router holds {held.num_bytes} bytes of other requests and takes {held.max_bytes}; try again"
            )
            raise ApiError.not_now("router_full", message, status=429)
        held.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """No longer needed. Only the first call counts."""
        self._held.num_bytes -= self._num_bytes
        self._num_bytes, self.content = 0, b""
