"""Throughput against concurrency: what binds, the fewest clients against all of them, the knee against geometry."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from kimi_operator.planner.fit import calibrate
from kimi_operator.planner.predict import (
    Capacity,
    Curve,
    CurvePoint,
    Prediction,
    PrefillSide,
    Request,
    Side,
    curve_of,
    decode_step_ms,
    knee,
    least_clients,
    prefill_ms,
    throughput_curve,
)
from kimi_operator.planner.roofline import (
    DecodeLoad,
    PrefillLoad,
    Setup,
)
from msgspec.structs import replace
from published_setups import BUILT_IN, DECODE, EP16, FACTOR_2, INT4, K3, MI300X, TP8

LANE = Setup(K3, MI300X, TP8, INT4)
"""One lane, so that a busy prefill is as fast as an idle one."""
PREFILL = PrefillSide(LANE, FACTOR_2, chunk_tokens=2048)
ROOM = Capacity(max_num_seqs=16, num_pages=100_000, page_size_tokens=64)


def test_the_published_plateau_of_64_is_the_knee_and_maxnumseqs_binds_beyond() -> None:
    published = Capacity(max_num_seqs=8, num_pages=100_000, page_size_tokens=64)
    measured = calibrate(DECODE, DecodeLoad, BUILT_IN.samples)
    curve = throughput_curve(Side(DECODE, measured), published, Request(2048, 128), range(8, 513, 8))
    assert knee(curve).concurrency == 64
    assert {point.binds for point in curve if point.concurrency > 64} == {"maxNumSeqs"}
    assert {point.binds for point in curve if point.concurrency <= 64} == {"concurrency"}
    assert {point.running for point in curve if point.concurrency >= 64} == {64}


def test_pages_bind_where_contexts_are_long() -> None:
    small = Capacity(max_num_seqs=64, num_pages=1000, page_size_tokens=64)
    curve = throughput_curve(Side(DECODE, FACTOR_2), small, Request(30_000, 2_000), [8, 16, 64])
    assert [point.running for point in curve] == [8, 16, 16], "two requests of 500 pages a lane"
    assert curve[-1].binds == "KV pages"
    assert replace(small, max_num_seqs=2).running(Request(30_000, 2_000)) == (2, "maxNumSeqs"), "as many as pages hold"
    with pytest.raises(ValueError, match="1,000 pages do not hold one request of 70,000 tokens"):
        throughput_curve(Side(DECODE, FACTOR_2), small, Request(69_000, 1_000), [1])


@pytest.mark.parametrize(
    ("of_lane", "held", "binds"),
    [
        (replace(ROOM, num_pages=9 * 947), 9, "KV pages"),
        (replace(ROOM, num_pages=17 * 947, num_slots=17), 17, "state slots"),
        (replace(ROOM, num_pages=17 * 947, num_slots=18), 17, "KV pages"),
        (replace(ROOM, num_slots=20), 20, "state slots"),
    ],
)
def test_prompts_in_prefill_hold_memory_of_decode(of_lane: Capacity, held: int, binds: str) -> None:
    """By hand: as many as have memory, over the time that each has it."""
    request, prefill = Request(60_000, 600), replace(PREFILL, groups=32)
    curve = throughput_curve(Side(LANE, FACTOR_2), of_lane, request, [held, held + 1, 500], prefill)
    assert [point.binds for point in curve] == ["concurrency", binds, binds]
    assert [point.held for point in curve] == [held] * 3
    prompt_s = prefill_ms(LANE, PrefillLoad(60_000), FACTOR_2).value / 1e3
    answer_s = 600 * decode_step_ms(LANE, DecodeLoad(min(held, 16), 60_300), FACTOR_2).value / 1e3
    rates = [point.tokens_per_second.value for point in curve]
    assert rates == pytest.approx([held * 600 / (prompt_s + answer_s)] * 3)


def test_memory_does_not_bind_where_nobody_computes_prompts() -> None:
    """Without prefill all that hold memory decode, and a place is what they want."""
    (point,) = throughput_curve(Side(LANE, FACTOR_2), replace(ROOM, num_slots=16), Request(1000, 100), [40])
    assert (point.binds, point.running) == ("maxNumSeqs", 16)


def curves(seed: int) -> Iterator[Curve]:
    """Of lanes that many requests slow down a step at a time."""
    rng = random.Random(seed)
    for _ in range(6):
        setup = replace(DECODE, shape=rng.choice([EP16, TP8]))
        decode, prefill = Side(setup, FACTOR_2, rng.randint(1, 3)), rng.randint(1, 20)
        request = Request(rng.randint(100, 100_000), rng.randint(10, 2_000))
        of_lane = Capacity(rng.randint(1, 8), 15_000, 64, rng.randint(8, 10))
        yield curve_of(decode, of_lane, request, PrefillSide(setup, FACTOR_2, prefill, chunk_tokens=2048))


@pytest.mark.parametrize("seed", range(4))
def test_what_each_waits_for_a_token_never_falls_with_more_clients(seed: int) -> None:
    for curve in curves(seed):
        waits = [n / curve(n).tokens_per_second.value for n in range(1, curve.held + 20)]
        assert all(more >= less * (1 - 1e-12) for less, more in pairwise(waits))


@pytest.mark.parametrize("seed", range(4))
def test_the_fewest_clients_are_the_first_whose_output_is_enough(seed: int) -> None:
    """Though one more client may get less output, where it is one more in a lane."""
    rng, falls = random.Random(seed), 0
    for curve in curves(seed):
        rates = {n: curve(n).tokens_per_second.value for n in range(1, curve.held + 2)}
        falls += any(rates[n] > rates[n + 1] * (1 + 1e-9) for n in range(1, curve.held))
        most = max(rates.values())
        for needed in (*rng.sample(list(rates.values()), min(12, len(rates))), rng.uniform(0, most), 2 * most):
            enough = [n for n, rate in rates.items() if rate >= needed]
            assert least_clients(needed, curve.held + 1, rates.__getitem__) == min(enough, default=curve.held + 1)
    assert falls, "without a fall a search by halves finds them too"


@pytest.mark.parametrize("seed", range(4))
def test_prefill_feeds_about_as_many_as_give_what_it_does(seed: int) -> None:
    """Of the first numbers, one after the other, the last that gives no more or the next, whichever is nearer."""
    for curve in curves(seed):
        assert curve.feed is not None
        fed, fewer = curve.feed.tokens_per_second[0], 0
        while fewer < curve.running and decoded(curve, fewer + 1) <= fed:
            fewer += 1
        near = {max(1, fewer), min(fewer + 1, curve.running)}
        assert curve.feed.running == min(near, key=lambda running: abs(decoded(curve, running) - fed))


def decoded(curve: Curve, running: int) -> float:
    load = DecodeLoad(-(-running // curve.decode.groups), curve.request.mean_context)
    return running / decode_step_ms(curve.decode.setup, load, FACTOR_2).value * 1e3


def test_prefill_binds_where_prompts_are_long_and_answers_short() -> None:
    curve = throughput_curve(Side(LANE, FACTOR_2), ROOM, Request(100_000, 16), [1, 8, 64], PREFILL)
    assert curve[-1].binds == "prefill"
    seconds = prefill_ms(LANE, PrefillLoad(100_000), FACTOR_2)
    assert curve[-1].tokens_per_second.value == pytest.approx(16e3 / seconds.value)
    assert curve[-1].tokens_per_second.low == pytest.approx(16e3 / seconds.high)
    assert "prefill: stated for a test" in curve[-1].tokens_per_second.calibrated_on


def test_smaller_chunks_feed_fewer_tokens() -> None:
    """Each chunk launches all layers and reads all weights anew."""
    rates = []
    for chunk in (512, 2048):
        side = replace(PREFILL, chunk_tokens=chunk)
        (point,) = throughput_curve(Side(LANE, FACTOR_2), ROOM, Request(100_000, 16), [64], side)
        seconds = prefill_ms(LANE, PrefillLoad(100_000, 0, chunk), FACTOR_2)
        assert point.tokens_per_second.value == pytest.approx(16e3 / seconds.value)
        rates.append(point.tokens_per_second.value)
    assert rates[0] < 0.99 * rates[1]


def test_reuse_raises_what_prefill_can_feed() -> None:
    sides = Side(LANE, FACTOR_2), ROOM
    plain, reused = (throughput_curve(*sides, Request(50_000, 16, cached), [64], PREFILL)[0] for cached in (0, 45_000))
    assert reused.tokens_per_second.value > 3 * plain.tokens_per_second.value


def point_at(concurrency: int, rate: float) -> CurvePoint:
    flat = Prediction(1.0, 1.0, 1.0, "ms", "")
    return CurvePoint(concurrency, concurrency, concurrency, flat, replace(flat, value=rate), "")


@pytest.mark.parametrize("seed", range(10))
def test_the_knee_is_the_point_farthest_from_the_chord(seed: int) -> None:
    rng = random.Random(seed)
    at = sorted(rng.sample(range(1, 600), 12))
    half = rng.uniform(5, 200)
    points = tuple(point_at(c, 1000 * c / (c + half)) for c in at)
    x = [(p.concurrency - at[0]) / (at[-1] - at[0]) for p in points]
    first, last = points[0].tokens_per_second.value, points[-1].tokens_per_second.value
    y = [(p.tokens_per_second.value - first) / (last - first) for p in points]
    # perpendicular distance of (x, y) to the line from (0, 0) to (1, 1)
    distances = [abs(y_i - x_i) / math.sqrt(2) for x_i, y_i in zip(x, y, strict=True)]
    assert knee(points) == points[distances.index(max(distances))]


def test_the_knee_of_a_straight_line_is_its_end_and_of_nothing_an_error() -> None:
    assert knee(tuple(point_at(c, 10.0 * c) for c in (1, 2, 3))).concurrency == 3
    assert knee((point_at(5, 1.0),)).concurrency == 5
    with pytest.raises(ValueError, match="at least one point"):
        knee(())
