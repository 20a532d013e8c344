"""Pods that die, hang or vanish: whose request is repeated, how often, and what a client hears of it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi_worker.router import app as router_app
from kimi_worker.router.proxy import EventTail
from openai import AsyncOpenAI
from replay_engine import Script
from replay_fixtures import MODEL, Pod, PodFactory, listening, router_settings, routing
from stub_pods import EVENT, STREAM_HEAD, StubPod, chunk, client, report_of, stub_pods, until_state, until_up, whole

ASK = {"prompt": "a", "max_tokens": 5}
HI = [104, 105]
SOON = {"lost_after_s": 3.0}
"""A pod is asked for a third of it at a time: less, and living pods are lost too while the machine is busy."""


async def die(_: StubPod, writer: asyncio.StreamWriter) -> None:
    """End the connection without an answer."""


async def vanish(stub: StubPod, _: asyncio.StreamWriter) -> None:
    """Say nothing any more, here and to /state, and keep all connections open."""
    stub.is_silent = True
    await stub.release.wait()


async def babble(_: StubPod, writer: asyncio.StreamWriter) -> None:
    """Answer in another protocol, as whoever has the address now may do."""
    writer.write(b"220 mail ESMTP\r\n\r\n")


async def engine_error(_: StubPod, writer: asyncio.StreamWriter) -> None:
    """Say that the request has failed and that another pod may answer it."""
    headers = b"x-kimi-error: engine_error\r\nx-kimi-retryable: true\r\n"
    writer.write(whole(503, b'{"error": {"message": "logits", "code": "engine_error"}}', headers))


@pytest.fixture
async def prefill(start_pod: PodFactory) -> Pod:
    return await start_pod(role="prefill")


@pytest.fixture
async def decode(start_pod: PodFactory) -> Pod:
    pod: Pod = await start_pod()
    pod.play(Script(HI))
    return pod


@pytest.mark.parametrize("answer", [die, vanish, babble])
async def test_a_pod_that_is_lost_before_its_answer_is_replaced(prefill: Pod, decode: Pod, answer) -> None:
    better = await report_of(decode, free_pages=1000)
    async with stub_pods(better, answer) as [stub]:
        settings = router_settings([prefill], [], decode_service=f"{stub.address},{decode.url[7:]}", **SOON)
        async with routing(settings) as url, client(url) as http:
            reply = await http.post("/v1/completions", json=ASK)
            metrics = (await http.get("/metrics")).text
    assert reply.json()["choices"][0]["text"] == "hi"
    assert stub.num_asked == 1
    assert 'kimi_router_refusals_total{code="pod_lost"} 1.0' in metrics


async def test_a_large_request_to_a_pod_that_reads_nothing_is_given_up_too(
    prefill: Pod, decode: Pod, start_pod: PodFactory
) -> None:
    """The body fills the pod's socket, so that the request never leaves the router."""
    long: Pod = await start_pod(max_model_len=2**17)
    async with stub_pods(await report_of(long), vanish) as [stub]:
        async with routing(router_settings([prefill], [], decode_service=stub.address, **SOON)) as url:
            async with client(url) as http:
                reply = await http.post("/v1/completions", content=b" " * (8 * 2**20))
                state = await until_state(http, ready=False)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "pod_lost")
    assert "has not answered for 3 s" in state["error"]


@pytest.mark.parametrize("answer", [die, vanish, engine_error])
async def test_a_request_that_ends_pods_ends_two_at_most(prefill: Pod, decode: Pod, answer) -> None:
    """It may be the request's own doing: four pods are there and three retries are allowed, one is made."""
    async with stub_pods(await report_of(decode), answer, count=4) as stubs:
        services = ",".join(stub.address for stub in stubs)
        async with routing(router_settings([prefill], [], decode_service=services, **SOON)) as url, client(url) as http:
            reply = await http.post("/v1/completions", json=ASK)
    assert reply.status_code == 503
    assert sum(stub.num_asked for stub in stubs) == 2


async def test_a_request_that_ends_handoffs_ends_two_at_most(start_pod: PodFactory) -> None:
    prefills, decodes = [[await start_pod(role=role) for _ in range(4)] for role in ("prefill", "decode")]
    for pod in decodes:
        pod.play(Script(refusal=("handoff_failed", True)))
    async with routing(router_settings(prefills, decodes)) as url, client(url) as http:
        reply = await http.post("/v1/completions", json=ASK)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "handoff_failed")
    assert sum(len(pod.engine.submits) for pod in decodes) == 2


async def test_pods_that_refuse_connections_cost_nothing(prefill: Pod, decode: Pod) -> None:
    """The request has not reached them: all retries are made."""
    async with stub_pods(await report_of(decode, free_pages=1000), die, count=3) as stubs:
        services = ",".join([*(stub.address for stub in stubs), decode.url[7:]])
        settings = router_settings([prefill], [], decode_service=services, poll_interval_s=3600)
        async with routing(settings) as url, client(url) as http:
            for stub in stubs:
                stub.close()
            reply = await http.post("/v1/completions", json=ASK)
            metrics = (await http.get("/metrics")).text
    assert reply.json()["choices"][0]["text"] == "hi"
    assert 'kimi_router_refusals_total{code="unreachable"} 3.0' in metrics


@pytest.mark.parametrize("ending", [die, vanish])
@pytest.mark.parametrize("half", [b"", EVENT[:40], EVENT[:-1]])
async def test_a_stream_that_breaks_ends_with_an_error_event(prefill: Pod, decode: Pod, ending, half: bytes) -> None:
    """Wherever it is cut: the official client reads what was whole, then the error."""

    async def answer(stub: StubPod, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(EVENT) + (chunk(half) if half else b""))
        await writer.drain()
        await ending(stub, writer)

    async with stub_pods(await report_of(decode), answer) as [stub]:
        settings = router_settings([prefill], [], decode_service=stub.address, **SOON)
        async with routing(settings) as url, client(url) as http:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as official:
                stream = await official.completions.create(model=MODEL, prompt="a", stream=True)
                assert (await anext(stream)).choices[0].text == "hi"
                with pytest.raises(openai.APIError, match="the pod that answered is gone"):
                    await anext(stream)
            metrics = (await http.get("/metrics")).text
    assert 'kimi_router_requests_total{result="broken"} 1.0' in metrics
    assert "kimi_router_requests_in_flight 0.0" in metrics


async def test_a_broken_stream_ends_with_done(prefill: Pod, decode: Pod) -> None:
    async def answer(_: StubPod, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(EVENT))

    async with stub_pods(await report_of(decode), answer) as [stub]:
        async with routing(router_settings([prefill], [], decode_service=stub.address)) as url, client(url) as http:
            reply = await http.post("/v1/completions", json={**ASK, "stream": True})
    events = [event for event in reply.text.split("\n\n") if event]
    assert events[0] + "\n\n" == EVENT.decode()
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "pod_lost"
    assert events[2:] == ["data: [DONE]"]


async def test_a_pod_that_leaves_its_service_may_end_its_streams(
    prefill: Pod, decode: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no new requests; its stream goes on while it answers, and ends when it does not."""
    is_named, go_on = True, asyncio.Event()

    async def resolve(service: str, port: int) -> set[str]:
        return set(service.split(",")) if is_named or service != stub.address else set()

    async def answer(_: StubPod, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(EVENT))
        await writer.drain()
        await go_on.wait()
        writer.write(chunk(EVENT))
        await stub.release.wait()

    monkeypatch.setattr("kimi_worker.router.pool.resolve", resolve)
    async with stub_pods(await report_of(decode), answer) as [stub]:
        async with routing(router_settings([prefill], [], decode_service=stub.address, **SOON)) as url:
            async with client(url) as http, http.stream("POST", "/v1/completions", json=ASK) as reply:
                parts = reply.aiter_bytes()
                assert await anext(parts) == EVENT
                is_named = False
                await until_state(http, ready=False, decode=[])
                await asyncio.sleep(1.5 * SOON["lost_after_s"])  # nothing may happen in that time
                go_on.set()
                assert await anext(parts) == EVENT
                stub.is_silent = True
                rest = b"".join([part async for part in parts])
    assert b"pod_lost" in rest
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", ["deep", "large"])
async def test_whatever_else_answers_at_a_pods_address_is_none_until_the_pod_is_back(
    prefill: Pod, decode: Pod, kind: str
) -> None:
    """What such a process says must neither end the router's asking, which nothing would begin anew, nor fill it."""
    async with stub_pods(await report_of(decode), die) as [stub]:
        async with routing(router_settings([prefill], [], decode_service=stub.address)) as url, client(url) as http:
            await until_state(http, ready=True)
            good = stub.report
            stub.report = b'{"x":' + b"[" * 200_000 if kind == "deep" else good[:-1] + b" " * 2**21 + b"}"
            await until_state(http, ready=False)
            stub.report = good
            await until_state(http, ready=True)


@pytest.mark.parametrize("answer", ["silent", "500", "no JSON"])
async def test_models_of_a_pod_that_does_not_say(
    prefill: Pod, decode: Pod, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    async def serve(stub: StubPod, writer: asyncio.StreamWriter) -> None:
        if answer == "silent":
            await stub.release.wait()
        writer.write(whole(500, b'{"data": []}') if answer == "500" else whole(200, b"x"))

    monkeypatch.setattr(router_app, "_ASK_S", 0.2)
    async with stub_pods(await report_of(decode), serve) as [stub]:
        async with routing(router_settings([prefill], [], decode_service=stub.address)) as url, client(url) as http:
            reply = await http.get("/v1/models")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "pod_lost")


@pytest.fixture
async def bounded(prefill: Pod, decode: Pod) -> AsyncIterator[str]:
    async with routing(router_settings([prefill], [decode], max_held_bytes=100_000)) as url:
        yield url


async def test_the_bytes_of_waiting_requests_are_bounded(bounded: str, decode: Pod) -> None:
    admission = asyncio.Event()
    decode.play(Script(HI, admission=admission))
    large = {**ASK, "user": "x" * 60_000}
    async with client(bounded) as http:
        first = asyncio.create_task(http.post("/v1/completions", json=large))
        await decode.engine.until(lambda engine: len(engine.submits) == 1)
        refused = await http.post("/v1/completions", json=large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "router_full")
        assert refused.headers["retry-after"] == "1"
        small = asyncio.create_task(http.post("/v1/completions", json=ASK))
        await decode.engine.until(lambda engine: len(engine.submits) == 2)
        admission.set()
        assert {(await reply).status_code for reply in (first, small)} == {200}
        assert (await http.post("/v1/completions", json=large)).status_code == 200
        assert "kimi_router_held_bytes 0.0" in (await http.get("/metrics")).text


async def test_a_body_that_no_pod_takes_is_refused_here(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod(max_model_len=1024)
    limit = decode.app.state.pod.intake.max_body_bytes
    async with routing(router_settings([prefill], [decode])) as url, client(url) as http:
        replies = [await http.post("/v1/completions", content=b" " * size) for size in (limit, limit + 1)]
        held = (await http.get("/metrics")).text
    assert [reply.status_code for reply in replies] == [400, 413]
    assert str(limit) in replies[1].json()["error"]["message"]
    assert "kimi_router_held_bytes 0.0" in held


async def test_a_silent_connection_is_watched_by_the_kernel() -> None:
    [address, *_] = socket.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    with router_app._upstream_socket(address) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * count <= 30
        assert 0 < connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


@given(sizes=st.lists(st.integers(1, 9), max_size=12), cut=st.integers(1, 30), rest=st.integers(0, 20))
def test_events_are_passed_on_whole_however_they_arrive(sizes: list[int], cut: int, rest: int) -> None:
    whole_events = b"".join(b"data: " + b"x" * size + b"\n\n" for size in sizes)
    stream = whole_events + b"data: unfinished, and so on"[:rest]
    tail, passed = EventTail(), b""
    for at in range(0, len(stream), cut):
        passed += tail.feed(stream[at : at + cut])
        assert not passed or passed.endswith(b"\n\n")
    assert passed == whole_events
    assert tail.finish() == stream[len(whole_events) :]


async def test_an_event_without_end_is_passed_on_in_the_end() -> None:
    tail = EventTail()
    sizes = [len(tail.feed(b"x" * 2**19)) for _ in range(3)]
    assert sizes == [0, 0, 3 * 2**19]


async def test_a_router_that_was_ready_stays_to_say_why_nothing_is(prefill: Pod, decode: Pod) -> None:
    """While a group restarts, its router is the only one left to say so: without it clients get no connection."""
    async with stub_pods(await report_of(decode), die) as (stub,):
        settings = router_settings([prefill], [], decode_service=stub.address, **SOON)
        async with routing(settings) as url, client(url) as http:
            await until_up(http)
            stub.is_silent = True
            await until_state(http, ready=False)
            ready, reply = await http.get("/ready"), await http.post("/v1/completions", json=ASK)
    assert (ready.status_code, ready.json()["reason"]) == (200, None)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "no decode lane is ready" in reply.json()["error"]["message"]


async def test_a_router_that_drains_says_so_and_serves_on(prefill: Pod, decode: Pod) -> None:
    app = router_app.create_app(router_settings([prefill], [decode]))
    async with listening(app) as url, client(url) as http:
        await until_up(http)
        app.state.shared.is_draining = True
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (await http.post("/v1/completions", json=ASK)).status_code == 200
