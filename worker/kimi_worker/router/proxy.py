"""One request's way through the router: pick, send, retry what is safe, pass the answer on event by event."""

import asyncio
import time
from dataclasses import dataclass, field
from io import BytesIO

import aiohttp
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kimi_worker.protocol.openai import ApiError
from kimi_worker.router.bodies import Body
from kimi_worker.router.counting import BROKEN
from kimi_worker.router.metrics import Metrics
from kimi_worker.router.pick import LaneKey, LaneView, Pair, pick
from kimi_worker.router.pool import Pool, Trip
from kimi_worker.server.http import CLIENT_GONE, SSE_DONE, SSE_END, HangUpResponse, error_response, sse_error
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

_UNTOUCHED = frozenset({"queue_full", "prefill_full", "draining", "not_ready", "layout_mismatch", "unreachable"})
"""Refusals after which no lane has begun to compute the request: they may be repeated freely."""
_MAX_RISKS = 1
"""Retries after anything else. The request itself may be what ended a pod, and each pod that ends takes its group."""

_MAX_TAIL_BYTES = 2**20
"""More than an event has; what is longer is passed on as it comes."""


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


class EventTail:
    """Holds back the beginning of an event until its end is there: a stream that breaks never ends within one."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, part: bytes) -> bytes:
        """The whole events of what has come. A pod writes whole ones, so that seldom anything waits."""
        if not self._tail and part.endswith(SSE_END):
            return part
        self._tail += part
        end = self._tail.rfind(SSE_END) + len(SSE_END)
        if end < len(SSE_END):
            end = len(self._tail) if len(self._tail) > _MAX_TAIL_BYTES else 0
        whole, self._tail = self._tail[:end], self._tail[end:]
        return whole

    def finish(self) -> bytes:
        """What the upstream ended with."""
        rest, self._tail = self._tail, b""
        return rest


class Proxy(HangUpResponse):
    """The response to one request. It asks upstream when it is called and hangs up when the client goes."""

    def __init__(self, endpoint: str, request: Request, body: Body, route: Route) -> None:
        """`endpoint` is the path below /v1/; the whole `body` is kept because a retry needs it."""
        super().__init__()
        self._endpoint = endpoint
        self._request = request
        self._body = body
        self._route = route
        self._is_begun = False
        """Whether anything has gone out: from then on nothing can be retried."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._route.metrics.in_flight.track_inprogress():
                await super().__call__(scope, receive, send)
        finally:
            self._body.release()

    def client_gone(self) -> None:
        self._request.state.outcome = CLIENT_GONE

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusals, refused, num_risks = Refusals(), None, 0
        for _ in range(self._route.retries + 1):
            pair = refusals.pick(self._route.pool.lanes(Role.DECODE), self._route.pool.lanes(Role.PREFILL))
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
                num_risks += error.code not in _UNTOUCHED
                if num_risks > _MAX_RISKS:
                    break
                continue
            return
        answer = refused.answer if refused else self._nothing_ready()
        self.is_answered = True
        await answer(scope, receive, send)

    def _nothing_ready(self) -> Response:
        return error_response(ApiError.not_now("nothing_ready", self._route.pool.shortage()))

    async def _try(self, pair: Pair, send: Send) -> None:
        """Ask one pair; pass its answer on. Raises RefusedError while another pair may be asked."""
        # without a limit of its own; `reschedule` ends it at once, without a cost for each token
        limit = asyncio.timeout(None)
        pod = self._route.pool.pod(Role.DECODE, pair.decode.key)
        try:
            async with limit:
                trips = self._set_out(pair, limit)
                try:
                    await self._exchange(pair, send, trips)
                finally:
                    for trip in trips:
                        trip.end()
        except (TimeoutError, aiohttp.ClientError) as error:
            told = _told(error)
            log.warning("pod_lost", pod=pod.address, error=told, is_answer_begun=self._is_begun)
            is_unreached = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError)
            # one that is only slow to connect may be busy; its /state says whether it lives
            if not isinstance(error, TimeoutError):
                pod.lose(told)
            if self._is_begun:
                await self._break_off(send)
                return
            code, what = ("unreachable", "cannot be reached") if is_unreached else ("pod_lost", "is gone")
            lost = ApiError.not_now(code, f"{pod.address} {what}")
            raise RefusedError(code, error_response(lost), pair) from error

    def _set_out(self, pair: Pair, limit: asyncio.Timeout) -> list[Trip]:
        """Note the request with both lanes. Only the decode pod answers; it knows when its prefill lane is gone."""
        pool, now_s, loop = self._route.pool, time.monotonic(), asyncio.get_running_loop()
        decode = pool.pod(Role.DECODE, pair.decode.key)
        trips = [decode.send(pair.decode.key.lane, 0, now_s, lambda: limit.reschedule(loop.time()))]
        if pair.prefill:
            num_tokens = len(self._body.content) // _CHARS_PER_TOKEN
            trips.append(pool.pod(Role.PREFILL, pair.prefill.key).send(pair.prefill.key.lane, num_tokens, now_s))
        return trips

    async def _exchange(self, pair: Pair, send: Send, trips: list[Trip]) -> None:
        url = f"http://{pair.decode.key.pod}/v1/{self._endpoint}"
        headers = self._upstream_headers(pair)
        # as a file it is written in parts, between which other streams go on
        async with self._route.session.post(url, data=BytesIO(self._body.content), headers=headers) as reply:
            if reply.status == 429 or reply.headers.get("x-kimi-retryable") == "true":
                raise await _refusal(reply, pair)
            await self._pass_on(reply, send, trips)

    def _upstream_headers(self, pair: Pair) -> dict[str, str]:
        headers = {name: value for name, value in self._request.headers.items() if name not in _NOT_PASSED_ON}
        headers["x-kimi-lane"] = str(pair.decode.key.lane)
        if pair.prefill:
            headers["x-kimi-prefill"] = pair.prefill.handoff
        return headers

    async def _pass_on(self, reply: aiohttp.ClientResponse, send: Send, trips: list[Trip]) -> None:
        """Send status, headers and content as it comes; `send` waits when the client reads slowly."""
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
        self._is_begun = True
        self._body.release()
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        last = await self._pass_events_on(reply, send, first) if is_stream else first
        self.is_answered = True
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pass_events_on(self, reply: aiohttp.ClientResponse, send: Send, first: bytes) -> bytes:
        """All events; what follows the last of them is returned."""
        tail, part = EventTail(), first
        while part:
            if whole := tail.feed(part):
                await send({"type": "http.response.body", "body": whole, "more_body": True})
            part = await reply.content.readany()
        return tail.finish()

    async def _break_off(self, send: Send) -> None:
        """End a stream whose pod is gone so that the client knows."""
        lost = ApiError(503, "the pod that answered is gone; send the request again", code="pod_lost")
        self.is_answered = True
        self._request.state.outcome = BROKEN
        last = SSE_END + sse_error(lost) + SSE_DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _told(error: Exception) -> str:
    """For logs and other clients: an error in an answer's form may quote the answer, one of a connection does not."""
    kind = type(error).__name__
    return f"{kind}: {error}" if isinstance(error, TimeoutError | aiohttp.ClientConnectionError) else kind


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
