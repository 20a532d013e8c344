"""The pod's own endpoints, its lanes, and what the router relies on."""

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from replay_engine import Script
from replay_fixtures import MODEL, Pod, PodFactory

HI = [104, 105]
ASK = {"prompt": "a", "max_tokens": 5}


@pytest.fixture
async def http(pod: Pod):
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        yield http


def samples(text: str) -> dict[str, float]:
    """Values of a metrics page, summed over labels."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


async def test_state(pod: Pod, http: httpx.AsyncClient) -> None:
    state = (await http.get("/state")).json()
    assert {name: state[name] for name in ("deployment", "role", "group", "generation", "ready", "draining")} == {
        "deployment": "k3",
        "role": "decode",
        "group": "0",
        "generation": 1,
        "ready": True,
        "draining": False,
    }
    assert state["layout_hash"] == "l1"
    assert state["error"] is None
    [lane] = state["lanes"]
    wanted = (
        "lane handoff running waiting reserved queued_tokens num_pages free_pages num_slots free_slots max_num_seqs"
    )
    assert set(wanted.split()) <= set(lane)
    assert set(state["memory"]) == {"weights_bytes", "pages_bytes", "slots_bytes", "free_bytes"}


async def test_readiness_follows_the_lanes(pod: Pod, http: httpx.AsyncClient) -> None:
    assert (await http.get("/ready")).status_code == 200
    await pod.publish(ready=False)
    reply = await http.get("/ready")
    assert reply.status_code == 503
    assert "lanes [0]" in reply.json()["reason"]
    refused = await http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503
    assert refused.headers["x-kimi-retryable"] == "true"
    assert refused.headers["retry-after"] == "1"
    assert (await http.get("/health")).status_code == 200


async def test_drain_refuses_new_and_finishes_old(pod: Pod, http: httpx.AsyncClient) -> None:
    gate = asyncio.Event()
    pod.play(Script(HI, gate=gate))
    running = asyncio.create_task(http.post("/v1/completions", json=ASK))
    await pod.engine.until(lambda engine: len(engine.submits) == 1)
    await pod.publish(ready=False, draining=True)
    refused = await http.post("/v1/completions", json=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/state")).json()["draining"] is True
    gate.set()
    assert (await running).json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    ("code", "retryable", "status"),
    [
        ("queue_full", True, 429),
        ("prefill_full", True, 429),
        ("prompt_too_long", False, 400),
        ("draining", True, 503),
        ("handoff_failed", True, 503),
        ("prefill_unreachable", True, 503),
        ("layout_mismatch", True, 503),
        ("engine_error", True, 503),
        ("engine_error", False, 500),
    ],
)
async def test_failures(pod: Pod, http: httpx.AsyncClient, code: str, retryable: bool, status: int) -> None:
    """Before and after the lane has admitted the request, whole and streamed: the same answer."""
    for script in (Script(refusal=(code, retryable)), Script(failure=(code, retryable))):
        pod.play(script)
        for stream in (False, True):
            reply = await http.post("/v1/completions", json={**ASK, "stream": stream})
            assert reply.status_code == status
            assert reply.headers.get("x-kimi-retryable") == ("true" if retryable else None)
            assert ("retry-after" in reply.headers) == (status in (429, 503))
            assert f"scripted {code}" in reply.json()["error"]["message"]
    assert not pod.engine.cancels


async def test_requests_go_to_the_named_lane_or_the_least_busy(start_pod: PodFactory) -> None:
    pod: Pod = await start_pod(num_lanes=2)
    gate = asyncio.Event()
    pod.play(Script(HI, gate=gate))
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        waiting = []
        for lane, count in ((None, 1), (None, 1), ("1", 2)):
            headers = {"x-kimi-lane": lane} if lane else {}
            waiting.append(asyncio.create_task(http.post("/v1/completions", json=ASK, headers=headers)))
            await pod.engines[1 if len(waiting) > 1 else 0].until(lambda engine, n=count: len(engine.submits) >= n)
        assert [len(engine.submits) for engine in pod.engines] == [1, 2]
        gate.set()
        assert [(await reply).status_code for reply in waiting] == [200, 200, 200]


async def test_the_prefill_lane_is_passed_on(pod: Pod, http: httpx.AsyncClient) -> None:
    pod.play(Script(HI))
    await http.post("/v1/completions", json=ASK, headers={"x-kimi-prefill": "tcp://10.0.0.7:29601"})
    await http.post("/v1/completions", json=ASK)
    assert [submit.prefill for submit in pod.engine.submits] == ["tcp://10.0.0.7:29601", None]


async def test_nobody_on_the_network_can_drain_a_pod(pod: Pod, http: httpx.AsyncClient) -> None:
    """Only its own supervisor can, for good."""
    assert (await http.post("/drain")).status_code == 404
    assert (await http.get("/state")).json()["ready"] is True


async def test_a_pod_that_does_both_refuses_a_prefill_lane(start_pod: PodFactory) -> None:
    pod: Pod = await start_pod(role="both")
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        reply = await http.post("/v1/completions", json=ASK, headers={"x-kimi-prefill": "tcp://10.0.0.7:29601"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-kimi-prefill")


async def test_a_prefill_pod_answers_no_client(start_pod: PodFactory) -> None:
    pod: Pod = await start_pod(role="prefill")
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        reply = await http.post("/v1/completions", json=ASK)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "wrong_role")


@pytest.mark.parametrize("stream", [False, True])
async def test_stats_only_for_who_asks(pod: Pod, http: httpx.AsyncClient, stream: bool) -> None:
    pod.play(Script(HI))
    bodies = []
    for headers in ({}, {"x-kimi-stats": "1"}):
        text = (await http.post("/v1/completions", json={**ASK, "stream": stream}, headers=headers)).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line and line != "data: [DONE]"]
        bodies.append(json.loads(lines[-1]))
    assert "kimi" not in bodies[0]
    assert bodies[1]["kimi"]["handoff_bytes"] == 4096
    assert bodies[1]["kimi"]["handoff_s"] == 0.25
    assert bodies[1]["kimi"]["ttft_s"] > 0


async def test_a_silent_lane_is_an_answer_too(pod: Pod, http: httpx.AsyncClient) -> None:
    """The lane never admits: after the longest step there can be, the client hears of it."""
    pod.app.state.pod.settings.timeouts.__dict__["collective_s"] = 0.05
    pod.play(Script(admission=asyncio.Event()))
    reply = await http.post("/v1/completions", json=ASK)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "lane_silent")
    await pod.engine.until(lambda engine: len(engine.cancels) == 1)


async def test_metrics_count_and_return_to_zero(pod: Pod, http: httpx.AsyncClient) -> None:
    gate = asyncio.Event()
    pod.play(Script(HI, gate=gate))
    running = asyncio.create_task(http.post("/v1/completions", json=ASK))
    await pod.engine.until(lambda engine: len(engine.submits) == 1)
    assert samples((await http.get("/metrics")).text)["kimi_requests_in_flight"] == 1
    gate.set()
    await running
    pod.play(Script(refusal=("queue_full", True)))
    await http.post("/v1/completions", json=ASK)
    page = (await http.get("/metrics")).text
    seen = samples(page)
    assert f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 2.0' in page
    assert {name: seen[name] for name in EXPECTED} == EXPECTED


async def test_a_handoff_counts_however_its_request_ends(pod: Pod, http: httpx.AsyncClient) -> None:
    """By a stop string, by a client that goes, by a failure: the bytes were moved."""
    pod.play(Script([104, 105], finish_reason="length", gate=asyncio.Event()))
    await http.post("/v1/completions", json={**ASK, "stop": "h"})
    async with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as reply:
        await anext(reply.aiter_bytes())
    await pod.engine.until(lambda engine: len(engine.cancels) == 2)
    pod.play(Script(HI, failure=("engine_error", False)))
    await http.post("/v1/completions", json=ASK)
    async with asyncio.timeout(60):
        while (seen := samples((await http.get("/metrics")).text))["kimi_requests_in_flight"] > 0:
            pass
    assert seen["kimi_handoff_bytes_total"] == 3 * 4096
    assert seen["kimi_handoff_seconds_count"] == 3


EXPECTED = {
    "kimi_requests_in_flight": 0,
    "vllm:prompt_tokens_total": 1,
    "vllm:generation_tokens_total": 2,
    "vllm:request_success_total": 1,
    "vllm:time_to_first_token_seconds_count": 1,
    "vllm:e2e_request_latency_seconds_count": 1,
    "vllm:num_requests_running": 0,
    "vllm:num_preemptions_total": 0,
    "vllm:kv_cache_usage_perc": 0,
    "kimi_handoff_bytes_total": 4096,
    "kimi_handoff_seconds_sum": 0.25,
    "kimi_handoff_reserved_seconds_sum": 0.5,
    "kimi_request_failures_total": 1,
    "kimi_lane_pages_total": 64,
    "kimi_lane_pages_used": 0,
    "kimi_lane_slots_used": 0,
    "kimi_lane_transfers_in_flight": 0,
    "kimi_lane_quarantined": 0,
}
