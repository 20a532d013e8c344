"""What the same memory holds in two designs: pages and slots apart (this worker), or blocks of one size (vLLM)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.budget import BlockPool, PagePool, PoolDesign
from kimi_operator.planner.memory import ITEMSIZE
from kimi_operator.planner.plan import Plan, RolePlan
from kimi_operator.planner.unified import BlockLayout, block_layout

FP8_ITEMSIZE = 1
SHORTEST_CONTEXT, NEXT_CONTEXT = 1024, 4


@dataclass(frozen=True, slots=True)
class DesignRow:
    """Requests of one context on one lane."""

    context_tokens: int
    planned: int
    """What the plan runs at once: its slots and pages are cut before the context is known."""
    apart: int
    """What pages and slots could run if they were cut for this context; slots for handoffs are kept."""
    apart_request_bytes: int
    unified: int
    """What unified blocks could run, without a bound on running requests."""
    unified_request_bytes: int
    unified_fp8: int
    """The same with rows of one byte a number, as the published runs had; the bundled worker has none such."""


@dataclass(frozen=True, slots=True)
class Designs:
    """One role's pool in both designs; cached rows are of the plan's type unless said otherwise."""

    pool_bytes: int
    """Of a GPU."""
    layout: BlockLayout
    num_blocks: int
    longest_apart: int
    """Tokens of the longest request, alone."""
    longest_unified: int
    longest_unified_fp8: int
    rows: tuple[DesignRow, ...]


def compare_designs(a: Architecture, plan: Plan, role: RolePlan) -> Designs:
    """The pool of a planned role, beside unified blocks in the same bytes."""
    pool_bytes = role.num_pages * role.page_bytes + role.num_state_slots * role.slot_bytes
    tensor_parallel, conv_itemsize = role.ranks // role.lanes, ITEMSIZE[plan.dtype]
    layout = block_layout(a, tensor_parallel, ITEMSIZE[plan.kv_cache_dtype], conv_itemsize)
    apart, unified = PagePool(role.page_size_tokens, role.page_bytes, role.slot_bytes), BlockPool(layout)
    fp8 = BlockPool(block_layout(a, tensor_parallel, FP8_ITEMSIZE, conv_itemsize))

    def row(context: int) -> DesignRow:
        pages = apart.units(context)
        return DesignRow(
            context_tokens=context,
            planned=min(role.max_num_seqs, role.num_pages // pages),
            apart=_most(apart, pool_bytes, context),
            apart_request_bytes=pages * role.page_bytes + role.slot_bytes,
            unified=_most(unified, pool_bytes, context),
            unified_request_bytes=layout.request_bytes(context),
            unified_fp8=_most(fp8, pool_bytes, context),
        )

    return Designs(
        pool_bytes=pool_bytes,
        layout=layout,
        num_blocks=pool_bytes // layout.block_bytes,
        longest_apart=_longest(apart, pool_bytes),
        longest_unified=_longest(unified, pool_bytes),
        longest_unified_fp8=_longest(fp8, pool_bytes),
        rows=tuple(row(context) for context in _contexts(role.max_model_len)),
    )


def _contexts(longest: int) -> Iterator[int]:
    context = SHORTEST_CONTEXT
    while context < longest:
        yield context
        context *= NEXT_CONTEXT
    yield longest


def _most(design: PoolDesign, pool_bytes: int, context: int) -> int:
    """Requests of one context that fit at once, when the pool is cut for them."""
    request_bytes = design.units(context) * design.unit_bytes

    def taken(seqs: int) -> int:
        return design.fixed_bytes(seqs) + seqs * request_bytes

    return bisect_right(range(1, pool_bytes // request_bytes + 1), pool_bytes, key=taken)


def _longest(design: PoolDesign, pool_bytes: int) -> int:
    return design.longest((pool_bytes - design.fixed_bytes(1)) // design.unit_bytes)
