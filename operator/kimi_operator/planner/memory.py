"""Bytes on one GPU: weights by how ranks share them, pages, slots, and what is spoken for. Exact integers."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from msgspec import Struct
from pydantic.alias_generators import to_camel

from kimi_operator.api.profile import Device, DType, HardwareProfileSpec, RuntimeSpec
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.tensors import Part, Placement, tensor_table
from kimi_operator.planner.units import bytes_text, counted

ITEMSIZE = {DType.FLOAT32: 4, DType.BFLOAT16: 2}
STATE_ITEMSIZE = 4
"""The KDA state is float32 everywhere."""


class ExpertFormat(StrEnum):
    """How a rank holds routed experts."""

    MXFP4 = "MXFP4"
    """As in the checkpoint."""
    INT4 = "int4"
    """Requantised, as the published runs did; the bundled worker does not."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def expert_bytes(self, a: Architecture) -> int:
        """Bytes of one routed expert of one layer."""
        bits, scale_bits = _EXPERT_BITS[self]
        return (a.expert_weights * bits + a.expert_weights // a.quant_group * scale_bits) // 8

    def bits_per_weight(self, a: Architecture) -> float:
        """Bits that one weight takes, its share of the scale included."""
        bits, scale_bits = _EXPERT_BITS[self]
        return bits + scale_bits / a.quant_group


_EXPERT_BITS = {
    ExpertFormat.MXFP4: (4, 8),
    ExpertFormat.INT4: (4, 16),
    ExpertFormat.FLOAT32: (32, 0),
    ExpertFormat.BFLOAT16: (16, 0),
}
"""Bits a weight, and bits of the scale that a group of weights shares."""


def expert_format(runtime: RuntimeSpec) -> ExpertFormat:
    """How the bundled worker holds routed experts."""
    # A CPU takes longer to decode a weight than to multiply with it: there the worker decodes them once, at load.
    return ExpertFormat.MXFP4 if runtime.device is Device.CUDA else ExpertFormat(runtime.dtype.value)


class MemoryLine(Struct, frozen=True):
    """One line of a GPU's memory."""

    label: str
    bytes: int
    how: str
    """Arithmetic or source, in words."""
    is_weights: bool = False
    stays_free: bool = False
    """Nothing of the bundled worker lies there while it runs."""
    field: str = ""
    """Of the profile, which states it; empty for weights and for what is left to pools."""
    is_margin: bool = False
    """Left free on purpose, not for what the worker lacks."""

    @property
    def is_pool(self) -> bool:
        """Whether it is of what weights and reserves leave: slots, pages and the rest."""
        return not self.is_weights and not self.field


class GroupShape(Struct, frozen=True):
    """How many ranks share what."""

    nodes: int
    gpus_per_node: int
    tensor_parallel: int

    @property
    def ranks(self) -> int:
        """Ranks of a group; experts are split over all of them."""
        return self.nodes * self.gpus_per_node

    @property
    def lanes(self) -> int:
        """Lanes of a group."""
        return self.ranks // self.tensor_parallel

    @property
    def in_nodes(self) -> str:
        """As tables and remedies name it: 2 nodes (TP2 DP8 EP16)."""
        return f"{counted(self.nodes, 'node')} (TP{self.tensor_parallel} DP{self.lanes} EP{self.ranks})"

    def __str__(self) -> str:
        return f"{self.nodes} x {counted(self.gpus_per_node, 'GPU')} with tensorParallel {self.tensor_parallel}"


def weight_lines(a: Architecture, shape: GroupShape, experts: ExpertFormat, dtype: DType) -> tuple[MemoryLine, ...]:
    """Weights of one rank: its routed experts, its part of what a lane shares, and what every rank holds whole."""
    per_rank = a.num_experts // shape.ranks
    one = experts.expert_bytes(a)
    split = _resident_parts(a, Placement.TENSOR_PARALLEL, ITEMSIZE[dtype])
    whole = _resident_parts(a, Placement.REPLICATED, ITEMSIZE[dtype])
    return (
        MemoryLine(
            "routed experts",
            per_rank * a.num_moe_layers * one,
            f"{per_rank} of {a.num_experts} experts x {a.num_moe_layers} layers x {one:,} B "
            f"({experts}, {experts.bits_per_weight(a):g} bits a weight)",
            is_weights=True,
        ),
        MemoryLine(
            "weights split over a lane",
            sum(split.values()) // shape.tensor_parallel,
            f"{sum(split.values()):,} B / tensorParallel {shape.tensor_parallel}: {_sum_text(split)} ({dtype})",
            is_weights=True,
        ),
        MemoryLine(
            "weights whole on each rank",
            sum(whole.values()),
            # whole bytes: no other sum of the line gives them
            f"{' + '.join(f'{part} {amount:,} B' for part, amount in whole.items())} ({dtype}, routers float32)",
            is_weights=True,
        ),
    )


@cache
def _resident_parts(a: Architecture, placement: Placement, itemsize: int) -> dict[Part, int]:
    parts: dict[Part, int] = {}
    for tensor in tensor_table(a):
        if tensor.placement is placement:
            parts[tensor.part] = parts.get(tensor.part, 0) + tensor.resident_bytes(itemsize)
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _sum_text(parts: dict[Part, int]) -> str:
    return " + ".join(f"{part} {bytes_text(amount)}" for part, amount in parts.items())


class _Reserve(Struct, frozen=True):
    """One field of the profile's reserve, as a line."""

    field: str
    label: str
    when_zero: str
    unused: str = ""
    """What the bundled worker does not do yet, though memory is kept for it."""
    is_margin: bool = False

    def line(self, profile: HardwareProfileSpec) -> MemoryLine:
        amount: int = getattr(profile.reserve, self.field)
        path = f"reserve.{to_camel(self.field)}"
        if path in profile.sources or "reserve" in profile.sources:
            how = profile.source(path)
        else:
            how = "the profile gives no source: take it as not measured" if amount else self.when_zero
        stays_free = self.is_margin or bool(self.unused)
        text = f"{how}; {self.unused}" if amount and self.unused else how
        return MemoryLine(self.label, amount, text, stays_free=stays_free, field=path, is_margin=self.is_margin)


_RESERVES = (
    _Reserve("contexts", "contexts", "contexts, libraries and communicators are not counted"),
    _Reserve(
        "symmetric_heap",
        "symmetric heap",
        "no heap of the expert exchange (MoRI) is reserved",
        unused="kept free: the bundled worker exchanges over torch.distributed, without this heap",
    ),
    _Reserve("activations", "activations", "the largest step is not counted"),
    _Reserve(
        "graphs", "captured graphs", "no graphs are captured", unused="kept free: the bundled worker captures none"
    ),
    _Reserve("staging", "handoff staging", "none: a handoff writes from pages and slots straight into pages and slots"),
    _Reserve("margin", "reserve", "nothing is left free on purpose", is_margin=True),
)


def reserve_lines(profile: HardwareProfileSpec) -> tuple[MemoryLine, ...]:
    """What weights and pools cannot have, as the profile states it, with its source; nothing is left out."""
    return tuple(reserve.line(profile) for reserve in _RESERVES)


def row_bytes(a: Architecture, itemsize: int) -> int:
    """Bytes that one token caches over all MLA layers; whole on each rank of a lane."""
    return layer_row_bytes(a, itemsize) * a.num_mla_layers


def layer_row_bytes(a: Architecture, itemsize: int) -> int:
    """Bytes that one token caches in one MLA layer."""
    return (a.kv_lora + a.qk_rope) * itemsize


def page_bytes(a: Architecture, page_size_tokens: int, kv_dtype: DType) -> int:
    """Bytes of one page: `[mla_layers, page_size, kv_lora + rope]`."""
    return page_size_tokens * row_bytes(a, ITEMSIZE[kv_dtype])


def slot_bytes(a: Architecture, tensor_parallel: int, dtype: DType) -> int:
    """Bytes of one state slot on one rank: `[kda_layers, heads/TP, K, V]` float32 and the convolutions' last inputs."""
    return a.num_kda_layers * layer_state_bytes(a, tensor_parallel, ITEMSIZE[dtype])


def layer_state_bytes(a: Architecture, tensor_parallel: int, conv_itemsize: int) -> int:
    """Bytes that one KDA layer keeps a request on one rank: the state, and the last inputs of q, k and v."""
    heads = a.kda_heads // tensor_parallel
    state = heads * a.kda_head * a.kda_head * STATE_ITEMSIZE
    return state + 3 * (a.conv_kernel - 1) * heads * a.kda_head * conv_itemsize
