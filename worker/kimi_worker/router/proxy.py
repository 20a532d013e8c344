"""One request's way through the router: pick, send, retry what is safe, pass the answer on byte by byte."""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kimi_worker.protocol.openai import ApiError
from kimi_worker.router.metrics import Metrics
from kimi_worker.router.pick import LaneKey, LaneView, Pair, explain, pick
from kimi_worker.router.pool import Pool, Trip
from kimi_worker.server.http import error_response, until_disconnect
from kimi_worker.settings import Role

log = structlog.get_logger()

_CHARS_PER_TOKEN = 4
"""A guess that only spreads prompts over prefill lanes between two reports."""

_NOT_PASSED_ON = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
    | {"host", "content-length", "date", "x-kimi-lane", "x-kimi-prefill"}
)
"""Headers that belong to one connection, and those with which only the router may speak."""

_BLAMES_PREFILL = frozenset({"prefill_full", "prefill_unreachable"})
_BLAMES_EITHER = frozenset({"handoff_failed", "layout_mismatch", "draining"})


@dataclass(frozen=True, slots=True)
class Route:
    """What the proxy uses of its process."""

    pool: Pool
    session: aiohttp.ClientSession
    metrics: Metrics
    retries: int


class RefusedError(Exception):
    """A pair did not answer the request, before any byte of an answer; `answer` is what it said."""

    def __init__(self, code: str, answer: Response, pair: Pair) -> None:
        super().__init__(code)
        self.code = code
        self.answer = answer
        self.pair = pair


@dataclass(slots=True)
class Refusals:
    """Lanes that have failed this request: for sure, or one of the two."""

    sure: set[LaneKey] = field(default_factory=set)
    decodes: set[LaneKey] = field(default_factory=set)
    prefills: set[LaneKey] = field(default_factory=set)

    def add(self, refused: RefusedError) -> None:
        decode, prefill = refused.pair.decode.key, refused.pair.prefill
        if prefill and refused.code in _BLAMES_PREFILL:
            self.sure.add(prefill.key)
        elif prefill and refused.code in _BLAMES_EITHER:
            self.decodes.add(decode)
            self.prefills.add(prefill.key)
        else:
            self.sure.add(decode)

    def pick(self, decodes: list[LaneView], prefills: list[LaneView]) -> Pair | None:
        """A pair that has a chance: two other lanes, else at least another partner."""
        for suspects in (self.decodes | self.prefills, self.prefills, self.decodes):
            if pair := pick(decodes, prefills, self.sure | suspects):
                return pair
        return None


class Proxy(Response):
    """The response to one request. It asks upstream when it is called and hangs up when the client goes."""

    def __init__(self, endpoint: str, request: Request, body: bytes, route: Route) -> None:
        """`endpoint` is the path below /v1/; the whole `body` is kept because a retry needs it."""
        super().__init__()
        self._endpoint = endpoint
        self._request = request
        self._body = body
        self._route = route
        self._is_answered = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._route.metrics.in_flight.track_inprogress():
            answer = asyncio.create_task(self._answer(scope, receive, send))
            gone = asyncio.create_task(until_disconnect(receive))
            try:
                await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
                # a finished answer also ends `receive`
                if self._is_answered:
                    await answer
            finally:
                for task in (answer, gone):
                    task.cancel()
                results = await asyncio.gather(answer, gone, return_exceptions=True)
            if isinstance(results[0], asyncio.CancelledError):
                self._route.metrics.count("client_gone")
            elif isinstance(results[0], BaseException):
                raise results[0]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusals, refused = Refusals(), None
        for _ in range(self._route.retries + 1):
            decodes, prefills = self._route.pool.lanes(Role.DECODE), self._route.pool.lanes(Role.PREFILL)
            pair = refusals.pick(decodes, prefills)
            if pair is None:
                break
            try:
                await self._try(pair, send)
            except RefusedError as error:
                refused = error
                refusals.add(error)
                self._route.metrics.refusals.labels(error.code).inc()
                prefill = pair.prefill.key if pair.prefill else None
                log.info("request_refused", code=error.code, decode=pair.decode.key, prefill=prefill)
                continue
            return
        answer = refused.answer if refused else error_response(self._nothing_ready(decodes, prefills))
        self._is_answered = True
        self._route.metrics.count(str(answer.status_code))
        await answer(scope, receive, send)

    def _nothing_ready(self, decodes: list[LaneView], prefills: list[LaneView]) -> ApiError:
        reason, shortage = explain(decodes, prefills), self._route.pool.shortage()
        message = f"{reason} ({shortage})" if shortage else reason
        return ApiError(503, message, code="nothing_ready", is_retryable=True, retry_after_s=1.0)

    async def _try(self, pair: Pair, send: Send) -> None:
        """Ask one pair; pass its answer on. Raises RefusedError while another pair may be asked."""
        pool = self._route.pool
        now_s = time.monotonic()
        pod = pool.pod(Role.DECODE, pair.decode.key)
        trips = [pod.send(pair.decode.key.lane, 0, now_s)]
        if pair.prefill:
            prefill_pod = pool.pod(Role.PREFILL, pair.prefill.key)
            trips.append(prefill_pod.send(pair.prefill.key.lane, len(self._body) // _CHARS_PER_TOKEN, now_s))
        try:
            url = f"{pod.url}/v1/{self._endpoint}"
            async with self._route.session.post(url, data=self._body, headers=self._upstream_headers(pair)) as reply:
                if reply.status == 429 or reply.headers.get("x-kimi-retryable") == "true":
                    raise await _refusal(reply, pair)
                await self._pass_on(reply, send, trips)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            # nothing of an answer has gone out, see _pass_on
            log.warning("pod_lost", pod=pod.address, error=repr(error))
            # one that is only slow to connect may be busy; its /state says whether it lives
            if not isinstance(error, aiohttp.ServerTimeoutError):
                pod.lose(f"{type(error).__name__}: {error}")
            answer = error_response(
                ApiError(
                    503, f"{pod.address} broke the connection", code="pod_lost", is_retryable=True, retry_after_s=1.0
                )
            )
            raise RefusedError("pod_lost", answer, pair) from error
        finally:
            for trip in trips:
                trip.end()

    def _upstream_headers(self, pair: Pair) -> dict[str, str]:
        headers = {name: value for name, value in self._request.headers.items() if name not in _NOT_PASSED_ON}
        headers["x-kimi-lane"] = str(pair.decode.key.lane)
        if pair.prefill:
            headers["x-kimi-prefill"] = pair.prefill.handoff
        return headers

    async def _pass_on(self, reply: aiohttp.ClientResponse, send: Send, trips: list[Trip]) -> None:
        """Send status, headers and bytes as they come; `send` waits when the client reads slowly."""
        first = await reply.content.readany()
        # the first byte is there: the prompt is computed
        for trip in trips[1:]:
            trip.end()
        headers = [
            (name.lower(), value) for name, value in reply.raw_headers if name.decode().lower() not in _NOT_PASSED_ON
        ]
        is_stream = reply.content_type == "text/event-stream"
        if not is_stream:
            first += await reply.content.read()
            headers.append((b"content-length", str(len(first)).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        result, last = str(reply.status), first
        if is_stream:
            await send({"type": "http.response.body", "body": first, "more_body": True})
            last = b""
            try:
                while part := await reply.content.readany():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                result = "broken"
                lost = ApiError(503, "the pod that answered is gone; send the request again", code="pod_lost")
                last = b"data: " + msgspec.json.encode(lost.body()) + b"\n\n"
                log.warning("upstream_broke", url=str(reply.url))
        self._is_answered = True
        self._route.metrics.count(result)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _refusal(reply: aiohttp.ClientResponse, pair: Pair) -> RefusedError:
    """What a pod that cannot take the request says."""
    code = reply.headers.get("x-kimi-error", str(reply.status))
    headers = {
        name: reply.headers[name]
        for name in ("retry-after", "x-kimi-error", "x-kimi-retryable")
        if name in reply.headers
    }
    answer = Response(await reply.read(), reply.status, headers, "application/json")
    return RefusedError(code, answer, pair)
