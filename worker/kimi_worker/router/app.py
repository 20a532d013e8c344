"""The router's HTTP app: one address in front of all pods of a deployment."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kimi_worker.protocol.openai import ApiError
from kimi_worker.router.metrics import Metrics
from kimi_worker.router.pick import explain, pick
from kimi_worker.router.pool import Pool
from kimi_worker.router.proxy import Proxy, Route
from kimi_worker.server.http import KEEP_ALIVE_S, add_error_handlers, read_body
from kimi_worker.server.work import unknown_model
from kimi_worker.settings import Role, RouterSettings

MAX_BODY_BYTES = 2**27
"""The pods know the model and may take less."""

_CONNECT_S = 5.0
"""To a pod in the same cluster; how long an answer takes is the client's choice."""

_KEEP_ALIVE_S = KEEP_ALIVE_S / 2
"""So that a pod never closes a connection just as it is used again."""


@dataclass(slots=True)
class Shared:
    """What exists only while the app runs."""

    route: Route

    @property
    def shortage(self) -> str | None:
        """Why no request can be answered now; None when one can."""
        pool = self.route.pool
        decodes, prefills = pool.lanes(Role.DECODE), pool.lanes(Role.PREFILL)
        if pick(decodes, prefills):
            return None
        details = pool.shortage()
        return explain(decodes, prefills) + (f" ({details})" if details else "")

    async def models(self) -> list[dict[str, object]]:
        """What a ready pod serves. Raises ApiError (503)."""
        pod = self.route.pool.ready_pod()
        if pod is None:
            raise _not_ready("nothing_ready", self.shortage or "no decode pod is ready")
        try:
            async with self.route.session.get(f"{pod.url}/v1/models") as reply:
                return _models_decoder.decode(await reply.read()).data
        except (aiohttp.ClientError, msgspec.DecodeError) as error:
            pod.lose(f"/v1/models: {type(error).__name__}: {error}")
            raise _not_ready("pod_lost", f"{pod.address} did not say what it serves") from error


class _ModelList(msgspec.Struct):
    data: list[dict[str, object]]


_models_decoder = msgspec.json.Decoder(_ModelList)


def _not_ready(code: str, message: str) -> ApiError:
    return ApiError(503, message, code=code, is_retryable=True, retry_after_s=1.0)


def create_app(settings: RouterSettings) -> FastAPI:
    """The router of one deployment."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session,
            Pool(settings, session) as pool,
        ):
            metrics.watch(pool)
            app.state.shared = Shared(Route(pool, session, metrics, settings.retries))
            yield

    app = FastAPI(title="Kimi router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    _add_openai_routes(app, settings)
    _add_own_routes(app, settings, metrics)
    return app


def _add_openai_routes(app: FastAPI, settings: RouterSettings) -> None:
    # named one by one: a path that a client makes up must not reach a pod's other endpoints
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return Proxy("chat/completions", request, await read_body(request, MAX_BODY_BYTES), app.state.shared.route)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Proxy("completions", request, await read_body(request, MAX_BODY_BYTES), app.state.shared.route)

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
        reason = app.state.shared.shortage
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


async def serve(settings: RouterSettings) -> None:
    """Run the router until a signal; streams that run may end first."""
    config = uvicorn.Config(
        create_app(settings),
        host="0.0.0.0",  # noqa: S104  # the pod's network is its own
        port=settings.port,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=60,
    )
    await uvicorn.Server(config).serve()


def run(settings: RouterSettings) -> None:
    """Serve on uvloop, which costs a quarter less processor time a token than asyncio's own loop."""
    uvloop.run(serve(settings))
