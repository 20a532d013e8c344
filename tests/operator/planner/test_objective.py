"""Times and throughput that the solver and the search get from predictions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from kimi_operator.api.deployment import Role
from kimi_operator.planner.case import Solution
from kimi_operator.planner.memory import ExpertFormat, GroupShape
from kimi_operator.planner.objective import Forecast
from kimi_operator.planner.predict import Capacity, Request, decode_step_ms, prefill_ms, throughput_curve
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad, Setup
from kimi_operator.planner.search import Layout, Search, block_pools, page_pools, search
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.measurements import built_in_measurements, calibration_for
from msgspec.structs import replace

K3 = architecture("kimi-k3")
PROFILE = built_in_profiles()["mi325x"]
ENGINE = built_in_measurements().engines["vllm-int4"]
CHUNK = PROFILE.spec.limits.prefill_batched_tokens
EP16 = GroupShape(2, 8, 2)
WORK = Workload(fixed(2048), fixed(128))


def setup_of(shape: GroupShape) -> Setup:
    return Setup(K3, built_in_measurements().chip(PROFILE), shape, ENGINE)


DECODE = calibration_for(setup_of(EP16), DecodeLoad, None)
PREFILL = calibration_for(setup_of(EP16), PrefillLoad, None)


def forecast(workload: Workload = WORK) -> Forecast:
    return Forecast(workload, setup_of, DECODE, PREFILL, CHUNK)


def search_of(workload: Workload, num_nodes: int) -> Search:
    return Search(
        K3, PROFILE.spec, workload, num_nodes, block_pools(K3, 1), ExpertFormat.INT4, pool_bytes=40_000_000_000
    )


def test_times_are_those_that_predictions_show() -> None:
    timing, setup = forecast(replace(WORK, concurrency=1)).timing(EP16, 1), setup_of(EP16)
    step = decode_step_ms(setup, DecodeLoad(64 * EP16.lanes, 2112), DECODE)
    assert forecast().timing(EP16, 1).decode_step_s(64, 2112) == pytest.approx(step.value / 1e3)
    # no more decode than clients ask
    alone = decode_step_ms(setup, DecodeLoad(1, 2112), DECODE)
    assert timing.decode_step_s(64, 2112) == timing.decode_step_s(1, 2112) == pytest.approx(alone.value / 1e3)
    assert timing.prefill_s(50_000, 0) == pytest.approx(prefill_ms(setup, PrefillLoad(50_000), PREFILL).value / 1e3)


def test_throughput_is_that_of_the_curve_where_all_lanes_are_full() -> None:
    request = replace(search_of(WORK, 4), throughput=forecast().throughput)
    layout = Layout(EP16, 1, EP16, 1)
    decode = request.outcome(Role.DECODE, EP16, 1)
    prefill = request.outcome(Role.PREFILL, EP16, 1)
    assert isinstance(decode, Solution)
    assert isinstance(prefill, Solution)
    assert decode.running == 512
    ahead = forecast()
    sides = ahead.decode_side(EP16, 1), ahead.prefill_side(EP16, 1)
    held = Capacity(max_num_seqs=64, num_pages=64, page_size_tokens=2176)
    (point,) = throughput_curve(sides[0], held, Request(2048, 128), [512], sides[1])
    assert forecast().throughput(layout, decode) == pytest.approx(point.tokens_per_second.value)


def test_throughput_counts_the_requests_that_are_asked_for_and_no_idle_places() -> None:
    work = Workload(fixed(2048), fixed(2048), concurrency=9)
    request = search_of(work, 4)
    prefill, decode = (request.outcome(role, EP16, 1) for role in Role)
    assert isinstance(prefill, Solution)
    assert isinstance(decode, Solution)
    assert decode.running == 16, "two places in each of 8 lanes"
    step = decode_step_ms(setup_of(EP16), DecodeLoad(9, work.mean_context), DECODE)
    prompt = prefill_ms(setup_of(EP16), PrefillLoad(2048, 0, CHUNK, busy_lanes=EP16.lanes), PREFILL)
    token_ms = step.value + prompt.value / 2048
    assert forecast(work).throughput(Layout(EP16, 1, EP16, 1), decode) == pytest.approx(9e3 / token_ms)


def test_one_request_gets_no_more_tokens_than_its_prompt_and_answer_take() -> None:
    """Long prompts, short answers, nobody else: most of the time decode waits for prefill."""
    work = Workload(fixed(20_000), fixed(100), concurrency=1)
    request = search_of(work, 4)
    prefill, decode = (request.outcome(role, EP16, 1) for role in Role)
    assert isinstance(prefill, Solution)
    assert isinstance(decode, Solution)
    ahead = forecast(work)
    request_s = ahead.timing(EP16, 1).prefill_s(20_000, 0)
    request_s += 100 * decode_step_ms(setup_of(EP16), DecodeLoad(1, work.mean_context), DECODE).value / 1e3
    assert ahead.throughput(Layout(EP16, 1, EP16, 1), decode) == pytest.approx(100 / request_s)


def test_long_answers_earn_more_decode_groups_than_long_prompts() -> None:
    best = {}
    for name, work in (
        ("prompts", Workload(fixed(20_000), fixed(100))),
        ("answers", Workload(fixed(500), fixed(8000))),
    ):
        result = search(replace(search_of(work, 12), throughput=forecast(work).throughput))
        best[name] = result.ranked[0].layout
    assert best["prompts"].lanes(Role.PREFILL) > best["prompts"].lanes(Role.DECODE)
    assert best["answers"].lanes(Role.DECODE) > best["answers"].lanes(Role.PREFILL)


def test_reuse_frees_prefill_lanes_for_decode() -> None:
    def decode_nodes(reuse: str) -> int:
        work = replace(Workload(fixed(20_000), fixed(400)), reuse=Fraction(reuse))
        layout = search(replace(search_of(work, 12), throughput=forecast(work).throughput)).ranked[0].layout
        return layout.decode_groups * layout.decode.nodes

    assert decode_nodes("0.95") > decode_nodes("0")


def test_a_target_tpot_is_met_by_the_layouts_that_come_first() -> None:
    work = replace(WORK, tpot_s=0.060)
    request = search_of(work, 4)
    request = replace(
        request, design=page_pools(K3, PROFILE.spec, PROFILE.spec.runtime.kv_cache_dtype), pool_bytes=None
    )
    ahead = forecast(work)
    result = search(replace(request, timing=ahead.timing, throughput=ahead.throughput))
    met = [candidate for candidate in result.ranked if not candidate.misses]
    assert met == list(result.ranked[: len(met)])
    assert met
    for candidate in met:
        timing = ahead.timing(candidate.layout.decode, 1)
        assert timing.decode_step_s(candidate.decode.max_num_seqs, work.mean_context) <= 0.060


@pytest.mark.parametrize(
    ("load", "groups", "busy"),
    [
        ({}, 1, 8),
        ({"concurrency": 1}, 1, 1),
        ({"concurrency": 5}, 1, 5),
        ({"concurrency": 5}, 2, 3),
        ({"concurrency": 500}, 4, 8),
        ({"requests_per_second": Fraction(1, 1000), "tpot_s": 0.1}, 1, 1),
        ({"requests_per_second": Fraction(1000), "tpot_s": 0.1}, 1, 8),
    ],
)
def test_a_prompt_is_timed_beside_those_that_the_load_brings(load: dict[str, Any], groups: int, busy: int) -> None:
    ahead = forecast(Workload(fixed(20_000), fixed(100), **load))
    load_of_all = PrefillLoad(20_000, 0, CHUNK, busy)
    expected = prefill_ms(setup_of(EP16), load_of_all, PREFILL).value / 1e3
    assert ahead.timing(EP16, groups).prefill_s(20_000, 0) == pytest.approx(expected)


@pytest.mark.parametrize("busy", range(1, 8))
def test_a_rate_keeps_the_fewest_lanes_busy_that_bear_it(busy: int) -> None:
    each_s = prefill_ms(setup_of(EP16), PrefillLoad(20_000, 0, CHUNK, busy), PREFILL).value / 1e3
    for share, expected in ((0.999, busy), (1.001, busy + 1)):
        work = Workload(fixed(20_000), fixed(100), tpot_s=0.1, requests_per_second=Fraction(share * busy / each_s))
        timed = forecast(work).timing(EP16, 1).prefill_s(20_000, 0)
        load = PrefillLoad(20_000, 0, CHUNK, expected)
        assert timed == pytest.approx(prefill_ms(setup_of(EP16), load, PREFILL).value / 1e3)


def test_lanes_that_a_rate_keeps_busy_all_the_time_bear_it() -> None:
    def prompt_s(**load: Any) -> float:
        return forecast(Workload(fixed(20_000), fixed(100), **load)).timing(EP16, 1).prefill_s(20_000, 0)

    beside = {busy: prompt_s(concurrency=busy) for busy in range(1, 8)}
    rates = {busy: busy / each_s for busy, each_s in beside.items() if busy / each_s * each_s == busy}
    assert rates, "to the last bit"
    for busy, rate in rates.items():
        assert prompt_s(requests_per_second=Fraction(rate), tpot_s=0.1) == beside[busy]
