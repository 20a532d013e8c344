"""The HTTP API of a worker pod."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kimi_worker.protocol.engine import LaneState
from kimi_worker.protocol.handoff import is_endpoint
from kimi_worker.protocol.openai import ApiError, echo
from kimi_worker.server.generation import Generation, Tools
from kimi_worker.server.http import PATIENCE, Patience, add_error_handlers, read_body
from kimi_worker.server.lanes import Lane, Lanes
from kimi_worker.server.listen import take_port
from kimi_worker.server.metrics import Metrics
from kimi_worker.server.private_logs import log_privately
from kimi_worker.server.serving import spare_collector, uvicorn_config
from kimi_worker.server.work import Intake, Work, unknown_model
from kimi_worker.settings import PodIdentity, Role, WorkerSettings

_IN_THREAD_BYTES = 2**16
"""Larger bodies are read and tokenised in a thread, so that they do not hold up the streams."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What the handlers share."""

    settings: WorkerSettings
    identity: PodIdentity
    intake: Intake
    lanes: Lanes
    metrics: Metrics
    patience: Patience

    def state(self) -> dict[str, object]:
        """The pod as the router and the operator see it."""
        states = self.lanes.states
        not_ready = self.lanes.not_ready
        return {
            "deployment": self.settings.deployment,
            "role": self.settings.role.value,
            "group": self.identity.group,
            "generation": self.identity.generation,
            "layout_hash": states[0].layout_hash if states else "",
            "ready": not_ready is None,
            "draining": self.lanes.is_draining,
            "error": not_ready,
            "max_body_bytes": self.intake.max_body_bytes,
            "lanes": [_lane_state(state) for state in states],
            "fabric": _fabric(states),
            "memory": {
                "weights_bytes": sum(state.weights_bytes for state in states),
                "pages_bytes": sum(state.pages_bytes for state in states),
                "slots_bytes": sum(state.slots_bytes for state in states),
                "free_bytes": sum(state.free_bytes for state in states),
            },
        }

    def model(self) -> dict[str, object]:
        """The entry of /v1/models."""
        name = self.intake.served_name
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "kimi",
            "max_model_len": self.intake.max_model_len,
        }

    def choose_lane(self, request: Request) -> Lane:
        """The lane that the router names, else the least busy one. Raises ApiError."""
        wanted = request.headers.get("x-kimi-lane")
        if wanted is None:
            return self.lanes.least_busy()
        if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 10 and int(wanted) < len(self.lanes)):
            raise ApiError.bad("x-kimi-lane", f"got {echo(wanted)}; this pod has lanes 0 to {len(self.lanes) - 1}")
        return self.lanes[int(wanted)]

    def prefill_endpoint(self, request: Request) -> str | None:
        """The prefill lane that the router names. Raises ApiError."""
        endpoint = request.headers.get("x-kimi-prefill")
        if endpoint is None:
            return None
        if not is_endpoint(endpoint):
            raise ApiError.bad("x-kimi-prefill", f"got {echo(endpoint)}; want tcp://<ip>:<port>")
        if self.settings.role is not Role.DECODE:
            raise ApiError.bad("x-kimi-prefill", "this pod computes prompts itself and takes no handoffs; leave it out")
        return endpoint

    def check_ready(self) -> None:
        """Raises ApiError (503) that another pod may answer."""
        if self.settings.role is Role.PREFILL:
            raise ApiError(
                400, "this pod only prefills; send requests to the router or a decode pod", code="wrong_role"
            )
        if reason := self.lanes.not_ready:
            code = "draining" if self.lanes.is_draining else "not_ready"
            raise ApiError.not_now(code, f"this pod is not ready: {reason}")


def _fabric(states: list[LaneState]) -> dict[str, object]:
    """The prefill lanes known to this pod, and how many of them have proven to every lane that they can write here."""
    return {
        "peers": max((state.fabric_peers for state in states), default=0),
        "verified": min((state.fabric_verified for state in states), default=0),
        "error": next((state.fabric_error for state in states if state.fabric_error), ""),
    }


def _lane_state(state: LaneState) -> dict[str, object]:
    names = (
        "lane handoff running waiting reserved queued_tokens num_pages free_pages num_slots free_slots max_num_seqs "
        "transfers quarantined preemptions steps step_s"
    )
    return {name: getattr(state, name) for name in names.split()}


def create_app(settings: WorkerSettings, identity: PodIdentity, patience: Patience = PATIENCE) -> FastAPI:
    """The app of one pod. Raises TokenizerError when the checkpoint's tokenizer cannot be read."""
    intake = Intake.load(settings.model.checkpoint, settings.model.served_name, settings.model.max_model_len)
    lanes = Lanes(identity.run_dir, settings.parallel.lanes_per_node)
    pod = Pod(settings, identity, intake, lanes, Metrics(settings.model.served_name, lanes), patience)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with lanes:
            yield

    app = FastAPI(title="Kimi worker", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.pod = pod
    add_error_handlers(app)
    _add_openai_routes(app, pod)
    _add_pod_routes(app, pod)
    return app


def _add_openai_routes(app: FastAPI, pod: Pod) -> None:
    async def generate(request: Request, read: Callable[[bytes], Work]) -> Response:
        # first, so that nobody is refused while still sending: some clients take that for a broken connection
        body = await read_body(request, pod.intake.max_body_bytes, patience=pod.patience)
        pod.check_ready()
        lane, prefill = pod.choose_lane(request), pod.prefill_endpoint(request)
        work = await asyncio.to_thread(read, body) if len(body) > _IN_THREAD_BYTES else read(body)
        tools = Tools(
            tokenizer=pod.intake.tokenizer,
            metrics=pod.metrics,
            # a lane answers between two steps, and no step is longer than its collectives may take
            admission_timeout_s=pod.settings.timeouts.collective_s,
            with_stats=request.headers.get("x-kimi-stats") == "1",
        )
        return Generation(work, lane, prefill, tools)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, pod.intake.chat_work)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, pod.intake.completion_work)

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [pod.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        if name != pod.intake.served_name:
            raise unknown_model(name, pod.intake.served_name)
        return pod.model()


def _add_pod_routes(app: FastAPI, pod: Pod) -> None:
    lanes = pod.lanes

    @app.get("/health")
    async def health() -> Response:
        silent_s = max((lanes[index].silent_s for index in range(len(lanes))), default=0.0)
        limit_s = 2 * pod.settings.timeouts.collective_s
        error = lanes.error or (f"a busy lane has said nothing for {silent_s:.0f} s" if silent_s > limit_s else None)
        return JSONResponse({"error": error}, 503 if error else 200)

    @app.get("/ready")
    async def ready() -> Response:
        reason = lanes.not_ready
        return JSONResponse({"ready": reason is None, "reason": reason}, 503 if reason else 200)

    @app.get("/state")
    async def state() -> Response:
        return JSONResponse(pod.state())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(pod.metrics.text(), media_type="text/plain; version=0.0.4")


async def serve(settings: WorkerSettings, identity: PodIdentity) -> None:
    """Run the API process until a signal; streams that run get `timeouts.drain_s` to end. Raises PortError."""
    listener = take_port(settings.ports.api, settings.ports.address)
    log_privately()
    config = uvicorn_config(create_app(settings, identity), settings.timeouts.drain_s)
    spare_collector()
    await uvicorn.Server(config).serve([listener])
