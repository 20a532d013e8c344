"""What the same memory holds in two designs: pages and slots apart (this worker), or blocks of one size (vLLM)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.memory import ITEMSIZE
from kimi_operator.planner.plan import Plan, RolePlan
from kimi_operator.planner.pools import num_slots
from kimi_operator.planner.unified import BlockLayout, UnifiedPool, block_layout
from kimi_operator.planner.units import ceil_div

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


@dataclass(frozen=True, slots=True)
class Designs:
    """One role's pool in both designs; cached rows are of the plan's type in both."""

    pool_bytes: int
    """Of a GPU."""
    layout: BlockLayout
    num_blocks: int
    longest_apart: int
    """Tokens of the longest request, alone."""
    longest_unified: int
    rows: tuple[DesignRow, ...]


def compare_designs(a: Architecture, plan: Plan, role: RolePlan) -> Designs:
    """The pool of a planned role, beside unified blocks in the same bytes."""
    pool_bytes = role.num_pages * role.page_bytes + role.num_state_slots * role.slot_bytes
    layout = block_layout(a, role.ranks // role.lanes, ITEMSIZE[plan.kv_cache_dtype], ITEMSIZE[plan.dtype])
    unified = UnifiedPool(layout, pool_bytes)
    return Designs(
        pool_bytes=pool_bytes,
        layout=layout,
        num_blocks=unified.num_blocks,
        longest_apart=(pool_bytes - num_slots(1) * role.slot_bytes) // role.page_bytes * role.page_size_tokens,
        longest_unified=unified.longest_request,
        rows=tuple(_row(role, unified, context) for context in _contexts(role.max_model_len)),
    )


def _contexts(longest: int) -> Iterator[int]:
    context = SHORTEST_CONTEXT
    while context < longest:
        yield context
        context *= NEXT_CONTEXT
    yield longest


def _row(role: RolePlan, unified: UnifiedPool, context: int) -> DesignRow:
    pages = ceil_div(context, role.page_size_tokens)
    request_pages_bytes = pages * role.page_bytes
    most = unified.pool_bytes // (request_pages_bytes + role.slot_bytes)

    def taken(seqs: int) -> int:
        return seqs * request_pages_bytes + num_slots(seqs) * role.slot_bytes

    return DesignRow(
        context_tokens=context,
        planned=min(role.max_num_seqs, role.num_pages // pages),
        apart=bisect_right(range(1, most + 1), unified.pool_bytes, key=taken),
        apart_request_bytes=request_pages_bytes + role.slot_bytes,
        unified=unified.num_requests(context),
        unified_request_bytes=unified.layout.request_bytes(context),
    )
