"""Published figures of Kimi-K3, each beside what this planner computes for it; `COMPUTATIONS` has one entry a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from kimi_operator.api.profile import DType
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.figures import Computed, Explained, Value
from kimi_operator.planner.fit import Residual, Sample, Use, calibrate, residuals
from kimi_operator.planner.memory import ExpertFormat, row_bytes, slot_bytes, weight_lines
from kimi_operator.planner.predict import decode_step_ms
from kimi_operator.planner.published_settings import EP16_TP2, FP8, POOL_MI300X, POOL_MI325X, SETTINGS, PublishedSetting
from kimi_operator.planner.roofline import DecodeLoad
from kimi_operator.planner.tensors import Part, Placement, Stored, tensor_table, total_bytes
from kimi_operator.planner.unified import UnifiedPool, block_layout

GIB, MIB = 2**30, 2**20
BF16 = 2
"""Bytes a number of the cached rows."""
USABLE_GIB_PER_MI300X = 188
"""As the drafts of the published recipe count."""
NEEDLES_AT_ONCE = (1, 8, 16, 32)
"""Requests of each level of the published recall test; each asks for a needle of its own."""
SHORT_REQUEST_TOKENS = 2048 + 128
"""Prompt and answer of the published runs that show a cap on requests."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the computations start from."""

    architecture: Architecture
    samples: tuple[Sample, ...]
    """Measured times: those marked fitted give the factors, the others are predicted without having been seen."""
    notes: Mapping[str, Explained]
    """Why figures about speed do not reconcile, by the name of the row."""


Compute: TypeAlias = Callable[[Given], Value]


@dataclass(frozen=True, slots=True)
class Computation:
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

COMPUTATIONS: dict[str, Computation] = {
    "checkpoint.payload_bytes": Computation(_part(None), "all tensors of the table"),
    "checkpoint.payload_gib": Computation(lambda g: _part(None)(g) / GIB, "all tensors of the table / 2^30"),
    "checkpoint.tensors": Computation(_num_tensors, "names in the table, experts expanded"),
    "checkpoint.routed_experts_bytes": Computation(_part(Part.ROUTED_EXPERTS), "packed weights and scales"),
    "checkpoint.routed_experts_gib": Computation(
        lambda g: _part(Part.ROUTED_EXPERTS)(g) / GIB, "packed weights and scales / 2^30"
    ),
    "checkpoint.kda_attention_bytes": Computation(_part(Part.KDA), "69 layers"),
    "checkpoint.mla_attention_bytes": Computation(_part(Part.MLA), "24 layers"),
    "checkpoint.shared_experts_bytes": Computation(_part(Part.SHARED_EXPERTS), "92 layers"),
    "checkpoint.latent_projections_bytes": Computation(_part(Part.LATENT), "92 layers, norms included"),
    "checkpoint.embedding_bytes": Computation(_part(Part.EMBEDDING), "vocabulary x hidden x 2 B"),
    "checkpoint.lm_head_bytes": Computation(_part(Part.HEAD), "vocabulary x hidden x 2 B"),
    "checkpoint.dense_layer0_bytes": Computation(_part(Part.DENSE), "gate, up and down"),
    "checkpoint.routers_bytes": Computation(_part(Part.ROUTER), "92 layers, biases included"),
    "checkpoint.parameters": Computation(_parameters, "two weights a packed byte; scales are no parameters"),
    "checkpoint.active_parameters_billion": Computation(
        lambda g: _active_parameters(g) / 1e9, "all but embedding, vision and the experts a token is not sent to"
    ),
    "layout_2p2d_ep16_tp2_dp8.experts_per_rank": Computation(
        lambda g: g.architecture.num_experts // EP16_TP2.ranks, "896 experts / 16 ranks"
    ),
    "layout_2p2d_ep16_tp2_dp8.experts_gib_per_gpu_mxfp4": Computation(
        _expert_gib(ExpertFormat.MXFP4), "56 experts x 92 layers at 4.25 bits a weight"
    ),
    "layout_2p2d_ep16_tp2_dp8.experts_gib_per_gpu_int4": Computation(
        _expert_gib(ExpertFormat.INT4), "56 experts x 92 layers at 4.5 bits a weight: a bfloat16 scale for 32"
    ),
    "layout_2p2d_ep16_tp2_dp8.non_expert_gib_per_gpu_perfect_sharding": Computation(
        lambda g: _not_experts(g) / EP16_TP2.tensor_parallel / GIB, "all that is no routed expert / 2"
    ),
    "layout_2p2d_ep16_tp2_dp8.weights_gib_per_gpu_draft": Computation(
        _draft_weights_gib, "experts at 4.25 bits / 16 + the rest / 2"
    ),
    "layout_2p2d_ep16_tp2_dp8.weights_gib_per_gpu_measured_int4": Computation(
        _loaded_weights_gib, "experts at 4.5 bits / 16 + what a lane splits / 2 + what each rank holds whole"
    ),
    "layout_2p2d_ep16_tp2_dp8.free_gib_left_on_one_mi300x_node_after_weights": Computation(
        lambda g: EP16_TP2.gpus_per_node * USABLE_GIB_PER_MI300X - _part(None)(g) / GIB,
        "8 GPUs x 188 GiB usable - the checkpoint",
    ),
    "cache.mla_bytes_per_token_fp8": Computation(lambda g: row_bytes(g.architecture, FP8), "24 layers x 576 x 1 B"),
    "cache.mla_bytes_per_token_bf16": Computation(lambda g: row_bytes(g.architecture, BF16), "24 layers x 576 x 2 B"),
    "cache.kda_state_bytes_per_request_tp1": Computation(
        lambda g: slot_bytes(g.architecture, 1, DType.BFLOAT16),
        "69 layers x (96 x 128 x 128 x 4 B + 3 x 3 x 12,288 x 2 B)",
    ),
    "cache.kda_state_mib_per_rank_tp2": Computation(
        lambda g: slot_bytes(g.architecture, 2, DType.BFLOAT16) / MIB, "the same for 48 heads / 2^20"
    ),
    "cache.bytes_per_token_transferred": Computation(
        lambda g: _pool(g, 0).layout.request_bytes(_ONE_MILLION) / _ONE_MILLION,
        "blocks of a request of 1,000,000 tokens / 1,000,000",
        reason=_pool_reason,
        recorded=14_093.84,
    ),
    "cache.mib_per_1024_token_request": Computation(
        lambda g: _request_mib(g, 1024),
        "(1,024 x 13,824 B + 449,372,160 B) / 2^20",
        reason="printed is 14,098 B x 1,024, which leaves out the state that moves with every request",
        recorded=442.055,
    ),
    "unified_block_pool_tp2_fp8.block_tokens": Computation(
        lambda g: _pool(g, 0).layout.block_tokens, "3,256,320 B of state a layer / 576 B a row, up to 128 tokens"
    ),
    "unified_block_pool_tp2_fp8.block_bytes": Computation(
        lambda g: _pool(g, 0).layout.block_bytes, "5,760 tokens x 576 B x 24 layers of a group"
    ),
    "unified_block_pool_tp2_fp8.blocks_in_40e9": Computation(
        lambda g: _pool(g, POOL_MI325X).num_blocks, "40e9 B / 79,626,240 B"
    ),
    "unified_block_pool_tp2_fp8.pool_tokens_40e9_max_len_1e6": Computation(
        lambda g: _pool(g, POOL_MI325X).num_tokens(_ONE_MILLION), "502 blocks / 177 a request x 1,000,000"
    ),
    "unified_block_pool_tp2_fp8.pool_tokens_8e9_max_len_320000": Computation(
        lambda g: _pool(g, 8_000_000_000).num_tokens(320_000), "100 blocks / 59 a request x 320,000"
    ),
    "unified_block_pool_tp2_fp8.gib_needed_by_one_1e6_request": Computation(
        lambda g: _pool(g, 0).layout.request_bytes(_ONE_MILLION) / GIB, "(174 + 3) blocks x 79,626,240 B / 2^30"
    ),
    "unified_block_pool_tp2_fp8.short_request_cap_mi300x_4e9_8_lanes": Computation(
        _answered(4_000_000_000, SHORT_REQUEST_TOKENS), "50 blocks / (1 + 3) a request, x 8 lanes"
    ),
    "unified_block_pool_tp2_fp8.short_request_cap_mi325x_20e9_8_lanes": Computation(
        _answered(20_000_000_000, SHORT_REQUEST_TOKENS), "251 blocks / (1 + 3) a request, x 8 lanes"
    ),
    "unified_block_pool_tp2_fp8.max_len_13e9": Computation(
        lambda g: _pool(g, POOL_MI300X).layout.longest(_pool(g, POOL_MI300X).num_blocks),
        "(163 blocks - 3) x 5,760 tokens",
    ),
    "unified_block_pool_tp2_fp8.long_context_gap_mi325x_over_mi300x": Computation(
        lambda g: _pool(g, POOL_MI325X).num_blocks / _pool(g, POOL_MI300X).num_blocks, "502 blocks / 163 blocks"
    ),
    "concurrency.mi300x_plateau_max_num_seqs_8": Computation(
        _answered(POOL_MI300X, SHORT_REQUEST_TOKENS, max_num_seqs=8), "8 running x 8 lanes; 40 would fit a lane"
    ),
    "concurrency.mi325x_running_at_floor": Computation(
        _answered(POOL_MI325X, SHORT_REQUEST_TOKENS, max_num_seqs=64), "64 running x 8 lanes; 125 would fit a lane"
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
        "1 + 8 + 16 + 32 questions; that all are answered is measured by `kimictl needle`, not computed",
    ),
}
