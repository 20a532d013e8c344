"""A client that says byte by byte what it wants to."""

import asyncio
import socket
from contextlib import suppress

import httpx

LIMIT_S = 60
"""For a machine that is busy with other things."""


class RawClient:
    """One connection."""

    def __init__(self, url: str) -> None:
        self._connection = socket.create_connection(("127.0.0.1", httpx.URL(url).port))
        self._connection.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, data)

    async def receive_until(self, wanted: bytes) -> None:
        """Raises AssertionError at the end of the connection."""
        received = b""
        while wanted not in received:
            received += (part := await self._receive())
            assert part, f"ended after {received!r}"

    async def _receive(self) -> bytes:
        """At least a byte, or nothing at the end."""
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.get_running_loop().sock_recv(self._connection, 2**16)

    async def receive_all(self) -> bytes:
        """What comes until the end: orderly, or by a reset, because it comes while something is being sent."""
        received = b""
        with suppress(ConnectionResetError):
            while part := await self._receive():
                received += part
        return received

    async def drip(self, data: bytes) -> tuple[int, bytes]:
        """Send a byte every 10 ms, until all is sent or the other side ends; bytes sent, and what was received."""
        received = asyncio.create_task(self.receive_all())
        num_sent = 0
        while num_sent < len(data) and not (await asyncio.wait({received}, timeout=0.01))[0]:
            with suppress(ConnectionError):
                await self.send(data[num_sent : num_sent + 1])
            num_sent += 1
        return num_sent, await received

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
