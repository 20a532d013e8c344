"""The router counts every answer once, by its status, whoever gave it."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from kimi_worker.router.app import create_app
from kimi_worker.server.http import Patience
from prometheus_client.parser import text_string_to_metric_families
from raw_client import RawClient
from replay_engine import Script
from replay_fixtures import Pod, PodFactory, listening, router_settings
from stub_pods import client, until_state

ASK = {"prompt": "a", "max_tokens": 5}
PATIENT = Patience(silence_s=60.0, bytes_per_s=1.0)
SHORT = Patience(silence_s=0.3, bytes_per_s=1000.0)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: kimi\r\nContent-Length: 1000\r\n\r\n"


async def counts(http: httpx.AsyncClient) -> dict[str, float]:
    """By result, without what is 0."""
    page = (await http.get("/metrics")).text
    return {
        sample.labels["result"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "kimi_router_requests_total"
    }


async def until_counted(http: httpx.AsyncClient, **wanted: float) -> None:
    """What nobody is left to read is counted a moment later."""
    async with asyncio.timeout(60):
        while (seen := await counts(http)) != wanted:
            assert sum(seen.values()) <= sum(wanted.values()), seen
            await asyncio.sleep(0.01)


@pytest.fixture
async def decode(start_pod: PodFactory) -> Pod:
    pod: Pod = await start_pod(max_model_len=1024)
    pod.play(Script([104, 105]))
    return pod


@pytest.fixture
async def app(start_pod: PodFactory, decode: Pod) -> FastAPI:
    prefill = await start_pod(role="prefill")
    return create_app(router_settings([prefill], [decode]), PATIENT)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with listening(app) as url, client(url) as http:
        await until_state(http, ready=True)
        yield http


async def test_answers_of_pods_and_of_routes(http: httpx.AsyncClient) -> None:
    for reply, status in (
        (await http.post("/v1/completions", json=ASK), 200),
        (await http.post("/v1/completions", json={**ASK, "stream": True}), 200),
        (await http.get("/v1/models"), 200),
        (await http.post("/v1/completions", json={**ASK, "n": 2}), 400),
        (await http.post("/v1/completions", json={**ASK, "model": "gpt"}), 404),
        (await http.get("/v1/models/gpt"), 404),
        (await http.get("/nothing"), 404),
        (await http.get("/v1/completions"), 405),
        (await http.post("/v1/completions", content=b" " * 2_000_000), 413),
    ):
        assert reply.status_code == status
    assert await counts(http) == {"200": 3, "400": 1, "404": 3, "405": 1, "413": 1}


async def test_what_watches_the_router_is_not_counted(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/state", "/metrics"):
        assert (await http.get(path)).is_success
    assert await counts(http) == {}


async def test_full_pods_and_a_full_router(http: httpx.AsyncClient, decode: Pod, app: FastAPI) -> None:
    decode.play(Script(refusal=("queue_full", True)))
    assert (await http.post("/v1/completions", json=ASK)).status_code == 429
    app.state.shared.bodies.max_bytes = 10
    assert (await http.post("/v1/completions", json=ASK)).json()["error"]["code"] == "router_full"
    assert await counts(http) == {"429": 2}


async def test_nothing_ready(http: httpx.AsyncClient, decode: Pod) -> None:
    await decode.publish(ready=False)
    await until_state(http, ready=False)
    assert (await http.post("/v1/completions", json=ASK)).status_code == 503
    assert (await http.get("/v1/models")).status_code == 503
    assert await counts(http) == {"503": 2}


async def test_a_slow_body_and_one_that_stops(start_pod: PodFactory, decode: Pod) -> None:
    settings = router_settings([await start_pod(role="prefill")], [decode])
    async with listening(create_app(settings, SHORT)) as url, client(url) as http:
        with RawClient(url) as slow:
            await slow.send(HEAD + b"{")
            assert (await slow.receive_all()).startswith(b"HTTP/1.1 408 ")
        assert await counts(http) == {"408": 1}


async def test_clients_that_go(http: httpx.AsyncClient, decode: Pod) -> None:
    """While they send, and while they wait."""
    url = str(http.base_url)
    with RawClient(url) as sending:
        await sending.send(HEAD + b"{")
        await until_held(http)
    await until_counted(http, client_gone=1)
    decode.play(Script([104, 105], admission=asyncio.Event()))
    with RawClient(url) as waiting:
        body = b'{"prompt": "a"}'
        await waiting.send(HEAD.replace(b"1000", b"%d" % len(body)) + body)
        await decode.engine.until(lambda engine: len(engine.submits) == 1)
    await until_counted(http, client_gone=2)


async def until_held(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while "kimi_router_held_bytes 1.0" not in (await http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_bug_of_ours(http: httpx.AsyncClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> bytes:
        raise ValueError

    monkeypatch.setattr(type(app.state.shared.bodies), "read", broken)
    assert (await http.post("/v1/completions", json=ASK)).status_code == 500
    assert await counts(http) == {"500": 1}
