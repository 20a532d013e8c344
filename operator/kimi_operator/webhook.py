"""Answers the API server's question whether a KimiDeployment may be written, over TLS, in every replica.

It holds nothing up: where something is missing (a certificate, an answer about profiles), it lets pass and says so.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import structlog
from aiohttp import web

from kimi_operator.admission import ALLOWED, Answer, Request, Verdict, judge, read_request
from kimi_operator.cluster import Cluster
from kimi_operator.desire import Profiles, names_profile, read_profiles
from kimi_operator.errors import InvalidSpec, KimiError
from kimi_operator.observe import NodeSeen, read_node

PATH = "/admit"
ANSWER_S = 3.0
"""Less than the API server waits by the chart's default."""
LOOK_AGAIN_S = 20.0
"""How often the certificate is looked at; the kubelet brings a new one within about a minute."""
MAX_BODY_BYTES = 4 * 2**20
"""An object and its former self, each of the largest size that etcd takes."""
MAX_AT_ONCE = 16
"""Questions that are held in memory; others wait. Whoever reaches the port may ask."""
log = structlog.get_logger()


@dataclass(slots=True)
class Certificate:
    """tls.crt and tls.key of a folder; a new pair counts from the next connection on."""

    folder: Path
    context: ssl.SSLContext = field(default_factory=lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    _loaded: tuple[bytes, bytes] | None = None
    _refused: str = ""

    def renew(self) -> bool:
        """Take the pair that lies there, if it is another and whole. Whether there is one to serve with."""
        paths = self.folder / "tls.crt", self.folder / "tls.key"
        try:
            pair = paths[0].read_bytes(), paths[1].read_bytes()
            if pair != self._loaded:
                # A pair that does not belong together must not replace one that does.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*paths)
                self.context.load_cert_chain(*paths)
                log.info("certificate_loaded", folder=str(self.folder))
                self._loaded, self._refused = pair, ""
        except OSError as error:  # of which ssl.SSLError is one
            if str(error) != self._refused:
                log.warning("certificate_not_loaded", folder=str(self.folder), error=str(error))
            self._refused = str(error)
        return self._loaded is not None


@dataclass(slots=True)
class Webhook:
    """The endpoint. It reads profiles, and nodes where no profile is named, anew for each question."""

    cluster: Cluster
    certificate: Certificate
    count: Callable[[str], None]
    """Told of each answer."""
    port: int
    node_selector: str = ""
    host: str | None = None
    """All addresses when absent."""
    bound_port: int = 0
    """Where it listens, once it does; 0 before."""
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE))

    async def serve(self) -> NoReturn:
        """Serve as soon as there is a certificate, until cancelled."""
        async with AsyncExitStack() as resources:
            while True:
                if self.certificate.renew() and not self.bound_port:
                    await self._start(resources)
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _start(self, resources: AsyncExitStack) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(PATH, self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=ANSWER_S)
        await runner.setup()
        resources.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, self.host, self.port, ssl_context=self.certificate.context).start()
        self.bound_port = runner.addresses[0][1]
        log.info("webhook_serves", port=self.bound_port)

    async def _answer(self, http: web.Request) -> web.Response:
        async with self._places:
            try:
                async with asyncio.timeout(ANSWER_S):
                    body = await http.read()
            except TimeoutError:
                return web.Response(status=408, text=f"the body did not come within {ANSWER_S:g} s\n")
            return await self._answer_to(body)

    async def _answer_to(self, body: bytes) -> web.Response:
        try:
            request = read_request(json.loads(body))
        except InvalidSpec as error:
            return web.Response(status=400, text=f"{error}\n")
        except (ValueError, RecursionError) as error:
            return web.Response(status=400, text=f"the body is no JSON: {error}\n")
        verdict = await self._judge(request)
        self.count(verdict.answer.value)
        if verdict.answer is Answer.REFUSED and request.object is not None:
            metadata = request.object.get("metadata", {})
            name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
            log.info("refused_at_admission", deployment=name, operation=request.operation, why=verdict.message)
        return web.json_response(verdict.to_review(request.uid))

    async def _judge(self, request: Request) -> Verdict:
        if not request.is_relevant:
            return ALLOWED
        try:
            async with asyncio.timeout(ANSWER_S):
                profiles, nodes = await self._surroundings(request)
        except (KimiError, TimeoutError) as error:
            why = str(error) or f"the API server did not answer in {ANSWER_S:g} s"
            log.warning("admission_not_checked", error=why)
            return Verdict(Answer.WARNED, f"not checked whether this fits: {why}")
        return judge(request, profiles, nodes)

    async def _surroundings(self, request: Request) -> tuple[Profiles, list[NodeSeen]]:
        profiles = read_profiles((await self.cluster.list("HardwareProfile")).documents)
        if all(names_profile(document) for document in request.documents):
            return profiles, []
        nodes = await self.cluster.list("Node", labels=self.node_selector or None)
        return profiles, [read_node(node) for node in nodes.documents]
