"""The checkpoint's tensor table: every name, shape, dtype and where its parts lie, generated from the sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import Enum, StrEnum
from functools import cache

from msgspec import Struct

from kimi_operator.planner.architecture import Architecture, Vision
from kimi_operator.planner.units import ceil_div

PREFIX = "language_model.model."
EXPERT = "{expert}"
A_LOG_MULTIPLE = 128


class Stored(Enum):
    """Type in the file: name and bytes an element."""

    BF16 = ("BF16", 2)
    F32 = ("F32", 4)
    U8 = ("U8", 1)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.value[1]


class Part(StrEnum):
    """What a tensor belongs to."""

    ROUTED_EXPERTS = "routed experts"
    KDA = "KDA attention"
    MLA = "MLA attention"
    SHARED_EXPERTS = "shared experts"
    LATENT = "latent projections and norm"
    ROUTER = "routers"
    DENSE = "dense MLP"
    EMBEDDING = "embedding"
    HEAD = "lm_head"
    NORMS = "norms and attention residuals"
    VISION = "vision tower"
    PROJECTOR = "projector"


class Placement(StrEnum):
    """How the ranks of a group share a tensor."""

    EXPERT_PARALLEL = "split over all ranks"
    TENSOR_PARALLEL = "split over the ranks of a lane"
    REPLICATED = "whole on each rank"
    UNLOADED = "not loaded"


class Held(StrEnum):
    """What the worker makes of a tensor when it loads it."""

    COMPUTE = "in the activation type"
    FLOAT32 = "in float32"
    FOLDED = "multiplied into another tensor"
    PACKED = "as the experts' format says"


class Tensor(Struct, frozen=True):
    """One tensor of the file, or one for each expert when the name holds {expert}."""

    name: str
    shape: tuple[int, ...]
    stored: Stored
    part: Part
    placement: Placement
    held: Held
    copies: int = 1
    padding: int = 0
    """Elements at its end that the worker drops."""

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return math.prod(self.shape) * self.copies

    @property
    def bytes(self) -> int:
        """Bytes of all copies in the file."""
        return self.elements * self.stored.itemsize

    def resident_bytes(self, itemsize: int) -> int:
        """Bytes once loaded, all ranks of a lane together; `itemsize` is that of the activation type.

        Routed experts are not counted here: their format decides.
        """
        sizes = {Held.COMPUTE: itemsize, Held.FLOAT32: 4, Held.FOLDED: 0, Held.PACKED: 0}
        return (self.elements - self.padding) * sizes[self.held]

    def names(self) -> Iterator[str]:
        """Name of each copy."""
        if EXPERT not in self.name:
            yield self.name
            return
        for expert in range(self.copies):
            yield self.name.replace(EXPERT, str(expert))


@cache
def tensor_table(a: Architecture) -> tuple[Tensor, ...]:
    """All tensors of the checkpoint, in layer order; routed experts are folded into one entry a layer and matrix."""
    tensors: list[Tensor] = []
    for layer in range(a.num_layers):
        prefix = f"{PREFIX}layers.{layer}."
        tensors += _mla(a, prefix + "self_attn.") if layer in a.mla_layers else _kda(a, prefix + "self_attn.")
        tensors += _residual(a, prefix)
        tensors += _dense(a, prefix + "mlp.") if layer < a.dense_layers else _moe(a, prefix + "block_sparse_moe.")
    tensors += _top(a)
    if a.vision is not None:
        tensors += _vision(a.vision)
        tensors += _projector(a.vision, a.hidden)
    return tuple(tensors)


def total_bytes(tensors: Iterable[Tensor], part: Part | None = None) -> int:
    """Bytes in the file of one part, or of all."""
    return sum(t.bytes for t in tensors if part in (None, t.part))


_Row = tuple[str, tuple[int, ...], Stored, Placement]
_TP, _ALL, _SKIP = Placement.TENSOR_PARALLEL, Placement.REPLICATED, Placement.UNLOADED
_BF16, _F32 = Stored.BF16, Stored.F32


def _build(prefix: str, part: Part, rows: Iterable[_Row]) -> list[Tensor]:
    return [
        Tensor(prefix + name, shape, stored, part, placement, _held(name, stored))
        for name, shape, stored, placement in rows
    ]


def _held(name: str, stored: Stored) -> Held:
    # Close scores decide which experts run, so the router is kept in float32; each site of the attention residuals
    # becomes one float32 vector, the product of its norm and its projection.
    if stored is Stored.F32 or name == "gate.weight" or name.endswith("_res_norm.weight"):
        return Held.FLOAT32
    return Held.FOLDED if name.endswith("_res_proj.weight") else Held.COMPUTE


def _kda(a: Architecture, prefix: str) -> list[Tensor]:
    width = a.kda_heads * a.kda_head
    rows: list[_Row] = []
    for name in "qkv":
        rows.append((f"{name}_proj.weight", (width, a.hidden), _BF16, _TP))
        rows.append((f"{name}_conv1d.weight", (width, 1, a.conv_kernel), _F32, _TP))
    rows += [
        ("g_proj.weight", (width, a.hidden), _BF16, _TP),
        ("dt_bias", (width,), _F32, _TP),
        ("f_a_proj.weight", (a.kda_head, a.hidden), _BF16, _ALL),
        ("f_b_proj.weight", (width, a.kda_head), _BF16, _TP),
        ("b_proj.weight", (a.kda_heads, a.hidden), _BF16, _TP),
        ("o_norm.weight", (a.kda_head,), _F32, _ALL),
        ("o_proj.weight", (a.hidden, width), _BF16, _TP),
    ]
    return [*_build(prefix, Part.KDA, rows), _a_log(a, prefix)]


def _a_log(a: Architecture, prefix: str) -> Tensor:
    """One number a head, padded with zeros to a multiple of 128."""
    length = ceil_div(a.kda_heads, A_LOG_MULTIPLE) * A_LOG_MULTIPLE
    padding = length - a.kda_heads
    return Tensor(prefix + "A_log", (length,), _F32, Part.KDA, _TP, Held.FLOAT32, padding=padding)


def _mla(a: Architecture, prefix: str) -> list[Tensor]:
    out = a.num_heads * a.v_head
    return _build(
        prefix,
        Part.MLA,
        [
            ("q_a_proj.weight", (a.q_lora, a.hidden), _BF16, _ALL),
            ("q_a_layernorm.weight", (a.q_lora,), _BF16, _ALL),
            ("q_b_proj.weight", (a.num_heads * (a.qk_nope + a.qk_rope), a.q_lora), _BF16, _TP),
            ("kv_a_proj_with_mqa.weight", (a.kv_lora + a.qk_rope, a.hidden), _BF16, _ALL),
            ("kv_a_layernorm.weight", (a.kv_lora,), _BF16, _ALL),
            ("kv_b_proj.weight", (a.num_heads * (a.qk_nope + a.v_head), a.kv_lora), _BF16, _TP),
            ("g_proj.weight", (out, a.hidden), _BF16, _TP),
            ("o_proj.weight", (a.hidden, out), _BF16, _TP),
        ],
    )


def _residual(a: Architecture, prefix: str) -> list[Tensor]:
    norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    rows: list[_Row] = [(f"{name}.weight", (a.hidden,), _BF16, _ALL) for name in norms]
    rows += [(f"{name}.weight", (1, a.hidden), _BF16, _ALL) for name in ("self_attention_res_proj", "mlp_res_proj")]
    return _build(prefix, Part.NORMS, rows)


def _gated_mlp(prefix: str, part: Part, width: int, hidden: int) -> list[Tensor]:
    rows: list[_Row] = [(f"{name}_proj.weight", (width, hidden), _BF16, _TP) for name in ("gate", "up")]
    return _build(prefix, part, [*rows, ("down_proj.weight", (hidden, width), _BF16, _TP)])


def _dense(a: Architecture, prefix: str) -> list[Tensor]:
    return _gated_mlp(prefix, Part.DENSE, a.dense_width, a.hidden)


def _moe(a: Architecture, prefix: str) -> list[Tensor]:
    router: list[_Row] = [
        ("gate.weight", (a.num_experts, a.hidden), _BF16, _ALL),
        ("gate.e_score_correction_bias", (a.num_experts,), _F32, _ALL),
    ]
    latent: list[_Row] = [
        ("routed_expert_down_proj.weight", (a.latent, a.hidden), _BF16, _ALL),
        ("routed_expert_up_proj.weight", (a.hidden, a.latent), _BF16, _ALL),
        ("routed_expert_norm.weight", (a.latent,), _BF16, _ALL),
    ]
    return [
        *_build(prefix, Part.ROUTER, router),
        *_build(prefix, Part.LATENT, latent),
        *_gated_mlp(prefix + "shared_experts.", Part.SHARED_EXPERTS, a.shared_width, a.hidden),
        *_experts(a, prefix),
    ]


def _experts(a: Architecture, prefix: str) -> Iterator[Tensor]:
    matrices = {"w1": (a.expert_width, a.latent), "w2": (a.latent, a.expert_width), "w3": (a.expert_width, a.latent)}
    for name, (rows, columns) in matrices.items():
        for suffix, stored_columns in (("packed", columns // 2), ("scale", columns // a.quant_group)):
            yield Tensor(
                f"{prefix}experts.{EXPERT}.{name}.weight_{suffix}",
                (rows, stored_columns),
                Stored.U8,
                Part.ROUTED_EXPERTS,
                Placement.EXPERT_PARALLEL,
                Held.PACKED,
                a.num_experts,
            )


def _top(a: Architecture) -> list[Tensor]:
    last: list[_Row] = [
        ("norm.weight", (a.hidden,), _BF16, _ALL),
        ("output_attn_res_norm.weight", (a.hidden,), _BF16, _ALL),
        ("output_attn_res_proj.weight", (1, a.hidden), _BF16, _ALL),
    ]
    return [
        *_build(PREFIX, Part.EMBEDDING, [("embed_tokens.weight", (a.vocab, a.hidden), _BF16, _TP)]),
        *_build("language_model.", Part.HEAD, [("lm_head.weight", (a.vocab, a.hidden), _BF16, _TP)]),
        *_build(PREFIX, Part.NORMS, last),
    ]


def _vision(v: Vision) -> list[Tensor]:
    rows: list[_Row] = [
        ("patch_embed.proj.weight", (v.hidden, 3, v.patch, v.patch), _BF16, _SKIP),
        ("patch_embed.pos_emb.weight", (*v.positions, v.hidden), _BF16, _SKIP),
    ]
    for layer in range(v.num_layers):
        block = f"encoder.blocks.{layer}."
        rows += [
            (block + "norm0.weight", (v.hidden,), _BF16, _SKIP),
            (block + "norm1.weight", (v.hidden,), _BF16, _SKIP),
            (block + "wqkv.weight", (3 * v.qkv, v.hidden), _BF16, _SKIP),
            (block + "wo.weight", (v.hidden, v.qkv), _BF16, _SKIP),
            (block + "mlp.fc0.weight", (v.intermediate, v.hidden), _BF16, _SKIP),
            (block + "mlp.fc1.weight", (v.hidden, v.intermediate), _BF16, _SKIP),
        ]
    rows.append(("encoder.final_layernorm.weight", (v.hidden,), _BF16, _SKIP))
    return _build("vision_tower.", Part.VISION, rows)


def _projector(v: Vision, hidden: int) -> list[Tensor]:
    merged = v.hidden * math.prod(v.merge)
    rows: list[_Row] = [
        ("proj.0.weight", (merged, merged), _BF16, _SKIP),
        ("proj.2.weight", (hidden, merged), _BF16, _SKIP),
        ("post_norm.weight", (hidden,), _BF16, _SKIP),
    ]
    return _build("mm_projector.", Part.PROJECTOR, rows)
