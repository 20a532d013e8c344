"""The router's HTTP app: one address in front of all pods of a deployment."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType

import aiohttp
import msgspec
import structlog
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kimi_worker.protocol.openai import ApiError
from kimi_worker.router.bodies import Bodies
from kimi_worker.router.counting import Counting
from kimi_worker.router.metrics import Metrics
from kimi_worker.router.pick import pick
from kimi_worker.router.pool import Pool
from kimi_worker.router.proxy import Proxy, Route
from kimi_worker.server.http import PATIENCE, Patience, add_error_handlers
from kimi_worker.server.listen import keep_alive, take_port
from kimi_worker.server.private_logs import log_privately
from kimi_worker.server.serving import KEEP_ALIVE_S, spare_collector, uvicorn_config
from kimi_worker.server.work import unknown_model
from kimi_worker.settings import Role, RouterSettings

log = structlog.get_logger()

MAX_BODY_BYTES = 2**27
"""Until a pod has said what it takes."""

_CONNECT_S = 30.0
"""To a pod in the same cluster: a last resort, since a pod that stops telling its state is given up sooner.

On a loaded machine the router itself may come to its sockets seconds late.
"""

_ASK_S = 5.0
"""For a pod to say what it serves."""

_KEEP_ALIVE_S = KEEP_ALIVE_S / 2
"""So that a pod never closes a connection just as it is used again."""

_UNACKNOWLEDGED_MS = 20_000
"""A pod that takes in no byte for so long has lost its machine or its network."""

_OWN_PATHS = frozenset({"/health", "/ready", "/state", "/metrics"})
"""Asked every few seconds by Kubernetes, the operator and Prometheus."""

_NOTICE_S = 5.0
"""From not ready to no new connections: for the endpoints to forget this router. Requests are taken until then."""


@dataclass(slots=True)
class Shared:
    """What exists only while the app runs."""

    route: Route
    bodies: Bodies
    is_draining: bool = False
    was_ready: bool = False

    @property
    def max_body_bytes(self) -> int:
        return self.route.pool.max_body_bytes or MAX_BODY_BYTES

    @property
    def shortage(self) -> str | None:
        """Why no request should be sent here now; None when one can be answered."""
        if self.is_draining:
            return "draining"
        pool = self.route.pool
        return None if pick(pool.lanes(Role.DECODE), pool.lanes(Role.PREFILL)) else pool.shortage()

    @property
    def why_not_ready(self) -> str | None:
        """Why this router should get no connections. Once it could answer it stays: a 503 says more than a refusal."""
        shortage = self.shortage
        self.was_ready |= shortage is None
        return shortage if self.is_draining or not self.was_ready else None

    async def models(self) -> list[dict[str, object]]:
        """What a ready pod serves. Raises ApiError (503)."""
        pod = self.route.pool.ready_pod()
        if pod is None:
            raise ApiError.not_now("nothing_ready", self.shortage or "no decode pod is ready")
        try:
            timeout = aiohttp.ClientTimeout(total=_ASK_S)
            async with self.route.session.get(f"{pod.url}/v1/models", timeout=timeout) as reply:
                reply.raise_for_status()
                return _models_decoder.decode(await reply.read()).data
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            message = f"{pod.address} did not say what it serves: {type(error).__name__}: {error}"
            raise ApiError.not_now("pod_lost", message) from error


class _ModelList(msgspec.Struct):
    data: list[dict[str, object]]


_models_decoder = msgspec.json.Decoder(_ModelList)


def create_app(settings: RouterSettings, patience: Patience = PATIENCE) -> FastAPI:
    """The router of one deployment."""
    metrics, bodies = Metrics(), Bodies(settings.max_held_bytes, patience)
    metrics.watch_bodies(bodies)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_upstream_socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session,
            Pool(settings, session) as pool,
        ):
            metrics.watch(pool)
            app.state.shared = Shared(Route(pool, session, metrics, settings.retries), bodies)
            yield

    app = FastAPI(title="Kimi router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    app.add_middleware(Counting, metrics=metrics, unless=_OWN_PATHS)
    _add_openai_routes(app, settings)
    _add_own_routes(app, settings, metrics)
    return app


def _upstream_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Notices a peer that has vanished without a word, while nothing is said and while bytes are on their way."""
    connection = socket.socket(address[0], address[1], address[2])
    connection.setblocking(False)
    keep_alive(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    return connection


def _add_openai_routes(app: FastAPI, settings: RouterSettings) -> None:
    async def proxy(endpoint: str, request: Request) -> Response:
        shared: Shared = app.state.shared
        body = await shared.bodies.read(request, shared.max_body_bytes)
        return Proxy(endpoint, request, body, shared.route)

    # named one by one: a path that a client makes up must not reach a pod's other endpoints
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await proxy("chat/completions", request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await proxy("completions", request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": await app.state.shared.models()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        for entry in await app.state.shared.models():
            if entry["id"] == name:
                return JSONResponse(entry)
        raise unknown_model(name, settings.served_name)


def _add_own_routes(app: FastAPI, settings: RouterSettings, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"error": None})

    @app.get("/ready")
    async def ready() -> Response:
        reason = app.state.shared.why_not_ready
        return JSONResponse({"ready": reason is None, "reason": reason}, 503 if reason else 200)

    @app.get("/state")
    async def state() -> Response:
        shared: Shared = app.state.shared
        return JSONResponse(
            {
                "deployment": settings.deployment,
                "served_name": settings.served_name,
                "ready": shared.shortage is None,
                "error": shared.shortage,
                **shared.route.pool.view(),
            }
        )

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")


class _Server(uvicorn.Server):
    """Says that it is not ready, serves on until that is known, then takes no more and lets what runs end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_s: float) -> None:
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._app = app
        self._drain_s = drain_s
        self._is_told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_told or not self.started:
            super().handle_exit(sig, frame)
            return
        self._is_told = True
        self._loop.call_soon_threadsafe(self._drain, sig)

    def _drain(self, sig: int) -> None:
        notice_s = min(_NOTICE_S, self._drain_s / 4)
        log.info("router_draining", signal=signal.Signals(sig).name, notice_s=notice_s, drain_s=self._drain_s)
        self._app.state.shared.is_draining = True
        self._loop.call_later(notice_s, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


async def serve(settings: RouterSettings, listener: socket.socket) -> None:
    """Run the router until a signal; streams that run get `drain_s` to end."""
    log_privately()
    app = create_app(settings)
    config = uvicorn_config(app, settings.drain_s)
    spare_collector()
    await _Server(config, app, settings.drain_s).serve([listener])


def run(settings: RouterSettings) -> None:
    """Serve on uvloop, which costs a quarter less processor time a token than asyncio's own loop. Raises PortError."""
    uvloop.run(serve(settings, take_port(settings.port)))
