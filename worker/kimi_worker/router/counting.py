"""Counts each answer once, whoever gave it: a pod, the proxy, a route, or a handler of errors."""

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kimi_worker.router.metrics import Metrics
from kimi_worker.server.http import CLIENT_GONE

BROKEN = "broken"
"""In a request's `state.outcome`: the answer had begun and could not be ended."""


class Counting:
    """Middleware of the whole app. What a request's `state.outcome` says goes before the status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, unless: Collection[str]) -> None:
        """Answers to the paths in `unless` are not counted."""
        self._app = app
        self._metrics = metrics
        self._unless = unless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._unless:
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send, self._metrics)
        try:
            await self._app(scope, receive, answer.send)
        except BaseException:
            # An answer that has not begun is given by the outermost handler.
            answer.count("500" if answer.status is None else BROKEN)
            raise
        answer.count(CLIENT_GONE)


class _Answer:
    """One answer on its way out."""

    def __init__(self, scope: Scope, send: Send, metrics: Metrics) -> None:
        self.status: int | None = None
        self._state = scope.setdefault("state", {})
        self._send = send
        self._metrics = metrics
        self._is_counted = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            # Before it goes out, so that a client that has its answer finds it counted.
            self.count(str(self.status))
        await self._send(message)

    def count(self, result: str) -> None:
        """Only the first call counts."""
        if not self._is_counted:
            self._metrics.count(self._state.get("outcome", result))
        self._is_counted = True
