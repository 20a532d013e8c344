"""What a connection may cost: uvicorn waits for ever for a head, however long, and for a client that reads nothing."""

import asyncio

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = structlog.get_logger()

MAX_HEAD_BYTES = 2**16
"""Of a request's line and headers; what comes in one read is taken anyway. Proxies send up to 32 KiB."""


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that has had no whole head for `timeout_keep_alive` s, and one whose head is too long.

    The time counts from the connection's beginning, and from what comes between two requests: the rest of a body whose
    request was answered before, or a head byte by byte. A client that leaves its answer unread is cut off too: full
    buffers would keep the answer, and all that it holds, as long as the client's machine lives.
    """

    max_unread_s = 300.0
    """From full buffers until they are nearly empty again: a client that reads 200 bytes a second does that."""

    _head_timer: asyncio.TimerHandle | None = None
    unread_timer: asyncio.TimerHandle | None = None
    """Runs while buffers are full."""
    _is_in_head = False
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_timer = self.loop.call_later(self.max_unread_s, self._cut_off)

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._num_head_bytes += len(data)
        if self.transport.is_closing():
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request's line and headers have more than {MAX_HEAD_BYTES} bytes.")
        elif self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._head_timer is None:
            self._watch()

    def _watch(self) -> None:
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _unwatch(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _cut_off(self) -> None:
        log.info("client_reads_nothing", for_s=self.max_unread_s)
        self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self.unread_timer is not None:
            self.unread_timer.cancel()
            self.unread_timer = None
