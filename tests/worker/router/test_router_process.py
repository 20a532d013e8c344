"""`kimi-worker route` as a process: how it begins and how it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from ports import free_ports
from replay_engine import Script
from replay_fixtures import Pod, PodFactory, router_settings
from stub_pods import client, until_state, until_up

pytestmark = pytest.mark.multiproc

ASK = {"prompt": "a", "max_tokens": 5, "stream": True}


def route(settings_path: Path, **options: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "KIMI_SETTINGS": str(settings_path)}
    return subprocess.Popen([sys.executable, "-m", "kimi_worker", "route"], env=environment, **options)


@asynccontextmanager
async def running(settings_path: Path, port: int) -> AsyncIterator[tuple[subprocess.Popen[bytes], httpx.AsyncClient]]:
    """The router's process, ready, and a client of it."""
    process = route(settings_path)
    try:
        async with client(f"http://127.0.0.1:{port}") as http:
            await until_up(http)
            yield process, http
    finally:
        process.kill()
        process.wait()


async def test_a_router_that_is_told_to_end_loses_no_request(start_pod: PodFactory, tmp_path: Path) -> None:
    """Not ready first, still serving; then no new connections while the streams that run get their time."""
    prefill, decode = await start_pod(role="prefill"), await start_pod()
    gate = asyncio.Event()
    decode.play(Script([104, 105], gate=gate))
    [port] = free_ports(1)
    settings = router_settings([prefill], [decode], port=port, drain_s=60.0)
    (tmp_path / "router.json").write_text(settings.model_dump_json())
    url = f"http://127.0.0.1:{port}"
    async with running(tmp_path / "router.json", port) as (process, http), client(url) as late:
        stream = asyncio.create_task(http.post("/v1/completions", json=ASK))
        await decode.engine.until(lambda engine: len(engine.submits) == 1)
        process.send_signal(signal.SIGTERM)
        await until_state(http, ready=False, error="draining")
        assert (await http.get("/ready")).status_code == 503
        # endpoints may still name it: a new connection, the first of this client, is taken and answered
        second = asyncio.create_task(late.post("/v1/completions", json=ASK))
        await decode.engine.until(lambda engine: len(engine.submits) == 2)
        await until_refused(port)
        assert process.poll() is None
        gate.set()
        for reply in (stream, second):
            assert (await reply).text.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(process.wait, 30) == 0


async def test_an_idle_connection_outlives_the_clients_patience(start_pod: PodFactory, tmp_path: Path) -> None:
    """httpx uses a connection again for 5 s: a server that closes at 5 s loses the request that comes just then."""
    [port] = free_ports(1)
    settings = router_settings([await start_pod(role="prefill")], [await start_pod()], port=port)
    (tmp_path / "router.json").write_text(settings.model_dump_json())
    async with running(tmp_path / "router.json", port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 2 * httpx.Limits().keepalive_expiry)
        writer.close()


async def until_refused(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)


async def test_a_port_that_is_held_is_named_with_its_holder(pod: Pod, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        settings = json.loads(router_settings([pod], [pod], port=port).model_dump_json())
        (tmp_path / "router.json").write_text(json.dumps(settings))
        process = route(tmp_path / "router.json", stderr=subprocess.PIPE)
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 1
    assert f"port {port}" in said.decode()
    assert f"process {os.getpid()} (" in said.decode().splitlines()[-1]
