"""Connections that bring no whole request: they end, and cost little until then."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from kimi_worker.server.connections import MAX_HEAD_BYTES, BoundedProtocol
from kimi_worker.server.serving import uvicorn_config
from raw_client import RawClient

GET = b"GET /quick HTTP/1.1\r\nHost: kimi\r\n\r\n"


@asynccontextmanager
async def serving(idle_s: float, app: FastAPI | None = None) -> AsyncIterator[str]:
    """An app as ours are served, that ends idle connections after this time."""
    app = app or FastAPI()

    @app.get("/quick")
    async def quick() -> str:
        return "quick"

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(2 * idle_s)  # what takes long is the point
        return "slow"

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        return StreamingResponse(events())

    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 2**16
                app.state.num_sent += 1
                await asyncio.sleep(0)  # for the client, which is in the same process
        finally:
            app.state.ended.set()

    @app.post("/early")
    async def early(_: Request) -> str:
        return "answered before the body has come"

    config = uvicorn_config(app, 1.0)
    config.timeout_keep_alive = idle_s
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@pytest.mark.parametrize("start", [b"", b"GET /qui", GET[:-2]])
async def test_a_connection_without_a_head_ends(start: bytes) -> None:
    async with serving(idle_s=0.3) as url:
        with RawClient(url) as idle:
            await idle.send(start)
            assert await idle.receive_all() == b""


async def test_a_head_that_drips_in_ends() -> None:
    async with serving(idle_s=0.3) as url:
        with RawClient(url) as slow:
            num_sent, answer = await slow.drip(GET[:-2] + b"x: " + b"y" * 1000)
    assert answer == b""
    assert num_sent < 1000


async def test_the_rest_of_a_body_that_was_answered_is_no_reason_to_wait() -> None:
    async with serving(idle_s=0.3) as url:
        with RawClient(url) as slow:
            await slow.send(b"POST /early HTTP/1.1\r\nHost: kimi\r\nContent-Length: 1000\r\n\r\n")
            num_sent, answer = await slow.drip(b"x" * 1000)
    assert answer.startswith(b"HTTP/1.1 200")
    assert num_sent < 1000


async def test_a_long_answer_is_no_idle_time() -> None:
    # a busy machine, and one that stalls, must send the second request within this time
    async with serving(idle_s=4.0) as url:
        with RawClient(url) as client:
            await client.send(GET)
            await client.receive_until(b'"quick"')
            await client.send(GET.replace(b"quick", b"slow"))
            assert b"slow" in await client.receive_all()


async def test_an_answer_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "max_unread_s", 0.3)
    app = FastAPI()
    app.state.num_sent, app.state.ended = 0, asyncio.Event()
    async with serving(idle_s=60, app=app) as url:
        with RawClient(url) as client:
            await client.send(GET.replace(b"quick", b"endless"))
            await asyncio.wait_for(app.state.ended.wait(), 60)
            assert app.state.num_sent < 1000


async def test_reading_on_in_time_keeps_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full buffers start the clock, and reading stops it: seen on the clock, so that no machine is too slow."""
    timers: asyncio.Queue[asyncio.TimerHandle] = asyncio.Queue()
    pause = BoundedProtocol.pause_writing

    def remember(self: BoundedProtocol) -> None:
        pause(self)
        assert self.unread_timer is not None
        timers.put_nowait(self.unread_timer)

    monkeypatch.setattr(BoundedProtocol, "pause_writing", remember)
    app = FastAPI()
    app.state.num_sent, app.state.ended = 0, asyncio.Event()
    async with serving(idle_s=60, app=app) as url, asyncio.timeout(60):
        with RawClient(url) as client:
            await client.send(GET.replace(b"quick", b"endless"))
            for _ in range(2):
                timer = await timers.get()
                while not timer.cancelled():
                    await client.receive_until(b"x")
            assert not app.state.ended.is_set()


async def test_a_head_without_end_is_refused() -> None:
    async with serving(idle_s=60) as url:
        with RawClient(url) as client:
            await client.send(GET[:-2])
            answer = asyncio.create_task(client.receive_all())
            line = b"x: " + b"y" * 1000 + b"\r\n"
            num_sent = 0
            while not answer.done() and num_sent < 100 * MAX_HEAD_BYTES:
                try:
                    await client.send(line)
                except ConnectionError:
                    break
                num_sent += len(line)
                await asyncio.sleep(0)
            assert (await answer).startswith(b"HTTP/1.1 400")
    assert num_sent < 100 * MAX_HEAD_BYTES


async def test_long_heads_and_many_requests_pass() -> None:
    head = GET[:-2] + b"x: " + b"y" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n"
    async with serving(idle_s=60) as url:
        with RawClient(url) as client:
            for _ in range(3):
                for at in range(0, len(head), 10_000):
                    await client.send(head[at : at + 10_000])
                await client.receive_until(b'"quick"')
