"""The router before real pod servers whose lanes are replayed."""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from kimi_worker.router.app import create_app
from kimi_worker.router.pool import resolve
from replay_engine import Script
from replay_fixtures import MODEL, Pod, PodFactory, listening, router_settings, routing
from stub_pods import EVENT, StubPod, client, report_of, stub_pods, until_state, whole

HI = [104, 105]
ASK: dict[str, Any] = {"prompt": "a", "max_tokens": 5}


async def test_the_pair_is_named_to_the_decode_pod_and_clients_cannot_name_one(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod(num_lanes=2)
    decode.play(Script(HI))
    async with routing(router_settings([prefill], [decode])) as url, client(url) as http:
        forged = {"x-kimi-prefill": "tcp://evil:1", "x-kimi-lane": "77", "x-kimi-stats": "1"}
        reply = await http.post("/v1/completions", json=ASK, headers=forged)
    assert reply.status_code == 200
    assert reply.json()["kimi"]["handoff_bytes"] == 4096
    [submit] = [submit for engine in decode.engines for submit in engine.submits]
    assert submit.prefill == prefill.engine.state.handoff


async def test_a_pod_that_does_both_needs_no_prefill(start_pod: PodFactory) -> None:
    whole: Pod = await start_pod(role="both")
    whole.play(Script(HI))
    async with routing(router_settings([whole], [whole])) as url, client(url) as http:
        assert (await http.post("/v1/completions", json=ASK)).json()["choices"][0]["text"] == "hi"
    assert whole.engine.submits[0].prefill is None


async def test_requests_spread_over_lanes_between_reports(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod(num_lanes=4)
    gate = asyncio.Event()
    decode.play(Script(HI, gate=gate))
    settings = router_settings([prefill], [decode], poll_interval_s=3600)
    async with routing(settings) as url, client(url) as http:
        waiting = [asyncio.create_task(http.post("/v1/completions", json=ASK)) for _ in range(8)]
        for engine in decode.engines:
            await engine.until(lambda engine: len(engine.submits) == 2)
        gate.set()
        assert {(await reply).status_code for reply in waiting} == {200}


@pytest.mark.parametrize("code", ["queue_full", "draining", "handoff_failed"])
async def test_a_refusal_is_tried_elsewhere(start_pod: PodFactory, code: str) -> None:
    prefills = [await start_pod(role="prefill") for _ in range(2)]
    full, free = await start_pod(), await start_pod()
    full.play(Script(refusal=(code, True)))
    free.play(Script(HI))
    await free.publish(free_pages=1)  # the full one looks better
    async with routing(router_settings(prefills, [full, free])) as url, client(url) as http:
        reply = await http.post("/v1/completions", json=ASK)
        metrics = (await http.get("/metrics")).text
    assert reply.json()["choices"][0]["text"] == "hi"
    assert (len(full.engine.submits), len(free.engine.submits)) == (1, 1)
    assert f'kimi_router_refusals_total{{code="{code}"}} 1.0' in metrics
    # whose fault a queue is, is known; of a handoff's or a drain's two sides both are left alone
    assert (full.engine.submits[0].prefill == free.engine.submits[0].prefill) == (code == "queue_full")


async def test_the_only_decode_lane_is_asked_again_with_another_prefill_lane(start_pod: PodFactory) -> None:
    prefills, decode = [await start_pod(role="prefill") for _ in range(3)], await start_pod()
    scripts = iter([Script(refusal=("handoff_failed", True)), Script(refusal=("draining", True)), Script(HI)])
    decode.play(lambda _: next(scripts))
    async with routing(router_settings(prefills, [decode])) as url, client(url) as http:
        reply = await http.post("/v1/completions", json=ASK)
    assert reply.json()["choices"][0]["text"] == "hi"
    assert len({submit.prefill for submit in decode.engine.submits}) == 3


async def test_a_full_prefill_lane_is_avoided_and_the_decode_lane_kept(start_pod: PodFactory) -> None:
    prefills = [await start_pod(role="prefill") for _ in range(2)]
    await prefills[0].publish(handoff="tcp://127.0.0.1:1000")
    await prefills[1].publish(handoff="tcp://127.0.0.1:1001", queued_tokens=50)
    decode: Pod = await start_pod()
    decode.play(
        lambda submit: Script(refusal=("prefill_full", True)) if str(submit.prefill).endswith(":1000") else Script(HI)
    )
    async with routing(router_settings(prefills, [decode])) as url, client(url) as http:
        reply = await http.post("/v1/completions", json=ASK)
    assert reply.json()["choices"][0]["text"] == "hi"
    assert [submit.prefill for submit in decode.engine.submits] == ["tcp://127.0.0.1:1000", "tcp://127.0.0.1:1001"]


async def test_when_all_are_full_the_client_gets_429(start_pod: PodFactory) -> None:
    prefill, pods = await start_pod(role="prefill"), [await start_pod() for _ in range(2)]
    for pod in pods:
        pod.play(Script(refusal=("queue_full", True)))
    async with routing(router_settings([prefill], pods)) as url, client(url) as http:
        reply = await http.post("/v1/completions", json=ASK)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
    assert reply.json()["error"]["code"] == "queue_full"
    assert [len(pod.engine.submits) for pod in pods] == [1, 1]


@pytest.mark.parametrize(
    "script", [Script(refusal=("engine_error", False)), Script(HI, failure=("engine_error", True))]
)
async def test_what_is_not_safe_to_retry_is_not(start_pod: PodFactory, script: Script) -> None:
    """A failure that another pod would repeat, and one after the first byte has gone out."""
    prefill, pods = await start_pod(role="prefill"), [await start_pod() for _ in range(2)]
    for pod in pods:
        pod.play(script)
    async with routing(router_settings([prefill], pods)) as url, client(url) as http:
        reply = await http.post("/v1/completions", json={**ASK, "stream": True})
    assert "scripted engine_error" in reply.text
    assert reply.status_code == (200 if script.failure else 500)
    assert sum(len(pod.engine.submits) for pod in pods) == 1


async def test_bad_requests_pass_through_unchanged(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod()
    async with routing(router_settings([prefill], [decode])) as url, client(url) as http, client(decode.url) as direct:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for body in (b"", b"{", b"[]", b'{"prompt": "a", "n": 2}', b'{"messages": []}'):
                seen, wanted = await http.post(path, content=body), await direct.post(path, content=body)
                assert (seen.status_code, seen.content) == (wanted.status_code, wanted.content)
                assert seen.status_code == 400


@pytest.mark.parametrize(
    "path", ["/v1/state", "/v1/%2e%2e/state", "/v1/../state", "/v1/completions/../../state", "/v1/embeddings"]
)
async def test_no_path_reaches_a_pods_own_endpoints(start_pod: PodFactory, path: str) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod()

    async def answer(_: StubPod, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, b"{}"))

    async with stub_pods(await report_of(decode), answer) as [stub]:
        async with routing(router_settings([prefill], [], decode_service=stub.address)) as url, client(url) as http:
            target = httpx.URL(url).copy_with(raw_path=path.encode())
            reply = await http.send(http.build_request("POST", target))
    assert reply.status_code in (404, 405)
    assert reply.json()["error"]["message"]
    assert stub.num_asked == 0


async def test_nothing_ready_says_what_is_missing(start_pod: PodFactory) -> None:
    decode: Pod = await start_pod()
    with socket.socket() as dead:
        # bound and not listening: it refuses connections, and nobody else gets the port
        dead.bind(("127.0.0.1", 0))
        port = dead.getsockname()[1]
        settings = router_settings([], [decode], prefill_service=f"127.0.0.1:{port}")
        async with listening(create_app(settings)) as url, client(url) as http:
            await until_state(http, ready=False)
            async with asyncio.timeout(60):
                while "Connect" not in (reply := await http.post("/v1/completions", json=ASK)).text:
                    assert reply.status_code == 503
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            message = reply.json()["error"]["message"]
            assert "no prefill lane is ready" in message
            assert f"prefill 127.0.0.1:{port}" in message
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200


async def test_layouts_are_never_mixed(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill", layout_hash="l1"), await start_pod(layout_hash="l2")
    async with listening(create_app(router_settings([prefill], [decode]))) as url, client(url) as http:
        async with asyncio.timeout(60):
            while "layout l2" not in (reply := await http.post("/v1/completions", json=ASK)).text:
                assert reply.status_code == 503
    assert not decode.engine.submits


async def test_readiness_is_followed(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod()
    async with routing(router_settings([prefill], [decode])) as url, client(url) as http:
        await decode.publish(ready=False)
        async with asyncio.timeout(60):
            while "lanes [0] of 1 are not ready" not in str((await http.get("/state")).json()["error"]):
                pass
        await decode.publish(ready=True)
        await until_state(http, ready=True)


async def test_another_deployments_pod_is_not_used(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod()
    settings = router_settings([prefill], [decode], deployment="other")
    async with listening(create_app(settings)) as url, client(url) as http:
        async with asyncio.timeout(60):
            while "decode of k3, not decode of other" not in (await http.get("/state")).json()["error"]:
                pass


async def test_aborts_are_passed_on(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod()
    decode.play(Script(HI, gate=asyncio.Event()))
    async with routing(router_settings([prefill], [decode])) as url, client(url) as http:
        async with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as reply:
            async for _ in reply.aiter_bytes():
                break
        await decode.engine.until(lambda engine: len(engine.cancels) == 1)
        waiting = asyncio.create_task(http.post("/v1/completions", json=ASK))
        await decode.engine.until(lambda engine: len(engine.submits) == 2)
        waiting.cancel()
        await decode.engine.until(lambda engine: len(engine.cancels) == 2)


async def test_a_slow_client_holds_its_stream_back(start_pod: PodFactory) -> None:
    """What the router keeps of a stream that nobody reads is bounded: the pod's socket fills instead."""
    sent = 0
    is_full = asyncio.Event()

    async def pour(stub: StubPod, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        while not stub.release.is_set():
            writer.write(EVENT * 512)
            try:
                await asyncio.wait_for(writer.drain(), 2)
            except TimeoutError:
                is_full.set()
                return
            sent += len(EVENT) * 512
            assert sent < 64 * 2**20

    prefill, decode = await start_pod(role="prefill"), await start_pod()
    async with stub_pods(await report_of(decode), pour) as [stub]:
        async with routing(router_settings([prefill], [], decode_service=stub.address)) as url, client(url) as http:
            async with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as reply:
                parts = reply.aiter_bytes()  # kept: a response ends with its iterator
                await anext(parts)
                await asyncio.wait_for(is_full.wait(), 60)
    assert sent > 0


async def test_models_and_unknown_paths(start_pod: PodFactory) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod()
    async with routing(router_settings([prefill], [decode])) as url, client(url) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == MODEL
        assert (await http.get("/v1/models/gpt")).status_code == 404
        assert (await http.get("/nothing")).json()["error"]["code"] == "unknown_url"
        state = (await http.get("/state")).json()
        assert state["decode"][0]["report"]["role"] == "decode"
        metrics = (await http.get("/metrics")).text
    assert 'kimi_router_ready_lanes{role="prefill"} 1.0' in metrics
    assert "kimi_router_requests_in_flight 0.0" in metrics


@pytest.mark.parametrize(
    ("service", "found"),
    [
        ("10.0.0.1", {"10.0.0.1:8000"}),
        ("10.0.0.1:9000, 10.0.0.2", {"10.0.0.1:9000", "10.0.0.2:8000"}),
        ("host:9000", {"host:9000"}),
        ("localhost", {"127.0.0.1:8000"}),
    ],
)
async def test_names_and_lists_of_addresses(service: str, found: set[str]) -> None:
    assert found <= await resolve(service, 8000)


async def test_a_name_that_is_unknown_is_said(start_pod: PodFactory) -> None:
    decode: Pod = await start_pod()
    settings = router_settings([], [decode], prefill_service="no-such-name.invalid")
    async with listening(create_app(settings)) as url, client(url) as http:
        async with asyncio.timeout(60):
            while "no-such-name.invalid" not in (await http.get("/ready")).json()["reason"]:
                pass


async def test_a_resolver_that_is_down_takes_no_pod_away(
    start_pod: PodFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await start_pod(role="prefill"), await start_pod()
    decode.play(Script(HI))
    outcome: list[OSError] = []
    asked = asyncio.Event()

    async def resolver(service: str, port: int) -> set[str]:
        asked.set()
        if outcome:
            raise outcome[0]
        return await resolve(service, port)

    monkeypatch.setattr("kimi_worker.router.pool.resolve", resolver)
    async with routing(router_settings([prefill], [decode])) as url, client(url) as http:
        outcome.append(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
        for _ in range(4):  # of both roles, with the failure
            asked.clear()
            await asyncio.wait_for(asked.wait(), 60)
        assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        outcome[:] = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")]
        state = await until_state(http, ready=False, decode=[], prefill=[])
        assert "Name or service not known" in state["error"]
