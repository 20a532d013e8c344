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
from kimi_operator.intake import Intake, NotTaken
from kimi_operator.listener import Listener
from kimi_operator.observe import NodeSeen, read_node

PATH = "/admit"
ANSWER_S = 3.0
"""Less than the API server waits by the chart's default."""
LOOK_AGAIN_S = 20.0
"""How often the certificate is looked at; the kubelet brings a new one within about a minute."""
MAX_BODY_BYTES = 4 * 2**20
"""An object and its former self, each of the largest size that etcd takes."""
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""Bodies that come or wait, in sum. Whoever reaches the port may ask."""
MAX_AT_ONCE = 16
"""Questions that are decided at once; others wait."""
MAX_CONNECTIONS = 128
"""Each costs some 0.3 MiB. An API server keeps up to 25."""
IDLE_S = 120.0
"""For a head to come, and between two requests: longer than the 90 s that API servers keep an idle connection."""
MAX_HEADERS = 32
"""Of up to 8 KiB each. An API server sends about eight."""
LARGE_BYTES = 2**17
"""Questions beyond are decided one at a time: as Python's objects, JSON takes up to some 30 times its bytes."""
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
    _listener: Listener | None = None
    _intake: Intake = field(default_factory=lambda: Intake(MAX_BODY_BYTES, MAX_HELD_BYTES))
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE))
    _large_place: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    async def serve(self) -> NoReturn:
        """Serve as soon as there is a certificate, until cancelled."""
        async with AsyncExitStack() as resources:
            while True:
                if self.certificate.renew() and not self.bound_port:
                    await self._start(resources)
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _start(self, resources: AsyncExitStack) -> None:
        app = web.Application()
        app.router.add_post(PATH, self._answer)
        # Decompressed, a few bytes could be any number; the API server sends them as they are.
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=ANSWER_S, auto_decompress=False,
            keepalive_timeout=IDLE_S, max_headers=MAX_HEADERS,
        )  # fmt: skip
        await runner.setup()
        resources.push_async_callback(runner.cleanup)
        self._listener = Listener.bind_to(self.host, self.port, MAX_CONNECTIONS)
        await web.SockSite(runner, self._listener, ssl_context=self.certificate.context).start()
        self.bound_port = runner.addresses[0][1]
        log.info("webhook_serves", port=self.bound_port)

    async def _answer(self, http: web.Request) -> web.Response:
        until_s = asyncio.get_running_loop().time() + ANSWER_S
        if self._listener is None or http.transport is None:
            return _no_answer(400, "the connection is gone")
        connection = http.transport.get_extra_info("socket").fileno()
        self._listener.use(connection)
        async with AsyncExitStack() as held:
            try:
                body = await self._take(http, held, until_s)
            except NotTaken as why:
                return _no_answer(why.status, why)
            with self._listener.keep(connection):
                return await self._answer_to(body, until_s)

    async def _take(self, http: web.Request, held: AsyncExitStack, until_s: float) -> bytearray:
        """The body, once it is whole and has a place, which `held` gives back. Raises NotTaken.

        A place is taken only then: who sends slowly must keep nobody else from being answered.
        """
        is_whole = False
        with self._intake.expect() as coming:
            try:
                async with asyncio.timeout_at(until_s):
                    await coming.read(http.content.iter_any())
                    is_whole = True
                    is_large = len(coming.data) > LARGE_BYTES
                    await held.enter_async_context(self._large_place if is_large else self._places)
            except TimeoutError as error:
                status, what = (503, "no place was free") if is_whole else (408, "the body did not come")
                raise NotTaken(status, f"{what} within {ANSWER_S:g} s") from error
            except ConnectionError as error:
                raise NotTaken(400, "the body broke off") from error
            coming.require()
            return coming.data

    async def _answer_to(self, body: bytearray, until_s: float) -> web.Response:
        try:
            request = read_request(json.loads(body))
        except InvalidSpec as error:
            return _no_answer(400, error)
        except (ValueError, RecursionError) as error:
            return _no_answer(400, f"the body is no JSON: {error}")
        verdict = await self._judge(request, until_s)
        self.count(verdict.answer.value)
        if verdict.answer is Answer.REFUSED and request.object is not None:
            metadata = request.object.get("metadata", {})
            name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
            log.info("refused_at_admission", deployment=name, operation=request.operation, why=verdict.message)
        return web.json_response(verdict.to_review(request.uid))

    async def _judge(self, request: Request, until_s: float) -> Verdict:
        if not request.is_relevant:
            return ALLOWED
        try:
            async with asyncio.timeout_at(until_s):
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


def _no_answer(status: int, why: object) -> web.Response:
    """In words. They may repeat what was asked, and JSON's strings may hold halves of characters that UTF-8 has not."""
    words = f"{why}\n".encode(errors="backslashreplace")
    return web.Response(status=status, body=words, content_type="text/plain", charset="utf-8")
