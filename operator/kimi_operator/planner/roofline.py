"""Uncalibrated times: bytes and FLOPs that a step must move and do, over what the hardware could, plus latencies.

Nothing here is fitted. `predict` multiplies the sums with one factor a chip and engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import cache

from msgspec import Struct

from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.memory import ExpertFormat, GroupShape, layer_state_bytes, row_bytes
from kimi_operator.planner.tensors import Part, Placement, Tensor, tensor_table
from kimi_operator.planner.units import ceil_div

ROW_ITEMSIZE = 2
"""Bytes an element of an activation between ranks (bfloat16)."""
SUM_ITEMSIZE = 4
"""Bytes an element of what the bundled worker's experts send back (float32)."""
CHOICE_BYTES = 8
"""An expert's number and weight, which the bundled worker sends beside each row for each of its experts."""


class Chip(Struct, frozen=True):
    """What a GPU and its links could do at best, one way; None: nobody stated it. Each pair of a node has a link."""

    name: str
    isa: str
    hbm_bytes_per_second: float
    bf16_flops: float | None = None
    link_bytes_per_second: float | None = None
    nic_bytes_per_second: float | None = None
    nics_per_node: int | None = None
    """None: as many as GPUs."""
    float32_slowdown: float = 16.0
    """Matrix FLOPs in bfloat16 over those in float32; where nobody stated it, the worst of known chips."""


class Resident(StrEnum):
    """How an engine holds what is no routed expert: as in the files, or as the bundled worker loads it."""

    AS_STORED = "asStored"
    AS_LOADED = "asLoaded"


class Split(StrEnum):
    """How the ranks of a group share routed experts: whole ones (EP, tokens travel) or a slice of each (TP)."""

    BY_EXPERT = "byExpert"
    BY_COLUMN = "byColumn"


class Graphs(StrEnum):
    """How steps are launched: piecewise is split at each attention layer."""

    FULL = "full"
    PIECEWISE = "piecewise"
    NONE = "none"
    """Kernel by kernel, as the bundled worker launches. Nobody measured what that adds: it counts as full graphs."""


class Attention(StrEnum):
    """How prompts attend."""

    EXPANDED = "expanded"
    """In keys and values of every head. Each chunk expands those of all tokens before it anew from their cached rows
    (vLLM, SGLang)."""
    LATENT = "latent"
    """In the cached rows themselves, in float32 (this worker): nothing to expand, but a pair of tokens takes 3.4 times
    the FLOPs, each many times as long."""


class Exchange(StrEnum):
    """How rows of tokens reach the ranks that hold their experts, and sums come back."""

    LIBRARY = "library"
    """Dispatch and combine of a device library (MoRI-EP): a row crosses to a node once, in bfloat16 both ways."""
    ALL_TO_ALLS = "allToAlls"
    """Three all-to-alls of torch a layer (this worker): counts, for which the host waits, then rows, one to each rank
    that holds an expert of it, and a sum in float32 back from each."""


class Decoding(StrEnum):
    """Where packed experts become numbers to multiply with."""

    IN_REGISTERS = "inRegisters"
    """In the products themselves, or once at load: their bytes are read once."""
    IN_MEMORY = "inMemory"
    """Each expert that is hit is written out in the type of activations and then read by its products (this worker)."""


class Engine(Struct, frozen=True):
    """What software runs, as far as bytes depend on it."""

    name: str
    experts: ExpertFormat
    kv_itemsize: int
    """Bytes an element of a cached MLA row."""
    resident: Resident = Resident.AS_STORED
    itemsize: int = 2
    """Bytes an element of an activation."""
    attention: Attention = Attention.EXPANDED
    exchange: Exchange = Exchange.LIBRARY
    decoding: Decoding = Decoding.IN_REGISTERS


class Setup(Struct, frozen=True):
    """One group of one role: model, hardware, layout, engine."""

    architecture: Architecture
    chip: Chip
    shape: GroupShape
    engine: Engine
    split: Split = Split.BY_EXPERT
    graphs: Graphs = Graphs.FULL

    @property
    def nics_per_rank(self) -> float:
        """Network cards of each rank: one, or less where the ranks of a node share fewer, all of them sending."""
        cards = self.chip.nics_per_node
        return 1.0 if cards is None else min(1.0, cards / self.shape.gpus_per_node)


class Constants(Struct, frozen=True):
    """What is assumed of every chip. `ASSUMED_RANGES` says how far each may be off."""

    hbm_share: float = 0.70
    """Achieved share of peak memory bandwidth (Infera's measured efficiency)."""
    link_share: float = 0.70
    """Achieved share of peak bandwidth of links and network cards (Infera)."""
    launch_s: float = 7e-3 / 93
    """Launching one layer; 7 ms for the 93 layers of Kimi-K3 is an assumption."""
    piecewise_s: float = 1.05e-3 / 80
    """What piecewise graphs add a layer: 0.5 to 1.6 ms were reported for 80 layers."""
    all_reduce_s: float = 18e-6
    """Floor of one all-reduce within a node; assumed."""
    exchange_s: float = 82e-6
    """Floor of dispatch and combine within a node: MoRI-EP on MI300X, 128 tokens, 35 + 47 us at EP8."""
    exchange_per_node_s: float = 116e-6
    """What each further node adds: EP16 took 76 + 122 us, EP32 157 + 280 us, so 82 + 116 (nodes - 1) us."""
    all_to_all_s: float = 175e-6
    """Floor of one all-to-all of RCCL: 150 us for one, 200 us for any call of RCCL (Infera); between them, assumed."""
    decoded_from_cache: float = 0.35
    """What the last-level cache (256 MB; decoded matrices of an expert take 66) spares of writing and reading decoded
    experts. Bytes that stay in it pass at 17 TB/s instead of 5.3 (MI300X), which spares 0.69. Assumed: reads do,
    writes do not."""
    gemm_share: float = 0.15
    """Achieved share of peak in matrix products: 181.6 (MI300X) and 215.1 (MI325X) of 1307.4 TFLOPS were measured in
    those of experts."""
    attention_share: float = 0.60
    """The same in prefill attention and in the dense products that expand rows for it; assumed."""


ASSUMED = Constants()
ASSUMED_RANGES: dict[str, tuple[float, float]] = {
    "hbm_share": (0.60, 0.80),
    "launch_s": (4e-3 / 93, 10e-3 / 93),
    "all_reduce_s": (12e-6, 25e-6),
    # 42 + 63 us at EP16 with 4 tokens a rank after tuning, against 198 us at 128 tokens
    "exchange_per_node_s": (23e-6, 116e-6),
    "all_to_all_s": (150e-6, 200e-6),
    # nothing stays in the cache; all does
    "decoded_from_cache": (0.0, 0.69),
    "gemm_share": (0.139, 0.165),
    # 0.78 is the plateau of grouped products (Infera)
    "attention_share": (0.40, 0.78),
}
"""Least and most of each assumption that matters, from the sources beside `Constants`; others are as good as exact."""


class Term(Struct, frozen=True):
    """One summand of a time."""

    label: str
    seconds: float
    how: str


class DecodeLoad(Struct, frozen=True):
    """`concurrency` requests of one group, spread evenly over its lanes, each at `context_tokens`."""

    concurrency: int
    context_tokens: int


class PrefillLoad(Struct, frozen=True):
    """One prompt of a lane: `new_tokens` to compute after `cached_tokens` that a prefix gave, in chunks."""

    new_tokens: int
    cached_tokens: int = 0
    chunk_tokens: int = 2048
    busy_lanes: int = 1
    """Lanes of the group that compute such a prompt at the same time; they share the ranks' experts."""
    pairs_factor: float = 1.0
    """Of prompts of many lengths, `new_tokens` on average: their mean pairs of tokens over those of the mean length."""


def distinct_experts(num_experts: int, top_k: int, tokens: float) -> float:
    """Expected number of distinct experts that `tokens` tokens hit, `top_k` different ones each, chosen uniformly.

    An expert is missed by one token with probability 1 - k/E and by all with (1 - k/E)^N; E experts, by linearity.
    """
    return num_experts * float(1 - (1 - top_k / num_experts) ** tokens)


def decode_terms(setup: Setup, load: DecodeLoad, constants: Constants = ASSUMED) -> tuple[Term, ...]:
    """Summands of one decode step of the slowest lane.

    A rank is taken to hold its even share of the experts that are hit; that the slowest rank holds more is left to the
    fitted factor.
    """
    a = setup.architecture
    rows = ceil_div(load.concurrency, setup.shape.lanes)
    bandwidth = setup.chip.hbm_bytes_per_second * constants.hbm_share
    weights, cache = _weight_bytes(setup), rows * (_rows_bytes(setup, load.context_tokens) + 2 * _state_bytes(setup))
    hit = distinct_experts(a.num_experts, a.experts_per_token, load.concurrency)
    experts = _operand_bytes(setup, hit, constants) + _decoding_bytes(setup, hit, constants)
    where = ", each decoded in memory" if setup.engine.decoding is Decoding.IN_MEMORY else ""
    at = f"GB at {bandwidth / 1e12:.3g} TB/s ({constants.hbm_share:.0%} of peak)"
    return (
        Term("weights", weights / bandwidth, f"{weights / 1e9:.2f} {at}, every step"),
        Term("routed experts", experts / bandwidth, f"{experts / 1e9:.2f} {at}, {hit:.1f} experts a layer hit{where}"),
        Term("cache", cache / bandwidth, f"{cache / 1e9:.2f} {at}: rows read, states read and written, of {rows}"),
        *_latency_terms(setup, rows, constants),
    )


def prefill_terms(setup: Setup, load: PrefillLoad, constants: Constants = ASSUMED) -> tuple[Term, ...]:
    """Summands of the prefill of one prompt. Raises ValueError when nobody stated the chip's FLOPs."""
    if setup.chip.bf16_flops is None:
        raise ValueError(f"{setup.chip.name}: no bf16 FLOP/s stated; prefill cannot be predicted")
    full, rest = divmod(load.new_tokens, load.chunk_tokens)
    chunks = [(count, size) for count, size in ((full, load.chunk_tokens), (1, rest)) if count and size]
    linear = sum(count * _chunk_s(setup, size, load.busy_lanes, constants) for count, size in chunks)
    pairs = round(token_pairs(load.new_tokens, load.cached_tokens) * load.pairs_factor)
    attention = _attention_flops(setup, pairs)
    rate = setup.chip.bf16_flops * constants.attention_share / _attention_slowdown(setup)
    latency: dict[str, float] = {}
    for count, size in chunks:
        for term in _latency_terms(setup, size, constants):
            latency[term.label] = latency.get(term.label, 0.0) + count * term.seconds
    how, precision = f"{full + bool(rest)} chunks", ", in float32" if _attention_slowdown(setup) > 1 else ""
    return (
        *_decoding_terms(setup, [(count, size * load.busy_lanes) for count, size in chunks], constants),
        Term("matrix products", linear, f"{how}, the longer of FLOPs and weight bytes each"),
        Term(
            "attention", attention / rate, f"{attention / 1e12:.1f} TFLOP a rank: {pairs:,} pairs of tokens{precision}"
        ),
        *_expansion_terms(setup, load, rate),
        *(Term(label, seconds, how) for label, seconds in latency.items()),
    )


def token_pairs(new_tokens: int, cached_tokens: int) -> int:
    """Pairs of a new token and one that it attends to, itself included."""
    return new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2


def handoff_bytes(setup: Setup, tokens: int) -> int:
    """Bytes that one rank sends for a request: its cached rows, whole on each rank of a lane, and its state slot."""
    return _rows_bytes(setup, tokens) + _state_bytes(setup)


def _rows_bytes(setup: Setup, tokens: int) -> int:
    return tokens * row_bytes(setup.architecture, setup.engine.kv_itemsize)


def _state_bytes(setup: Setup) -> int:
    a = setup.architecture
    return a.num_kda_layers * layer_state_bytes(a, setup.shape.tensor_parallel, setup.engine.itemsize)


def _experts_hit(setup: Setup, hit: float) -> float:
    """A rank's share of the experts hit in all layers; by expert and by column it is the same on average."""
    return hit / setup.shape.ranks * setup.architecture.num_moe_layers


def _operand_bytes(setup: Setup, hit: float, constants: Constants) -> float:
    """What the products of the experts that are hit read."""
    a, engine = setup.architecture, setup.engine
    if engine.decoding is Decoding.IN_REGISTERS:
        return _experts_hit(setup, hit) * engine.experts.expert_bytes(a)
    return _experts_hit(setup, hit) * a.expert_weights * engine.itemsize * (1 - constants.decoded_from_cache)


def _decoding_bytes(setup: Setup, hit: float, constants: Constants) -> float:
    """What decoding them in memory reads and writes before."""
    if setup.engine.decoding is Decoding.IN_REGISTERS:
        return 0.0
    packed = _experts_hit(setup, hit) * setup.engine.experts.expert_bytes(setup.architecture)
    return packed + _operand_bytes(setup, hit, constants)


@cache
def _trunk(a: Architecture) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Tensors that every token meets: split over a lane, and whole. Of the embedding one row a token is read."""
    used = [tensor for tensor in tensor_table(a) if tensor.part is not Part.EMBEDDING]
    split = tuple(tensor for tensor in used if tensor.placement is Placement.TENSOR_PARALLEL)
    return split, tuple(tensor for tensor in used if tensor.placement is Placement.REPLICATED)


@cache
def _trunk_bytes(a: Architecture, resident: Resident, itemsize: int) -> tuple[int, int]:
    def size(tensor: Tensor) -> int:
        return tensor.bytes if resident is Resident.AS_STORED else tensor.resident_bytes(itemsize)

    split, whole = _trunk(a)
    return sum(map(size, split)), sum(map(size, whole))


def _weight_bytes(setup: Setup) -> float:
    split, whole = _trunk_bytes(setup.architecture, setup.engine.resident, setup.engine.itemsize)
    return split / setup.shape.tensor_parallel + whole


@cache
def _trunk_weights(a: Architecture) -> tuple[int, int]:
    """Weights that a prompt's token multiplies with; the head sees the last token only."""
    split, whole = _trunk(a)
    return sum(t.elements for t in split if t.part is not Part.HEAD), sum(t.elements for t in whole)


def _chunk_s(setup: Setup, tokens: int, busy_lanes: int, constants: Constants) -> float:
    """Matrix products of one chunk: two FLOPs a weight and token, or the bytes of the weights if that takes longer."""
    a, shape = setup.architecture, setup.shape
    split, whole = _trunk_weights(a)
    routed = a.experts_per_token * a.expert_weights * a.num_moe_layers * busy_lanes / shape.ranks
    flops = 2 * tokens * (split / shape.tensor_parallel + whole + routed)
    hit = distinct_experts(a.num_experts, a.experts_per_token, tokens * busy_lanes)
    moved = _weight_bytes(setup) + _operand_bytes(setup, hit, constants)
    peak = setup.chip.bf16_flops or 0.0
    return max(flops / (peak * constants.gemm_share), moved / (setup.chip.hbm_bytes_per_second * constants.hbm_share))


def _decoding_terms(setup: Setup, chunks: list[tuple[int, int]], constants: Constants) -> Iterator[Term]:
    """Experts decoded in memory in each chunk: how many chunks of so many tokens of all lanes together."""
    if setup.engine.decoding is Decoding.IN_REGISTERS:
        return
    a, bandwidth = setup.architecture, setup.chip.hbm_bytes_per_second * constants.hbm_share
    hits = ((count, distinct_experts(a.num_experts, a.experts_per_token, tokens)) for count, tokens in chunks)
    moved = sum(count * _decoding_bytes(setup, hit, constants) for count, hit in hits)
    at = f"{bandwidth / 1e12:.3g} TB/s ({constants.hbm_share:.0%} of peak)"
    yield Term("expert decoding", moved / bandwidth, f"{moved / 1e9:.2f} GB at {at}, before the products")


def _attention_flops(setup: Setup, pairs: int) -> float:
    """Scores and values, two FLOPs a multiplication; KDA grows with tokens only and is under 1 % of the products."""
    a = setup.architecture
    width = a.qk_nope + a.qk_rope + a.v_head
    if setup.engine.attention is Attention.LATENT:
        width = a.kv_lora + a.qk_rope + a.kv_lora
    return 2 * width * a.num_heads / setup.shape.tensor_parallel * a.num_mla_layers * pairs


def _attention_slowdown(setup: Setup) -> float:
    return setup.chip.float32_slowdown if setup.engine.attention is Attention.LATENT else 1.0


def _expansion_terms(setup: Setup, load: PrefillLoad, rate: float) -> Iterator[Term]:
    """Keys and values of the tokens before each chunk; those of its own tokens are among the matrix products."""
    if setup.engine.attention is Attention.LATENT:
        return
    a, chunks = setup.architecture, ceil_div(load.new_tokens, load.chunk_tokens)
    rows = round((chunks * load.cached_tokens + load.chunk_tokens * chunks * (chunks - 1) // 2) * load.pairs_factor)
    weights = a.kv_lora * (a.qk_nope + a.v_head) * a.num_heads / setup.shape.tensor_parallel
    flops = 2 * weights * a.num_mla_layers * rows
    yield Term("expansion", flops / rate, f"{flops / 1e12:.1f} TFLOP a rank: {rows:,} rows before the chunks")


def _latency_terms(setup: Setup, lane_tokens: int, constants: Constants) -> tuple[Term, ...]:
    a, shape = setup.architecture, setup.shape
    per_layer = constants.launch_s + (constants.piecewise_s if setup.graphs is Graphs.PIECEWISE else 0.0)
    graphs = "no graphs, counted as full ones" if setup.graphs is Graphs.NONE else f"{setup.graphs} graphs"
    terms = [Term("launch", a.num_layers * per_layer, f"{a.num_layers} layers, {graphs}")]
    if shape.tensor_parallel > 1:
        each = _all_reduce_s(setup, lane_tokens, constants)
        count = 2 * a.num_layers
        terms.append(Term("all-reduce", count * each, f"{count} of {each * 1e6:.0f} us over a lane"))
    if setup.split is Split.BY_EXPERT and shape.ranks > 1:
        is_library = setup.engine.exchange is Exchange.LIBRARY
        exchange = _exchange_s if is_library else _all_to_alls_s
        each = exchange(setup, lane_tokens / shape.tensor_parallel, constants)
        how = f"{a.num_moe_layers} of {each * 1e6:.0f} us over {shape}" + ("" if is_library else ", 3 all-to-alls each")
        terms.append(Term("expert exchange", a.num_moe_layers * each, how))
    return tuple(terms)


def _all_reduce_s(setup: Setup, tokens: int, constants: Constants) -> float:
    """Its floor, or the bytes: each rank sends 2 (TP-1)/TP of the rows over its TP-1 links."""
    link = setup.chip.link_bytes_per_second
    if link is None:
        return constants.all_reduce_s
    sent = 2 * tokens * setup.architecture.hidden * ROW_ITEMSIZE / setup.shape.tensor_parallel
    return max(constants.all_reduce_s, sent / (link * constants.link_share))


def _exchange_s(setup: Setup, rank_tokens: float, constants: Constants) -> float:
    """Dispatch and combine: the floor, or the bytes of latent rows over the network card or the links.

    A row crosses to each other node once and goes from there to the expected number of ranks that hold its experts.
    """
    a, shape, chip = setup.architecture, setup.shape, setup.chip
    row = 2 * rank_tokens * a.latent * ROW_ITEMSIZE
    times = [constants.exchange_s + constants.exchange_per_node_s * (shape.nodes - 1)]
    if chip.nic_bytes_per_second is not None:
        card = chip.nic_bytes_per_second * setup.nics_per_rank
        times.append(row * (shape.nodes - 1) / (card * constants.link_share))
    if chip.link_bytes_per_second is not None and shape.gpus_per_node > 1:
        ranks_hit = distinct_experts(shape.ranks, 1, a.experts_per_token)
        times.append(row * ranks_hit / ((shape.gpus_per_node - 1) * chip.link_bytes_per_second * constants.link_share))
    return max(times)


def _all_to_alls_s(setup: Setup, rank_tokens: float, constants: Constants) -> float:
    """Counts, rows and sums: of each its floor, or the bytes over the network card or the links.

    A row goes to the expected number of other ranks that hold its experts, those of other nodes included.
    """
    a, shape, chip = setup.architecture, setup.shape, setup.chip
    copies = rank_tokens * distinct_experts(shape.ranks, 1, a.experts_per_token) / shape.ranks
    pace = 0.0
    if chip.nic_bytes_per_second is not None:
        card = chip.nic_bytes_per_second * setup.nics_per_rank
        pace = copies * (shape.ranks - shape.gpus_per_node) / (card * constants.link_share)
    if chip.link_bytes_per_second is not None and shape.gpus_per_node > 1:
        # each of the others of a node has its own link
        pace = max(pace, copies / (chip.link_bytes_per_second * constants.link_share))
    rows, sums = a.latent * setup.engine.itemsize + a.experts_per_token * CHOICE_BYTES, a.latent * SUM_ITEMSIZE
    return constants.all_to_all_s + sum(max(constants.all_to_all_s, width * pace) for width in (rows, sums))
