"""Bytes on one GPU: weights by how ranks share them, pages, slots, and what is spoken for. Exact integers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from kimi_operator.api.profile import DType, HardwareProfileSpec
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.tensors import Placement, tensor_table

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


_EXPERT_BITS = {
    ExpertFormat.MXFP4: (4, 8),
    ExpertFormat.INT4: (4, 16),
    ExpertFormat.FLOAT32: (32, 0),
    ExpertFormat.BFLOAT16: (16, 0),
}
"""Bits a weight, and bits of the scale that a group of weights shares."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of a GPU's memory."""

    label: str
    bytes: int
    how: str
    """Arithmetic or source, in words."""
    is_weights: bool = False


@dataclass(frozen=True, slots=True)
class GroupShape:
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

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} GPUs with tensorParallel {self.tensor_parallel}"


def weight_lines(a: Architecture, shape: GroupShape, experts: ExpertFormat, dtype: DType) -> tuple[MemoryLine, ...]:
    """Weights of one rank: its routed experts, its part of what a lane shares, and what every rank holds whole."""
    per_rank = a.num_experts // shape.ranks
    one = experts.expert_bytes(a)
    split = _resident_bytes(a, Placement.TENSOR_PARALLEL, ITEMSIZE[dtype])
    whole = _resident_bytes(a, Placement.REPLICATED, ITEMSIZE[dtype])
    return (
        MemoryLine(
            "routed experts",
            per_rank * a.num_moe_layers * one,
            f"{per_rank} of {a.num_experts} experts x {a.num_moe_layers} layers x {one:,} B ({experts})",
            is_weights=True,
        ),
        MemoryLine(
            "weights split over a lane",
            split // shape.tensor_parallel,
            f"{split:,} B / tensorParallel {shape.tensor_parallel}: attention, shared experts, vocabulary ({dtype})",
            is_weights=True,
        ),
        MemoryLine(
            "weights whole on each rank",
            whole,
            f"low-rank and latent projections, norms ({dtype}), routers (float32)",
            is_weights=True,
        ),
    )


@cache
def _resident_bytes(a: Architecture, placement: Placement, itemsize: int) -> int:
    return sum(tensor.resident_bytes(itemsize) for tensor in tensor_table(a) if tensor.placement is placement)


def reserve_lines(profile: HardwareProfileSpec) -> tuple[MemoryLine, ...]:
    """What weights and pools cannot have, as the profile states it; lines of 0 bytes are left out."""
    reserve = profile.reserve
    amounts = {
        "contexts": reserve.contexts,
        "symmetricHeap": reserve.symmetric_heap,
        "activations": reserve.activations,
        "graphs": reserve.graphs,
        "staging": reserve.staging,
        "margin": reserve.margin,
    }
    labels = {"symmetricHeap": "symmetric heap", "graphs": "captured graphs", "staging": "handoff staging"}
    return tuple(
        MemoryLine(labels.get(name, name), amount, profile.source(f"reserve.{name}"))
        for name, amount in amounts.items()
        if amount
    )


def row_bytes(a: Architecture, itemsize: int) -> int:
    """Bytes that one token caches over all MLA layers; whole on each rank of a lane."""
    return (a.kv_lora + a.qk_rope) * itemsize * a.num_mla_layers


def page_bytes(a: Architecture, page_size_tokens: int, kv_dtype: DType) -> int:
    """Bytes of one page: `[mla_layers, page_size, kv_lora + rope]`."""
    return page_size_tokens * row_bytes(a, ITEMSIZE[kv_dtype])


def slot_bytes(a: Architecture, tensor_parallel: int, dtype: DType) -> int:
    """Bytes of one state slot on one rank: `[kda_layers, heads/TP, K, V]` float32 and the convolutions' last inputs."""
    heads = a.kda_heads // tensor_parallel
    state = heads * a.kda_head * a.kda_head * STATE_ITEMSIZE
    conv = 3 * (a.conv_kernel - 1) * heads * a.kda_head * ITEMSIZE[dtype]
    return a.num_kda_layers * (state + conv)
