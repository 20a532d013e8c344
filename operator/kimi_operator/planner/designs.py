"""What the same memory holds in two designs: pages and slots apart (this worker), or blocks of one size (vLLM).

Like for like: the same bytes, rows of the same type, requests of the same length, and none kept for handoffs.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.memory import ITEMSIZE
from kimi_operator.planner.plan import Plan, RolePlan
from kimi_operator.planner.unified import BlockLayout, UnifiedPool, block_layout
from kimi_operator.planner.units import ceil_div

FP8_ITEMSIZE = 1
SHORTEST_CONTEXT, NEXT_CONTEXT = 1024, 4


class DesignRow(Struct, frozen=True):
    """Requests of one length on one lane at once, each design cut for them."""

    context_tokens: int
    apart: int
    apart_request_bytes: int
    unified: int
    unified_request_bytes: int
    apart_fp8: int
    """With rows of one byte a number, as the published runs had; the bundled worker has none such."""
    unified_fp8: int


class Designs(Struct, frozen=True):
    """One role's pool in both designs; cached rows are of the plan's type unless said otherwise."""

    pool_bytes: int
    """Of a GPU."""
    layout: BlockLayout
    num_blocks: int
    longest_apart: int
    """Tokens of the longest request, alone."""
    longest_unified: int
    longest_apart_fp8: int
    longest_unified_fp8: int
    rows: tuple[DesignRow, ...]


class _Apart(Struct, frozen=True):
    """Pages and a slot a request, with no slots for handoffs."""

    page_size_tokens: int
    page_bytes: int
    slot_bytes: int
    pool_bytes: int

    def request_bytes(self, tokens: int) -> int:
        return ceil_div(tokens, self.page_size_tokens) * self.page_bytes + self.slot_bytes

    def num_requests(self, tokens: int) -> int:
        return self.pool_bytes // self.request_bytes(tokens)

    @property
    def longest(self) -> int:
        return max(0, self.pool_bytes - self.slot_bytes) // self.page_bytes * self.page_size_tokens


def compare_designs(a: Architecture, plan: Plan, role: RolePlan) -> Designs:
    """The pool of a planned role, beside unified blocks in the same bytes."""
    pool_bytes = role.num_pages * role.page_bytes + role.num_state_slots * role.slot_bytes
    tensor_parallel, conv_itemsize = role.ranks // role.lanes, ITEMSIZE[plan.dtype]

    def designs(itemsize: int) -> tuple[_Apart, UnifiedPool]:
        page_bytes = role.page_bytes * itemsize // ITEMSIZE[plan.kv_cache_dtype]
        layout = block_layout(a, tensor_parallel, itemsize, conv_itemsize)
        return (
            _Apart(role.page_size_tokens, page_bytes, role.slot_bytes, pool_bytes),
            UnifiedPool(layout, pool_bytes),
        )

    (apart, unified), (apart_fp8, unified_fp8) = designs(ITEMSIZE[plan.kv_cache_dtype]), designs(FP8_ITEMSIZE)
    return Designs(
        pool_bytes=pool_bytes,
        layout=unified.layout,
        num_blocks=unified.num_blocks,
        longest_apart=apart.longest,
        longest_unified=unified.layout.longest(unified.num_blocks),
        longest_apart_fp8=apart_fp8.longest,
        longest_unified_fp8=unified_fp8.layout.longest(unified_fp8.num_blocks),
        rows=tuple(
            DesignRow(
                context_tokens=context,
                apart=apart.num_requests(context),
                apart_request_bytes=apart.request_bytes(context),
                unified=unified.num_requests(context),
                unified_request_bytes=unified.layout.request_bytes(context),
                apart_fp8=apart_fp8.num_requests(context),
                unified_fp8=unified_fp8.num_requests(context),
            )
            for context in _contexts(role.max_model_len)
        ),
    )


def _contexts(longest: int) -> Iterator[int]:
    context = SHORTEST_CONTEXT
    while context < longest:
        yield context
        context *= NEXT_CONTEXT
    yield longest
