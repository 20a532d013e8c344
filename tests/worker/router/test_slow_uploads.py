"""Bodies that come slowly or not at all: a slow client is served, and nobody holds a request for ever."""

import asyncio
import math
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from kimi_worker.router.app import create_app as create_router
from kimi_worker.server.app import create_app as create_server
from kimi_worker.server.http import PATIENCE, Patience
from kimi_worker.settings import PodIdentity
from raw_client import RawClient
from replay_fixtures import listening, router_settings, worker_settings
from stub_pods import client

SHORT = Patience(silence_s=0.3, bytes_per_s=1000.0)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: kimi\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(params=["server", "router"])
def app(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> FastAPI:
    """No pod or lane answers it: a body is read before anybody is asked."""
    if request.param == "server":
        settings = worker_settings(checkpoint, role="decode", num_lanes=1, max_model_len=512)
        return create_server(settings, PodIdentity(run_dir=tmp_path), SHORT)
    nobody = "127.0.0.1:1"
    settings = router_settings([], [], prefill_service=nobody, decode_service=nobody, max_held_bytes=1000)
    return create_router(settings, SHORT)


def check_refused(answer: bytes) -> None:
    """It is all that came until the connection ended."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.splitlines()
    error = httpx.Response(408, content=body).json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "body_too_slow", "body")
    assert "0.3 s" in error["message"]
    assert "1000 bytes a second" in error["message"]


@pytest.mark.parametrize("part", [b"", b"{" * 900])
async def test_a_client_that_stops_is_answered_and_let_go(app: FastAPI, part: bytes) -> None:
    async with listening(app) as url:
        with RawClient(url) as slow:
            await slow.send(HEAD + part)
            answer = await slow.receive_all()
        check_refused(answer)
        assert f"{len(part)} bytes came" in answer.decode()
        async with client(url) as http, asyncio.timeout(60):
            # where bodies are bounded together, its bytes are free again; a machine that stalls is slow itself
            while (reply := await http.post("/v1/completions", content=b" " * 900)).status_code == 408:
                pass
        assert reply.status_code == 503


async def test_a_byte_now_and_then_is_no_upload(app: FastAPI) -> None:
    """No pause is too long, but the whole body would take ten seconds."""
    async with listening(app) as url:
        with RawClient(url) as slow:
            await slow.send(HEAD)
            num_sent, answer = await slow.drip(b"{" * 1000)
        check_refused(answer)
    assert num_sent < 1000


def time_taken_s(patience: Patience, parts: list[tuple[float, int]]) -> float:
    """Play (pause in s, bytes); when the last part came, or infinity when a part was waited for in vain."""
    now_s, deadline_s = 0.0, patience.silence_s
    for pause_s, num_bytes in parts:
        now_s += pause_s
        if now_s >= deadline_s:
            return math.inf
        deadline_s = patience.extend(deadline_s, now_s, num_bytes)
    return now_s


def test_what_a_client_may_take() -> None:
    modem = [(0.25, 1050)] * 100_000
    assert time_taken_s(PATIENCE, modem) < math.inf
    assert time_taken_s(PATIENCE, [(0.1, 2**16), (29.0, 2**16), (29.0, 2**16)]) < math.inf
    assert time_taken_s(PATIENCE, [(31.0, 1)]) == math.inf
    assert time_taken_s(PATIENCE, [(1.0, 1)] * 60) == math.inf
    # a fast beginning buys nothing
    assert time_taken_s(PATIENCE, [(0.1, 2**26)] + [(1.0, 1)] * 60) == math.inf


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(1, 10**6)), max_size=30))
def test_a_body_takes_no_longer_than_its_size_explains(parts: list[tuple[float, int]]) -> None:
    taken_s = time_taken_s(PATIENCE, parts)
    explained_s = PATIENCE.silence_s + sum(num_bytes for _, num_bytes in parts) / PATIENCE.bytes_per_s
    assert taken_s <= explained_s or taken_s == math.inf
