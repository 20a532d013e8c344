"""Predicted times against published ones, and each fast formula against an obvious slow one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kimi_operator.planner.fit import Use, calibrate, residuals, stated
from kimi_operator.planner.memory import ExpertFormat, GroupShape
from kimi_operator.planner.predict import (
    Anchor,
    Calibration,
    Capacity,
    CurvePoint,
    Prediction,
    Request,
    Side,
    decode_step_ms,
    handoff_ms,
    knee,
    prefill_ms,
    roofline_s,
    throughput_curve,
)
from kimi_operator.planner.roofline import (
    ASSUMED,
    ASSUMED_RANGES,
    Chip,
    DecodeLoad,
    Engine,
    Graphs,
    PrefillLoad,
    Resident,
    Setup,
    Split,
    decode_terms,
    distinct_experts,
    prefill_terms,
)
from kimi_operator.planner.tensors import Part, Placement, tensor_table
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.figures import published_figures
from kimi_operator.profiles.measurements import built_in_measurements, calibration_for, worker_engine

K3 = architecture("kimi-k3")
DECODE_ROWS = {figure.name: figure for figure in published_figures() if figure.section == "decode_tpot_ms"}
NOTES = {figure.name: figure for figure in published_figures() if figure.section == "throughput"}
BUILT_IN = built_in_measurements()
EP16, TP8 = GroupShape(2, 8, 2), GroupShape(1, 8, 8)
MI300X = BUILT_IN.chip(built_in_profiles()["mi300x"])
MI325X = BUILT_IN.chip(built_in_profiles()["mi325x"])
INT4 = BUILT_IN.engines["vllm-int4"]
DECODE = Setup(K3, MI300X, EP16, INT4)
FACTOR_2 = Calibration((), math.log(1.2), "stated for a test", 2.0)


# Published figures


@pytest.mark.parametrize("name", DECODE_ROWS)
def test_published_step_time_comes_out(name: str) -> None:
    figure = DECODE_ROWS[name]
    predicted = next(r.predicted for r in residuals(BUILT_IN.samples) if r.sample.name == name)
    assert isinstance(figure.published, float)
    assert figure.tolerance is not None
    assert abs(predicted.value - figure.published) <= figure.tolerance * figure.published


def test_points_are_the_published_rows_and_only_those_marked_fit_are_fitted() -> None:
    decode = {s.name: s for s in BUILT_IN.samples if isinstance(s.load, DecodeLoad)}
    assert set(decode) == set(DECODE_ROWS)
    for name, sample in decode.items():
        assert sample.measured_s * 1e3 == pytest.approx(DECODE_ROWS[name].published)
        assert (sample.use is Use.FITTED) == name.startswith("fit_")


def decode_alone(chip: Chip, running: int) -> float:
    setup = replace(DECODE, chip=chip)
    step = decode_step_ms(setup, DecodeLoad(running, 2112), calibrate(setup, DecodeLoad, BUILT_IN.samples))
    return running / step.high * 1e3


def test_notes_are_no_points_and_their_reasons_hold() -> None:
    notes = {note.name: note for note in BUILT_IN.notes}
    assert {name: note.published for name, note in notes.items()} == {n: f.published for n, f in NOTES.items()}
    assert notes.keys().isdisjoint(sample.name for sample in BUILT_IN.samples)
    # "more than three times as much", though the slow end of the band leaves two
    assert decode_alone(MI325X, 512) > 2 * notes["mi325x_512_tok_s"].published
    gain = decode_alone(MI300X, 128) / decode_alone(MI300X, 64)
    assert gain > 1.3 * notes["mi300x_seqs_8_to_32_at_conc128_gain"].published
    assert all(len(note.reason) > 80 for note in notes.values())


def test_held_out_points_lie_in_bands_they_had_no_part_in() -> None:
    held_out = [r for r in residuals(BUILT_IN.samples) if r.sample.use is Use.HELD_OUT]
    outside = {r.sample.name for r in held_out if not r.is_in_band}
    # one of 16: the slowest ratio of all, which sets the band of the others
    assert outside == {"mi325x_50k"}
    assert len(held_out) == 16


# Distinct experts


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 1, 3), (5, 2, 2), (5, 2, 3), (6, 3, 2), (4, 4, 1)])
def test_distinct_experts_is_the_mean_over_every_possible_routing(experts: int, top_k: int, tokens: int) -> None:
    choices = list(itertools.combinations(range(experts), top_k))
    counts = [len(set().union(*routing)) for routing in itertools.product(choices, repeat=tokens)]
    assert distinct_experts(experts, top_k, tokens) == pytest.approx(sum(counts) / len(counts))


@pytest.mark.parametrize("tokens", [1, 16, 64, 512])
def test_distinct_experts_of_a_rank_agree_with_random_routing(tokens: int) -> None:
    rng = random.Random(tokens)
    trials, ranks = 40, 16
    hits = []
    for _ in range(trials):
        hit = {e for _ in range(tokens) for e in rng.sample(range(K3.num_experts), K3.experts_per_token)}
        hits += [sum(e // 56 == rank for e in hit) for rank in range(ranks)]
    expected = distinct_experts(K3.num_experts, K3.experts_per_token, tokens) / ranks
    mean = sum(hits) / len(hits)
    error = math.sqrt(sum((h - mean) ** 2 for h in hits) / len(hits) / len(hits))
    assert abs(mean - expected) <= 4 * error + 1e-9


# The sums, against walking through tensors, layers, requests and tokens one at a time


def slow_decode_bytes(setup: Setup, load: DecodeLoad) -> float:
    """Bytes that one rank moves in a step."""
    a, total = setup.architecture, 0.0
    hit = a.num_experts * (1 - math.prod(1 - a.experts_per_token / a.num_experts for _ in range(load.concurrency)))
    for tensor in tensor_table(a):
        if tensor.part is Part.EMBEDDING or tensor.placement is Placement.UNLOADED:
            continue
        if tensor.part is Part.ROUTED_EXPERTS:
            bits = {ExpertFormat.MXFP4: tensor.bytes * 8, ExpertFormat.INT4: tensor.bytes * 8}[setup.engine.experts]
            if setup.engine.experts is ExpertFormat.INT4 and tensor.name.endswith("scale"):
                bits *= 2
            total += bits / 8 / a.num_experts * hit / setup.shape.ranks
        elif tensor.placement is Placement.TENSOR_PARALLEL:
            total += tensor.bytes / setup.shape.tensor_parallel
        else:
            total += tensor.bytes
    lanes: list[int] = [0] * setup.shape.lanes
    for request in range(load.concurrency):
        lanes[request % setup.shape.lanes] += 1
    heads = a.kda_heads // setup.shape.tensor_parallel
    for _ in range(max(lanes)):
        for layer in range(a.num_layers):
            if layer in a.mla_layers:
                total += load.context_tokens * (a.kv_lora + a.qk_rope) * setup.engine.kv_itemsize
            else:
                state, conv = heads * a.kda_head**2 * 4, 3 * 3 * heads * a.kda_head * 2
                total += 2 * (state + conv)
    return total


@pytest.mark.parametrize("shape", [EP16, TP8, GroupShape(4, 8, 4)])
@pytest.mark.parametrize("engine", ["vllm-int4", "vllm-mxfp4"])
@pytest.mark.parametrize("load", [DecodeLoad(1, 1088), DecodeLoad(17, 30_000), DecodeLoad(512, 4096)])
def test_decode_bytes_agree_with_walking_through_everything(shape: GroupShape, engine: str, load: DecodeLoad) -> None:
    setup = replace(DECODE, shape=shape, engine=BUILT_IN.engines[engine])
    moved = {"weights", "routed experts", "cache"}
    seconds = sum(term.seconds for term in decode_terms(setup, load) if term.label in moved)
    assert seconds * MI300X.hbm_bytes_per_second * 0.7 == pytest.approx(slow_decode_bytes(setup, load), rel=1e-9)


@pytest.mark.parametrize(
    ("load", "busy_layers"), [(PrefillLoad(5000), 1), (PrefillLoad(4096, 10_000), 1), (PrefillLoad(700, 0, 512, 8), 8)]
)
def test_prefill_flops_agree_with_counting_token_by_token(load: PrefillLoad, busy_layers: int) -> None:
    a, tp = K3, EP16.tensor_parallel
    products = attention = 0.0
    used = [t for t in tensor_table(a) if t.part not in (Part.EMBEDDING, Part.HEAD, Part.ROUTED_EXPERTS)]
    for position in range(load.cached_tokens, load.cached_tokens + load.new_tokens):
        attention += (position + 1) * a.num_heads / tp * a.num_mla_layers * 2 * (128 + 64 + 128)
        products += 2 * a.experts_per_token * a.expert_weights * a.num_moe_layers * busy_layers / EP16.ranks
    for tensor in used:
        share = {Placement.TENSOR_PARALLEL: 1 / tp, Placement.REPLICATED: 1.0, Placement.UNLOADED: 0.0}
        products += 2 * tensor.elements * share[tensor.placement] * load.new_tokens
    terms = {term.label: term.seconds for term in prefill_terms(DECODE, load)}
    assert MI300X.bf16_flops is not None
    assert terms["attention"] * MI300X.bf16_flops * 0.6 == pytest.approx(attention, rel=1e-9)
    # a short rest may be bound by the bytes of its weights instead
    assert terms["matrix products"] * MI300X.bf16_flops * 0.15 >= products * (1 - 1e-9)
    assert terms["matrix products"] * MI300X.bf16_flops * 0.15 == pytest.approx(products, rel=0.12)


def test_a_prefill_of_few_tokens_takes_as_long_as_reading_the_weights() -> None:
    seconds = {term.label: term.seconds for term in prefill_terms(DECODE, PrefillLoad(1))}
    read = slow_decode_bytes(DECODE, DecodeLoad(1, 0)) / (MI300X.hbm_bytes_per_second * 0.7)
    assert seconds["matrix products"] == pytest.approx(read, rel=0.01)


def test_collectives_take_their_floor_in_decode_and_grow_with_bytes_in_prefill() -> None:
    decode = {term.label: term.seconds for term in decode_terms(DECODE, DecodeLoad(8, 1000))}
    assert decode["expert exchange"] == pytest.approx(92 * 198e-6)
    assert decode["all-reduce"] == pytest.approx(2 * 93 * 18e-6)
    chunk = {term.label: term.seconds for term in prefill_terms(DECODE, PrefillLoad(2048))}
    # TP2 has one link: both ranks send all rows once; 7 of 8 GPUs' links and one card carry latent rows
    assert chunk["all-reduce"] == pytest.approx(2 * 93 * 2048 * 7168 * 2 / (64e9 * 0.7))
    assert chunk["expert exchange"] > decode["expert exchange"]


def test_one_rank_has_no_collectives_and_a_lane_of_one_no_all_reduce() -> None:
    one = replace(DECODE, shape=GroupShape(1, 1, 1))
    assert {"all-reduce", "expert exchange"}.isdisjoint(t.label for t in decode_terms(one, DecodeLoad(1, 1)))
    wide = replace(DECODE, shape=GroupShape(2, 8, 1))
    assert "all-reduce" not in {t.label for t in decode_terms(wide, DecodeLoad(1, 1))}
    by_column = replace(DECODE, shape=TP8, split=Split.BY_COLUMN)
    assert "expert exchange" not in {t.label for t in decode_terms(by_column, DecodeLoad(1, 1))}


def test_links_that_nobody_stated_leave_the_floor() -> None:
    bare = replace(DECODE, chip=Chip("bare", "gfx942", 5.3e12, 1e15))
    chunk = {term.label: term.seconds for term in prefill_terms(bare, PrefillLoad(2048))}
    assert chunk["all-reduce"] == pytest.approx(2 * 93 * 18e-6)
    assert chunk["expert exchange"] == pytest.approx(92 * 198e-6)


def test_piecewise_graphs_cost_time_in_every_step() -> None:
    full = roofline_s(DECODE, DecodeLoad(1, 1000))
    assert roofline_s(replace(DECODE, graphs=Graphs.PIECEWISE), DecodeLoad(1, 1000)) - full == pytest.approx(
        1.05e-3 * 93 / 80
    )


def test_the_bundled_worker_reads_wider_rows_and_its_own_weights() -> None:
    worker = worker_engine(built_in_profiles()["mi300x"])
    assert worker == Engine("kimi-worker", ExpertFormat.MXFP4, 2, Resident.AS_LOADED, 2)
    theirs = {t.label: t.seconds for t in decode_terms(DECODE, DecodeLoad(64, 60_000))}
    ours = {t.label: t.seconds for t in decode_terms(replace(DECODE, engine=worker), DecodeLoad(64, 60_000))}
    assert ours["cache"] > 1.5 * theirs["cache"]
    assert ours["routed experts"] < theirs["routed experts"]
    assert ours["weights"] > theirs["weights"], "routers are float32"


# Monotone, and bands


def random_setups(seed: int) -> Iterator[tuple[Setup, DecodeLoad]]:
    rng = random.Random(seed)
    for _ in range(20):
        shape = rng.choice([EP16, TP8, GroupShape(4, 8, 2), GroupShape(2, 8, 8)])
        yield replace(DECODE, shape=shape), DecodeLoad(rng.randint(1, 600), rng.randint(1, 900_000))


@pytest.mark.parametrize("seed", range(3))
def test_more_requests_and_longer_contexts_never_take_less_and_more_bandwidth_never_more(seed: int) -> None:
    for setup, load in random_setups(seed):
        now = roofline_s(setup, load)
        assert roofline_s(setup, replace(load, concurrency=load.concurrency + 1)) >= now
        assert roofline_s(setup, replace(load, context_tokens=load.context_tokens + 1)) > now
        faster = replace(setup.chip, hbm_bytes_per_second=setup.chip.hbm_bytes_per_second * 1.1)
        assert roofline_s(replace(setup, chip=faster), load) < now
        prompt = PrefillLoad(load.context_tokens, 100)
        longer = replace(prompt, new_tokens=prompt.new_tokens + 1)
        assert prefill_ms(setup, longer, FACTOR_2).value > prefill_ms(setup, prompt, FACTOR_2).value


def test_chunks_of_any_size_compute_the_same_attention() -> None:
    for chunk in (1, 500, 2048, 10_000):
        terms = {t.label: t.seconds for t in prefill_terms(DECODE, PrefillLoad(6000, 0, chunk))}
        assert terms["attention"] == pytest.approx(
            next(t.seconds for t in prefill_terms(DECODE, PrefillLoad(6000)) if t.label == "attention")
        )


@pytest.mark.parametrize("seed", range(4))
def test_the_band_holds_every_refit_within_the_assumed_ranges(seed: int) -> None:
    """The band looks at the corners alone; a time over another is monotone in each constant, so nothing lies beyond."""
    rng = random.Random(seed)
    measured = calibrate(DECODE, DecodeLoad, BUILT_IN.samples)
    for setup, load in random_setups(seed):
        band = decode_step_ms(setup, load, measured)
        assert band.low <= band.value <= band.high
        for _ in range(10):
            names = ("hbm_share", "launch_s", "all_reduce_s", "exchange_per_node_s")
            constants = replace(ASSUMED, **{name: rng.uniform(*ASSUMED_RANGES[name]) for name in names})
            refitted = measured.factor(constants) * roofline_s(setup, load, constants) * 1e3
            assert band.low * (1 - 1e-9) <= refitted <= band.high * (1 + 1e-9)


def test_the_band_is_as_wide_as_held_out_errors_even_at_the_fitted_point() -> None:
    fitted = next(s for s in BUILT_IN.samples if s.name == "fit_mi325x_tp8_conc1")
    band = decode_step_ms(fitted.setup, fitted.load, calibrate(fitted.setup, DecodeLoad, BUILT_IN.samples))
    assert band.value == pytest.approx(29.03)
    assert band.high / band.value == pytest.approx(27.2 / 25.25, rel=0.001), "the worst held-out decode point"
    assert band.value / band.low == pytest.approx(band.high / band.value)


def test_the_band_widens_with_the_distance_from_what_was_measured() -> None:
    measured = calibrate(replace(DECODE, chip=MI325X), DecodeLoad, BUILT_IN.samples)
    near = decode_step_ms(Setup(K3, MI325X, TP8, INT4, Split.BY_COLUMN), DecodeLoad(2, 1088), measured)
    far = decode_step_ms(Setup(K3, MI325X, EP16, INT4), DecodeLoad(2, 1088), measured)
    assert far.high / far.low > 1.4 * near.high / near.low


def test_a_profiles_own_factor_is_used_with_its_own_band() -> None:
    own = decode_step_ms(DECODE, DecodeLoad(8, 1000), stated(2.0, 10, "a measured run"))
    assert own.value == pytest.approx(2000 * roofline_s(DECODE, DecodeLoad(8, 1000)))
    assert (own.value / own.low, own.high / own.value) == (pytest.approx(1.1), pytest.approx(1.1))
    assert "a measured run" in own.calibrated_on
    assert calibration_for(DECODE, DecodeLoad, None).anchors, "without one the nearest measured point is taken"


# Handoff


@pytest.mark.parametrize(("tokens", "low", "high"), [(1024, 5.0, 8.5), (100_000, 33, 57), (900_000, 264, 452)])
def test_handoff_takes_its_bytes_at_measured_bandwidths(tokens: int, low: float, high: float) -> None:
    band = handoff_ms(DECODE, tokens)
    assert band.low == pytest.approx(low, rel=0.02)
    assert band.high == pytest.approx(high, rel=0.02)
    assert band.low < band.value < band.high


def test_what_the_profile_does_not_state_is_named() -> None:
    bare = replace(DECODE, chip=Chip("bare", "gfx942", 5.3e12))
    with pytest.raises(ValueError, match="bare: no bandwidth of the network card"):
        handoff_ms(bare, 100)
    with pytest.raises(ValueError, match="bare: no bf16 FLOP/s"):
        prefill_ms(bare, PrefillLoad(100), FACTOR_2)


# Throughput against concurrency

LANE = Setup(K3, MI300X, TP8, INT4)
"""One lane, so that a busy prefill is as fast as an idle one."""
ROOM = Capacity(max_num_seqs=16, num_pages=100_000, page_size_tokens=64)


def slow_closed_loop(clients: int, prefill_s: float, answer_s: float, outputs: int) -> float:
    """Tokens a second of clients that ask again at once: the next of two free lanes, then the next of 16 places."""
    free_lanes, free_places = [0.0] * 2, [0.0] * ROOM.max_num_seqs
    ready = [0.0] * clients
    done: list[float] = []
    for _ in range(4000):
        client = min(range(clients), key=ready.__getitem__)
        lane = min(range(2), key=free_lanes.__getitem__)
        free_lanes[lane] = max(ready[client], free_lanes[lane]) + prefill_s
        place = min(range(ROOM.max_num_seqs), key=free_places.__getitem__)
        free_places[place] = ready[client] = max(free_lanes[lane], free_places[place]) + answer_s
        done.append(ready[client])
    done.sort()
    first, last = len(done) // 4, 3 * len(done) // 4
    return (last - first) * outputs / (done[last] - done[first])


@pytest.mark.parametrize("clients", [1, 4, 16, 64, 200])
@pytest.mark.parametrize(("prompt", "output"), [(512, 512), (8192, 64)])
def test_the_curve_agrees_with_clients_that_come_and_go(clients: int, prompt: int, output: int) -> None:
    request = Request(prompt, output)
    decode, prefill = Side(LANE, FACTOR_2), Side(LANE, FACTOR_2, groups=2)
    point = throughput_curve(decode, ROOM, request, [clients], prefill)[0]
    prefill_s = prefill_ms(LANE, PrefillLoad(prompt), FACTOR_2).value / 1e3
    answer_s = point.tpot.value / 1e3 * output
    simulated = slow_closed_loop(clients, prefill_s, answer_s, output)
    # a bound is never beaten; deterministic times come close to it
    assert simulated <= point.tokens_per_second.value * 1.02
    assert simulated >= point.tokens_per_second.value * 0.85


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


def test_prefill_binds_where_prompts_are_long_and_answers_short() -> None:
    curve = throughput_curve(Side(LANE, FACTOR_2), ROOM, Request(100_000, 16), [1, 8, 64], Side(LANE, FACTOR_2))
    assert curve[-1].binds == "prefill"
    seconds = prefill_ms(LANE, PrefillLoad(100_000), FACTOR_2)
    assert curve[-1].tokens_per_second.value == pytest.approx(16e3 / seconds.value)
    assert curve[-1].tokens_per_second.low == pytest.approx(16e3 / seconds.high)
    assert "prefill: stated for a test" in curve[-1].tokens_per_second.calibrated_on


def test_reuse_raises_what_prefill_can_feed() -> None:
    sides = Side(LANE, FACTOR_2), ROOM
    plain, reused = (
        throughput_curve(*sides, Request(50_000, 16, cached), [64], Side(LANE, FACTOR_2))[0] for cached in (0, 45_000)
    )
    assert reused.tokens_per_second.value > 3 * plain.tokens_per_second.value


def point_at(concurrency: int, rate: float) -> CurvePoint:
    flat = Prediction(1.0, 1.0, 1.0, "ms", "")
    return CurvePoint(concurrency, concurrency, flat, replace(flat, value=rate), "")


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


def test_an_anchor_pins_the_factor_and_a_statement_is_taken_as_it_is() -> None:
    load = DecodeLoad(4, 1000)
    anchored = Calibration((Anchor(DECODE, load, 3 * roofline_s(DECODE, load)),), 0.0, "")
    assert anchored.factor() == pytest.approx(3.0)
    assert FACTOR_2.factor(replace(ASSUMED, hbm_share=0.6)) == 2.0
