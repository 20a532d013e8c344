"""Each fast formula of the roofline against an obvious slow one, and against random routing."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from kimi_operator.planner.memory import ExpertFormat, GroupShape
from kimi_operator.planner.predict import handoff_ms, roofline_s
from kimi_operator.planner.roofline import (
    ASSUMED,
    Attention,
    Chip,
    DecodeLoad,
    Decoding,
    Engine,
    Exchange,
    Graphs,
    PrefillLoad,
    Resident,
    Setup,
    Split,
    Term,
    decode_terms,
    distinct_experts,
    handoff_bytes,
    prefill_terms,
)
from kimi_operator.planner.tensors import Part, Placement, tensor_table
from kimi_operator.profiles import built_in_profiles
from kimi_operator.profiles.measurements import worker_engine
from msgspec.structs import replace
from published_setups import BUILT_IN, DECODE, EP16, K3, MI300X, TP8

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
    off = 0.12 if load.new_tokens % load.chunk_tokens else 1e-9
    assert terms["matrix products"] * MI300X.bf16_flops * 0.15 >= products * (1 - 1e-9)
    assert terms["matrix products"] * MI300X.bf16_flops * 0.15 == pytest.approx(products, rel=off)


def test_a_prefill_of_few_tokens_takes_as_long_as_reading_the_weights() -> None:
    seconds = {term.label: term.seconds for term in prefill_terms(DECODE, PrefillLoad(1))}
    read = slow_decode_bytes(DECODE, DecodeLoad(1, 0)) / (MI300X.hbm_bytes_per_second * 0.7)
    assert seconds["matrix products"] == pytest.approx(read, rel=0.01)


def test_collectives_take_their_floor_in_decode_and_grow_with_bytes_in_prefill() -> None:
    decode = {term.label: term.seconds for term in decode_terms(DECODE, DecodeLoad(8, 1000))}
    assert decode["expert exchange"] == pytest.approx(92 * 198e-6)
    assert decode["all-reduce"] == pytest.approx(2 * 93 * 18e-6)
    chunk = {term.label: term.seconds for term in prefill_terms(DECODE, PrefillLoad(2048))}
    # TP2 has one link: both ranks send all rows once
    assert chunk["all-reduce"] == pytest.approx(2 * 93 * 2048 * 7168 * 2 / (64e9 * 0.7))
    # a rank's 1024 rows there and back, to the 10.3 of 16 ranks that 16 experts hit, over links to 7 GPUs
    rows, ranks_hit = 2 * 1024 * 3584 * 2, 16 * (1 - (15 / 16) ** 16)
    assert chunk["expert exchange"] == pytest.approx(92 * rows * ranks_hit / (7 * 64e9 * 0.7))
    # without links the card binds: each row crosses to the 3 other nodes once
    far = replace(DECODE, chip=replace(MI300X, link_bytes_per_second=None), shape=GroupShape(4, 8, 2))
    chunk = {term.label: term.seconds for term in prefill_terms(far, PrefillLoad(2048))}
    assert chunk["expert exchange"] == pytest.approx(92 * 3 * rows / (50e9 * 0.7))


def test_the_worker_is_not_said_to_run_graphs() -> None:
    launch = decode_terms(replace(DECODE, graphs=Graphs.NONE), DecodeLoad(1, 1000))[3]
    assert (launch.how, launch.seconds) == ("93 layers, no graphs, counted as full ones", pytest.approx(7e-3))


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


@pytest.mark.parametrize(
    ("cards", "gpus_per_node", "share"), [(None, 8, 1), (8, 8, 1), (16, 8, 1), (1, 8, 8), (2, 4, 2)]
)
def test_ranks_share_the_cards_of_their_node(cards: int | None, gpus_per_node: int, share: int) -> None:
    shape = GroupShape(2, gpus_per_node, 2)
    own, shared = (replace(DECODE, shape=shape, chip=replace(DECODE.chip, nics_per_node=n)) for n in (None, cards))
    assert handoff_ms(shared, 50_000).value == pytest.approx(share * handoff_ms(own, 50_000).value)
    load = PrefillLoad(2**19, chunk_tokens=2**19)
    each, both = ({t.label: t.seconds for t in prefill_terms(s, load)}["expert exchange"] for s in (own, shared))
    by_card = 92 * 2 * 2**18 * K3.latent * 2 / (50e9 * 0.7 / share)
    assert both == pytest.approx(max(each, by_card))
    assert (both > each) == (share > 1)


def test_piecewise_graphs_cost_time_in_every_step() -> None:
    full = roofline_s(DECODE, DecodeLoad(1, 1000))
    assert roofline_s(replace(DECODE, graphs=Graphs.PIECEWISE), DecodeLoad(1, 1000)) - full == pytest.approx(
        1.05e-3 * 93 / 80
    )


def test_the_bundled_worker_reads_wider_rows_and_its_own_weights() -> None:
    worker = worker_engine(built_in_profiles()["mi300x"])
    assert worker == Engine(
        "kimi-worker",
        ExpertFormat.MXFP4,
        2,
        Resident.AS_LOADED,
        2,
        Attention.LATENT,
        Exchange.ALL_TO_ALLS,
        Decoding.IN_MEMORY,
    )
    assert worker == replace(BUILT_IN.engines["kimi-worker"], itemsize=2)
    theirs = {t.label: t.seconds for t in decode_terms(DECODE, DecodeLoad(64, 60_000))}
    ours = {t.label: t.seconds for t in decode_terms(replace(DECODE, engine=worker), DecodeLoad(64, 60_000))}
    assert ours["cache"] > 1.5 * theirs["cache"]
    assert ours["routed experts"] > theirs["routed experts"], "decoded in memory"
    assert ours["expert exchange"] > theirs["expert exchange"], "three all-to-alls"
    assert ours["weights"] > theirs["weights"], "routers are float32"


@pytest.mark.parametrize(("itemsize", "conv_bytes"), [(2, 110_592), (4, 221_184)])
def test_a_handoff_carries_convolution_inputs_in_the_type_of_activations(itemsize: int, conv_bytes: int) -> None:
    setup = replace(DECODE, engine=replace(worker_engine(built_in_profiles()["mi300x"]), itemsize=itemsize))
    assert handoff_bytes(setup, 1000) == 1000 * 27_648 + 69 * (3_145_728 + conv_bytes)


# What the bundled worker does with experts

WORKER = replace(DECODE, engine=BUILT_IN.engines["kimi-worker"])


def seconds_of(terms: tuple[Term, ...]) -> dict[str, float]:
    return {term.label: term.seconds for term in terms}


def test_an_expert_that_is_decoded_in_memory_is_read_written_and_read_again() -> None:
    """4.25 bits a weight, then 16 twice, of which the last-level cache spares a share."""
    for load in (DecodeLoad(1, 1000), DecodeLoad(64, 15_360)):
        packed = replace(WORKER, engine=replace(WORKER.engine, decoding=Decoding.IN_REGISTERS))
        for share in (0.0, 0.35, 1.0):
            constants = replace(ASSUMED, decoded_from_cache=share)
            one, other = (seconds_of(decode_terms(setup, load, constants)) for setup in (packed, WORKER))
            times = (4.25 + 2 * 16 * (1 - share)) / 4.25
            assert other["routed experts"] == pytest.approx(times * one["routed experts"])
            assert {**other, "routed experts": 0.0} == {**one, "routed experts": 0.0}


def test_in_a_chunk_experts_are_decoded_before_their_products() -> None:
    """All 56 of a rank in each of 92 layers: read packed and written once a chunk, whatever its products take."""
    seconds = seconds_of(prefill_terms(WORKER, PrefillLoad(3 * 2048, busy_lanes=8)))
    spared = 1 - ASSUMED.decoded_from_cache
    weights = 56 * 92 * K3.expert_weights
    rate = MI300X.hbm_bytes_per_second * ASSUMED.hbm_share
    assert seconds["expert decoding"] == pytest.approx(3 * weights * (4.25 / 8 + 2 * spared) / rate)
    registers = replace(WORKER, engine=replace(WORKER.engine, decoding=Decoding.IN_REGISTERS))
    other = seconds_of(prefill_terms(registers, PrefillLoad(3 * 2048, busy_lanes=8)))
    assert "expert decoding" not in other
    assert seconds["matrix products"] == other["matrix products"], "FLOPs bind"
    # of one token its 16 experts are read as they were decoded, and the rest of the weights
    few = seconds_of(prefill_terms(WORKER, PrefillLoad(1)))
    hit = 16 / EP16.ranks * 92 * K3.expert_weights
    moved = seconds_of(decode_terms(WORKER, DecodeLoad(1, 1000)))["weights"] * rate + hit * 2 * spared
    assert few["matrix products"] == pytest.approx(moved / rate)


def test_three_all_to_alls_take_their_floor_in_decode() -> None:
    assert seconds_of(decode_terms(WORKER, DecodeLoad(64, 1000)))["expert exchange"] == pytest.approx(92 * 3 * 175e-6)


@pytest.mark.parametrize("shape", [EP16, GroupShape(4, 8, 4), TP8])
def test_rows_go_to_every_other_rank_that_holds_an_expert_and_come_back_in_float32(shape: GroupShape) -> None:
    """Against random routing: what the busiest way of a rank, its card or one of its links, has to carry."""
    rng = random.Random(0)
    own, per_rank = 0, K3.num_experts // shape.ranks
    trials, sent = 400, [0] * shape.ranks
    for _ in range(trials):
        for rank in {expert // per_rank for expert in rng.sample(range(K3.num_experts), K3.experts_per_token)}:
            sent[rank] += 1
    near = [sent[rank] for rank in range(shape.gpus_per_node) if rank != own]
    rows = 2048 / shape.tensor_parallel
    by_link = rows * sum(near) / len(near) / trials / (64e9 * 0.7)
    by_card = rows * sum(sent[shape.gpus_per_node :]) / trials / (50e9 * 0.7)
    # a row of 3,584 numbers with 16 experts' numbers and weights; a sum of as many
    expected = 175e-6 + sum(max(175e-6, max(by_link, by_card) * width) for width in (3584 * 2 + 16 * 8, 3584 * 4))
    found = seconds_of(prefill_terms(replace(WORKER, shape=shape), PrefillLoad(2048)))["expert exchange"]
    assert found == pytest.approx(92 * expected, rel=0.03)


# How prompts attend


def prefill_seconds(attention: Attention, load: PrefillLoad) -> dict[str, float]:
    setup = replace(DECODE, engine=replace(DECODE.engine, attention=attention))
    return {term.label: term.seconds for term in prefill_terms(setup, load)}


@pytest.mark.parametrize("load", [PrefillLoad(5000, 0, 2048), PrefillLoad(100, 9000, 512), PrefillLoad(2048, 0, 2048)])
def test_each_chunk_expands_all_rows_before_it(load: PrefillLoad) -> None:
    """Chunk by chunk: a row's keys and values take 512 x (128 + 128) weights a head; a rank of two has 48 heads."""
    flops, done = 0, 0
    while done < load.new_tokens:
        flops += (load.cached_tokens + done) * 2 * 512 * (128 + 128) * 48 * K3.num_mla_layers
        done += load.chunk_tokens
    seconds = prefill_seconds(Attention.EXPANDED, load)["expansion"]
    assert seconds * MI300X.bf16_flops * ASSUMED.attention_share == pytest.approx(flops, rel=1e-9)


def test_attention_in_cached_rows_expands_nothing_and_is_as_wide_as_they_are_in_float32() -> None:
    assert [BUILT_IN.chip(built_in_profiles()[n]).float32_slowdown for n in ("mi300x", "mi308x", "mi355x")] == [
        8,
        8,
        16,
    ]
    load = PrefillLoad(5000, 7000)
    expanded, latent = (prefill_seconds(attention, load) for attention in Attention)
    assert "expansion" not in latent
    assert latent["attention"] == pytest.approx(8 * (512 + 64 + 512) / (128 + 64 + 128) * expanded["attention"])
    assert latent["matrix products"] == expanded["matrix products"]
