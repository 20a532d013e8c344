"""Pods that misbehave, for the router's tests, and what those tests share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
from replay_fixtures import Pod

Answer = Callable[["StubPod", asyncio.StreamWriter], Awaitable[None]]

EVENT = b'data: {"id":"1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"hi"}]}\n\n'
"""One that the official client reads."""


class StubPod:
    """Answers GET /state with its report while it is not silent, and every other request with `answer`."""

    def __init__(self, report: dict[str, Any], answer: Answer) -> None:
        self.is_silent = False
        """Takes connections as a stopped or vanished process does, and says nothing."""
        self.num_asked = 0
        """Requests that are not for /state."""
        self.release = asyncio.Event()
        self.address = ""
        self._server: asyncio.Server | None = None
        self.report = httpx.Response(200, json=report).content
        self._answer = answer

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["StubPod"]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        async with self._server:
            yield self
            self.release.set()

    def close(self) -> None:
        """Refuse connections from now on."""
        assert self._server
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"GET /state"):
                self.num_asked += 1
                await self._answer(self, writer)
            elif self.is_silent:
                await self.release.wait()
            else:
                writer.write(whole(200, self.report))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def whole(status: int, body: bytes, headers: bytes = b"") -> bytes:
    """An answer after which the connection ends."""
    head = b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n%s\r\n" % (status, len(body), headers)
    return head + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def stub_pods(report: dict[str, Any], answer: Answer, count: int = 1) -> AsyncIterator[list[StubPod]]:
    """That many pods, listening."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(StubPod(report, answer).listening()) for _ in range(count)]


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        yield http


async def until_up(http: httpx.AsyncClient, path: str = "/ready") -> None:
    """Wait until a process that has just been started answers with success."""
    async with asyncio.timeout(60):
        while True:
            with suppress(httpx.TransportError):
                if (await http.get(path)).is_success:
                    return
            await asyncio.sleep(0.05)


async def until_state(http: httpx.AsyncClient, **wanted: object) -> dict[str, Any]:
    """Wait until the router's /state has these values."""
    async with asyncio.timeout(60):
        while True:
            state = (await http.get("/state")).json()
            if all(state[name] == value for name, value in wanted.items()):
                return state


async def report_of(pod: Pod, **changes: object) -> dict[str, Any]:
    """A pod's /state with changes to its first lane."""
    async with client(pod.url) as http:
        report = (await http.get("/state")).json()
    report["lanes"][0].update(changes)
    return report
