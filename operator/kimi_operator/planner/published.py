"""Published figures of Kimi-K3, each beside what this planner computes for it; `COMPUTATIONS` has one entry a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeAlias

from msgspec import Struct

from kimi_operator.api.profile import DType
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.figures import Computed, Explained, Value
from kimi_operator.planner.fit import Residual, Sample, Use, calibrate, residuals
from kimi_operator.planner.memory import (
    ITEMSIZE,
    ExpertFormat,
    layer_row_bytes,
    layer_state_bytes,
    row_bytes,
    slot_bytes,
    weight_lines,
)
from kimi_operator.planner.predict import decode_step_ms
from kimi_operator.planner.published_settings import EP16_TP2, FP8, POOL_MI300X, POOL_MI325X, SETTINGS, PublishedSetting
from kimi_operator.planner.roofline import DecodeLoad
from kimi_operator.planner.tensors import Part, Placement, Stored, tensor_table, total_bytes
from kimi_operator.planner.unified import ALIGNMENT_TOKENS, UnifiedPool, block_layout

GIB, MIB = 2**30, 2**20
BF16 = 2
"""Bytes a number of the cached rows."""
USABLE_GIB_PER_MI300X = 188
"""As the drafts of the published recipe count."""
NEEDLES_AT_ONCE = (1, 8, 16, 32)
"""Requests of each level of the published recall test; each asks for a needle of its own."""
SHORT_REQUEST_TOKENS = 2048 + 128
"""Prompt and answer of the published runs that show a cap on requests."""


class Given(Struct, frozen=True):
    """What the computations start from."""

    architecture: Architecture
    samples: tuple[Sample, ...]
    """Measured times: those marked fitted give the factors, the others are predicted without having been seen."""
    notes: Mapping[str, Explained]
    """Why figures about speed do not reconcile, by the name of the row."""


Compute: TypeAlias = Callable[[Given], Value]


class Computation(Struct, frozen=True):
    """How one row is computed."""

    compute: Compute
    how: str | Callable[[Given], str]
    reason: str | Callable[[Given], str] = ""
    """For a row that does not reconcile: why."""
    fitted: Callable[[Given], bool] = lambda _: False
    """Whether the row's own figure gave its factor."""
    recorded: float | Callable[[Given], float] | None = None
    """For a row that does not reconcile: the value that `reason` was written for."""

    def __call__(self, given: Given) -> Computed:
        """The row's value, with its texts."""
        how, reason = (text if isinstance(text, str) else text(given) for text in (self.how, self.reason))
        recorded = self.recorded(given) if callable(self.recorded) else self.recorded
        return Computed(self.compute(given), how, reason, self.fitted(given), recorded)


def compute(path: str, given: Given) -> Computed | None:
    """The value of one row, `section.name`; None when the planner has no computation for it."""
    computation = COMPUTATIONS.get(path)
    return None if computation is None else computation(given)


def _part(part: Part | None) -> Callable[[Given], int]:
    return lambda given: total_bytes(tensor_table(given.architecture), part)


def _not_experts(given: Given) -> int:
    table = tensor_table(given.architecture)
    return total_bytes(table) - total_bytes(table, Part.ROUTED_EXPERTS)


def _num_tensors(given: Given) -> int:
    return sum(tensor.copies for tensor in tensor_table(given.architecture))


def _parameters(given: Given) -> int:
    a = given.architecture
    plain = sum(tensor.elements for tensor in tensor_table(a) if tensor.stored is not Stored.U8)
    return plain + a.num_experts * a.num_moe_layers * a.expert_weights


def _active_parameters(given: Given) -> int:
    a = given.architecture
    skipped = {Part.EMBEDDING, Part.VISION, Part.PROJECTOR, Part.ROUTED_EXPERTS}
    trunk = sum(tensor.elements for tensor in tensor_table(a) if tensor.part not in skipped)
    return trunk + a.experts_per_token * a.num_moe_layers * a.expert_weights


def _expert_bytes(form: ExpertFormat) -> Callable[[Given], int]:
    return lambda given: weight_lines(given.architecture, EP16_TP2, form, DType.BFLOAT16)[0].bytes


def _expert_gib(form: ExpertFormat) -> Compute:
    in_bytes = _expert_bytes(form)
    return lambda given: in_bytes(given) / GIB


def _draft_weights_gib(given: Given) -> float:
    rest = _not_experts(given) / EP16_TP2.tensor_parallel
    return (_expert_bytes(ExpertFormat.MXFP4)(given) + rest) / GIB


def _loaded_weights_gib(given: Given) -> float:
    """The published stack holds every tensor as in the files, the vision tower too; the bundled worker does not."""
    in_files = dict.fromkeys(Placement, 0)
    for tensor in tensor_table(given.architecture):
        in_files[tensor.placement] += tensor.bytes
    split = in_files[Placement.TENSOR_PARALLEL] / EP16_TP2.tensor_parallel
    whole = in_files[Placement.REPLICATED] + in_files[Placement.UNLOADED]
    return (_expert_bytes(ExpertFormat.INT4)(given) + split + whole) / GIB


def _request_mib(given: Given, tokens: int) -> float:
    a = given.architecture
    return (tokens * row_bytes(a, FP8) + slot_bytes(a, 1, DType.BFLOAT16)) / MIB


def _pool(given: Given, pool_bytes: int) -> UnifiedPool:
    return UnifiedPool(block_layout(given.architecture, EP16_TP2.tensor_parallel, FP8), pool_bytes)


def _answered(pool_bytes: int, tokens: int, max_num_seqs: int | None = None) -> Compute:
    """Requests that all lanes run at once."""

    def requests(given: Given) -> int:
        fit = _pool(given, pool_bytes).num_requests(tokens)
        return EP16_TP2.lanes * (fit if max_num_seqs is None else min(fit, max_num_seqs))

    return requests


@cache
def _decode_residuals(samples: tuple[Sample, ...]) -> dict[str, Residual]:
    found = residuals([sample for sample in samples if isinstance(sample.load, DecodeLoad)])
    return {residual.sample.name: residual for residual in found}


def _decode_step(name: str) -> Computation:
    """The step of a measured point, by a factor in which it has no part unless it is a fitted one."""

    def how(given: Given) -> str:
        predicted = _decode_residuals(given.samples)[name].predicted
        return f"{predicted.low:.1f} to {predicted.high:.1f} ms; {predicted.calibrated_on}"

    return Computation(
        lambda given: _decode_residuals(given.samples)[name].predicted.value,
        how,
        fitted=lambda given: _decode_residuals(given.samples)[name].sample.use is Use.FITTED,
    )


def _decode_rate(given: Given, like: str, concurrency: int) -> float:
    """Tokens a second when so many short requests decode on the hardware of a measured point, prefill left out."""
    setup = _decode_residuals(given.samples)[like].sample.setup
    load = DecodeLoad(concurrency, SHORT_REQUEST_TOKENS)
    return 1e3 * concurrency / decode_step_ms(setup, load, calibrate(setup, DecodeLoad, given.samples)).value


def _setting(setting: PublishedSetting) -> Computation:
    return Computation(lambda g: setting.solution(g.architecture).max_num_seqs, lambda g: setting.how(g.architecture))


def _note(name: str, rate: Callable[[Given], float], how: str) -> Computation:
    """A figure about speed whose reason stands beside the measured times."""
    return Computation(
        rate,
        how,
        reason=lambda given: given.notes[name].text(rate(given)),
        recorded=lambda given: given.notes[name].recorded,
    )


def _pool_reason(given: Given) -> str:
    rows, state = row_bytes(given.architecture, FP8), slot_bytes(given.architecture, 1, DType.BFLOAT16)
    return (
        "most likely what a token of the longest request costs the unified pool, and so no bytes on the wire: rows "
        f"alone are {rows:,} B a token, and the state, {state:,} B a request, is in no figure per token"
    )


_ONE_MILLION = 1_000_000


def _moe_layers(given: Given) -> str:
    return f"{given.architecture.num_moe_layers} layers"


def _bits(given: Given, form: ExpertFormat) -> str:
    return f"{form.bits_per_weight(given.architecture):g}"


def _expert_how(form: ExpertFormat) -> Callable[[Given], str]:
    def how(given: Given) -> str:
        experts = given.architecture.num_experts // EP16_TP2.ranks
        return f"{experts} experts x {_moe_layers(given)} at {_bits(given, form)} bits a weight"

    return how


def _rows(itemsize: int) -> Computation:
    """Cached rows of a token, in numbers of so many bytes."""

    def how(given: Given) -> str:
        a = given.architecture
        return f"{a.num_mla_layers} layers x {a.kv_lora + a.qk_rope} x {itemsize} B"

    return Computation(lambda given: row_bytes(given.architecture, itemsize), how)


def _state_how(given: Given) -> str:
    a = given.architecture
    state = f"{a.kda_heads} x {a.kda_head} x {a.kda_head} x {ITEMSIZE[DType.FLOAT32]} B"
    inputs = f"{a.conv_kernel - 1} x 3 x {a.kda_heads * a.kda_head:,} x {BF16} B"
    return f"{a.num_kda_layers} layers x ({state} + {inputs})"


def _block_how(given: Given) -> str:
    layout, row = _pool(given, 0).layout, layer_row_bytes(given.architecture, FP8)
    group = layout.block_bytes // (layout.block_tokens * row)
    return f"{layout.block_tokens:,} tokens x {row} B x {group} layers of a group"


def _request_blocks(given: Given, tokens: int) -> str:
    layout = _pool(given, 0).layout
    return f"({layout.blocks_of(tokens) - layout.state_groups} + {layout.state_groups})"


def _tokens_how(pool_bytes: int, tokens: int) -> Callable[[Given], str]:
    def how(given: Given) -> str:
        pool = _pool(given, pool_bytes)
        return f"{pool.num_blocks} blocks / {pool.layout.blocks_of(tokens)} a request x {tokens:,}"

    return how


def _answered_how(pool_bytes: int) -> Callable[[Given], str]:
    def how(given: Given) -> str:
        blocks = f"{_pool(given, pool_bytes).num_blocks} blocks"
        return f"{blocks} / {_request_blocks(given, SHORT_REQUEST_TOKENS)} a request, x {EP16_TP2.lanes} lanes"

    return how


def _longest_how(given: Given) -> str:
    pool = _pool(given, POOL_MI300X)
    return f"({pool.num_blocks} blocks - {pool.layout.state_groups}) x {pool.layout.block_tokens:,} tokens"


def _capped_how(pool_bytes: int, max_num_seqs: int) -> Callable[[Given], str]:
    def how(given: Given) -> str:
        fit = _pool(given, pool_bytes).num_requests(SHORT_REQUEST_TOKENS)
        return f"{min(fit, max_num_seqs)} running x {EP16_TP2.lanes} lanes; {fit} would fit a lane"

    return how


COMPUTATIONS: dict[str, Computation] = {
    "checkpoint.payload_bytes": Computation(_part(None), "all tensors of the table"),
    "checkpoint.payload_gib": Computation(lambda g: _part(None)(g) / GIB, "all tensors of the table / 2^30"),
    "checkpoint.tensors": Computation(_num_tensors, "names in the table, experts expanded"),
    "checkpoint.routed_experts_bytes": Computation(_part(Part.ROUTED_EXPERTS), "packed weights and scales"),
    "checkpoint.routed_experts_gib": Computation(
        lambda g: _part(Part.ROUTED_EXPERTS)(g) / GIB, "packed weights and scales / 2^30"
    ),
    "checkpoint.kda_attention_bytes": Computation(_part(Part.KDA), lambda g: f"{g.architecture.num_kda_layers} layers"),
    "checkpoint.mla_attention_bytes": Computation(_part(Part.MLA), lambda g: f"{g.architecture.num_mla_layers} layers"),
    "checkpoint.shared_experts_bytes": Computation(_part(Part.SHARED_EXPERTS), _moe_layers),
    "checkpoint.latent_projections_bytes": Computation(
        _part(Part.LATENT), lambda g: f"{_moe_layers(g)}, norms included"
    ),
    "checkpoint.embedding_bytes": Computation(_part(Part.EMBEDDING), "vocabulary x hidden x 2 B"),
    "checkpoint.lm_head_bytes": Computation(_part(Part.HEAD), "vocabulary x hidden x 2 B"),
    "checkpoint.dense_layer0_bytes": Computation(_part(Part.DENSE), "gate, up and down"),
    "checkpoint.routers_bytes": Computation(_part(Part.ROUTER), lambda g: f"{_moe_layers(g)}, biases included"),
    "checkpoint.parameters": Computation(_parameters, "two weights a packed byte; scales are no parameters"),
    "checkpoint.active_parameters_billion": Computation(
        lambda g: _active_parameters(g) / 1e9, "all but embedding, vision and the experts a token is not sent to"
    ),
    "layout_2p2d_ep16_tp2_dp8.experts_per_rank": Computation(
        lambda g: g.architecture.num_experts // EP16_TP2.ranks,
        lambda g: f"{g.architecture.num_experts} experts / {EP16_TP2.ranks} ranks",
    ),
    "layout_2p2d_ep16_tp2_dp8.experts_gib_per_gpu_mxfp4": Computation(
        _expert_gib(ExpertFormat.MXFP4), _expert_how(ExpertFormat.MXFP4)
    ),
    "layout_2p2d_ep16_tp2_dp8.experts_gib_per_gpu_int4": Computation(
        _expert_gib(ExpertFormat.INT4),
        lambda g: f"{_expert_how(ExpertFormat.INT4)(g)}: a bfloat16 scale for {g.architecture.quant_group}",
    ),
    "layout_2p2d_ep16_tp2_dp8.non_expert_gib_per_gpu_perfect_sharding": Computation(
        lambda g: _not_experts(g) / EP16_TP2.tensor_parallel / GIB,
        f"all that is no routed expert / {EP16_TP2.tensor_parallel}",
    ),
    "layout_2p2d_ep16_tp2_dp8.weights_gib_per_gpu_draft": Computation(
        _draft_weights_gib,
        lambda g: (
            f"experts at {_bits(g, ExpertFormat.MXFP4)} bits / {EP16_TP2.ranks} + the rest / {EP16_TP2.tensor_parallel}"
        ),
    ),
    "layout_2p2d_ep16_tp2_dp8.weights_gib_per_gpu_measured_int4": Computation(
        _loaded_weights_gib,
        lambda g: (
            f"experts at {_bits(g, ExpertFormat.INT4)} bits / {EP16_TP2.ranks} + what a lane splits / "
            f"{EP16_TP2.tensor_parallel} + what each rank holds whole"
        ),
    ),
    "layout_2p2d_ep16_tp2_dp8.free_gib_left_on_one_mi300x_node_after_weights": Computation(
        lambda g: EP16_TP2.gpus_per_node * USABLE_GIB_PER_MI300X - _part(None)(g) / GIB,
        f"{EP16_TP2.gpus_per_node} GPUs x {USABLE_GIB_PER_MI300X} GiB usable - the checkpoint",
    ),
    "cache.mla_bytes_per_token_fp8": _rows(FP8),
    "cache.mla_bytes_per_token_bf16": _rows(BF16),
    "cache.kda_state_bytes_per_request_tp1": Computation(
        lambda g: slot_bytes(g.architecture, 1, DType.BFLOAT16),
        _state_how,
    ),
    "cache.kda_state_mib_per_rank_tp2": Computation(
        lambda g: slot_bytes(g.architecture, 2, DType.BFLOAT16) / MIB,
        lambda g: f"the same for {g.architecture.kda_heads // 2} heads / 2^20",
    ),
    "cache.bytes_per_token_transferred": Computation(
        lambda g: _pool(g, 0).layout.request_bytes(_ONE_MILLION) / _ONE_MILLION,
        "blocks of a request of 1,000,000 tokens / 1,000,000",
        reason=_pool_reason,
        recorded=14_093.84,
    ),
    "cache.mib_per_1024_token_request": Computation(
        lambda g: _request_mib(g, 1024),
        lambda g: (
            f"(1,024 x {row_bytes(g.architecture, FP8):,} B + "
            f"{slot_bytes(g.architecture, 1, DType.BFLOAT16):,} B) / 2^20"
        ),
        reason="printed is 14,098 B x 1,024, which leaves out the state that moves with every request",
        recorded=442.055,
    ),
    "unified_block_pool_tp2_fp8.block_tokens": Computation(
        lambda g: _pool(g, 0).layout.block_tokens,
        lambda g: (
            f"{layer_state_bytes(g.architecture, EP16_TP2.tensor_parallel, BF16):,} B of state a layer / "
            f"{layer_row_bytes(g.architecture, FP8)} B a row, up to {ALIGNMENT_TOKENS} tokens"
        ),
    ),
    "unified_block_pool_tp2_fp8.block_bytes": Computation(lambda g: _pool(g, 0).layout.block_bytes, _block_how),
    "unified_block_pool_tp2_fp8.blocks_in_40e9": Computation(
        lambda g: _pool(g, POOL_MI325X).num_blocks,
        lambda g: f"{POOL_MI325X / 1e9:g}e9 B / {_pool(g, 0).layout.block_bytes:,} B",
    ),
    "unified_block_pool_tp2_fp8.pool_tokens_40e9_max_len_1e6": Computation(
        lambda g: _pool(g, POOL_MI325X).num_tokens(_ONE_MILLION), _tokens_how(POOL_MI325X, _ONE_MILLION)
    ),
    "unified_block_pool_tp2_fp8.pool_tokens_8e9_max_len_320000": Computation(
        lambda g: _pool(g, 8_000_000_000).num_tokens(320_000), _tokens_how(8_000_000_000, 320_000)
    ),
    "unified_block_pool_tp2_fp8.gib_needed_by_one_1e6_request": Computation(
        lambda g: _pool(g, 0).layout.request_bytes(_ONE_MILLION) / GIB,
        lambda g: f"{_request_blocks(g, _ONE_MILLION)} blocks x {_pool(g, 0).layout.block_bytes:,} B / 2^30",
    ),
    "unified_block_pool_tp2_fp8.short_request_cap_mi300x_4e9_8_lanes": Computation(
        _answered(4_000_000_000, SHORT_REQUEST_TOKENS), _answered_how(4_000_000_000)
    ),
    "unified_block_pool_tp2_fp8.short_request_cap_mi325x_20e9_8_lanes": Computation(
        _answered(20_000_000_000, SHORT_REQUEST_TOKENS), _answered_how(20_000_000_000)
    ),
    "unified_block_pool_tp2_fp8.max_len_13e9": Computation(
        lambda g: _pool(g, POOL_MI300X).layout.longest(_pool(g, POOL_MI300X).num_blocks),
        _longest_how,
    ),
    "unified_block_pool_tp2_fp8.long_context_gap_mi325x_over_mi300x": Computation(
        lambda g: _pool(g, POOL_MI325X).num_blocks / _pool(g, POOL_MI300X).num_blocks,
        lambda g: f"{_pool(g, POOL_MI325X).num_blocks} blocks / {_pool(g, POOL_MI300X).num_blocks} blocks",
    ),
    "concurrency.mi300x_plateau_max_num_seqs_8": Computation(
        _answered(POOL_MI300X, SHORT_REQUEST_TOKENS, max_num_seqs=8), _capped_how(POOL_MI300X, 8)
    ),
    "concurrency.mi325x_running_at_floor": Computation(
        _answered(POOL_MI325X, SHORT_REQUEST_TOKENS, max_num_seqs=64), _capped_how(POOL_MI325X, 64)
    ),
    **{f"settings.{name}": _setting(setting) for name, setting in SETTINGS.items()},
    "decode_tpot_ms.fit_mi325x_tp8_conc1": _decode_step("fit_mi325x_tp8_conc1"),
    "decode_tpot_ms.mi325x_tp8_conc16": _decode_step("mi325x_tp8_conc16"),
    "decode_tpot_ms.mi325x_2p2d_conc1": _decode_step("mi325x_2p2d_conc1"),
    "decode_tpot_ms.mi300x_2p2d_conc1": _decode_step("mi300x_2p2d_conc1"),
    "decode_tpot_ms.fit_mi355x_tp8_conc2": _decode_step("fit_mi355x_tp8_conc2"),
    "decode_tpot_ms.mi355x_tp8_conc4": _decode_step("mi355x_tp8_conc4"),
    "decode_tpot_ms.mi355x_tp8_conc8": _decode_step("mi355x_tp8_conc8"),
    "decode_tpot_ms.mi355x_tp8_conc64": _decode_step("mi355x_tp8_conc64"),
    "throughput.mi325x_512_tok_s": _note(
        "mi325x_512_tok_s",
        lambda g: _decode_rate(g, "mi325x_2p2d_conc1", 512),
        "512 running / predicted decode step, prefill left out",
    ),
    "throughput.mi300x_seqs_8_to_32_at_conc128_gain": _note(
        "mi300x_seqs_8_to_32_at_conc128_gain",
        lambda g: _decode_rate(g, "mi300x_2p2d_conc1", 128) / _decode_rate(g, "mi300x_2p2d_conc1", 64),
        "128 running over 8 x 8 lanes running, predicted decode steps, prefill left out",
    ),
    "correctness.needles": Computation(
        lambda _: f"{sum(NEEDLES_AT_ONCE)}/{sum(NEEDLES_AT_ONCE)}",
        f"{' + '.join(map(str, NEEDLES_AT_ONCE))} questions; "
        "that all are answered is measured by `kimictl needle`, not computed",
    ),
}
