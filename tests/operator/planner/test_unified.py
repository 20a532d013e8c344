"""vLLM's unified blocks, and what the same memory holds in both designs, against counting by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi_operator.cli.manifests import read_and_plan
from kimi_operator.planner import Plan
from kimi_operator.planner.designs import Designs, compare_designs
from kimi_operator.planner.unified import BlockLayout, UnifiedPool, block_layout
from kimi_operator.profiles import architecture
from msgspec.structs import replace

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
K3 = architecture("kimi-k3")
FP8, BF16 = 1, 2


@pytest.mark.parametrize(
    ("tensor_parallel", "row_itemsize", "block_tokens"),
    [(1, FP8, 11_392), (2, FP8, 5_760), (4, FP8, 2_944), (8, FP8, 1_536), (8, BF16, 768)],
)
def test_block_size_follows_from_the_state_of_a_layer(
    tensor_parallel: int, row_itemsize: int, block_tokens: int
) -> None:
    """5,760 is what published pools show, 768 what a running vLLM printed; the others are the same arithmetic."""
    layout = block_layout(K3, tensor_parallel, row_itemsize)
    assert (layout.block_tokens, layout.row_groups, layout.state_groups) == (block_tokens, 1, 3)
    assert layout.block_bytes == block_tokens * 576 * row_itemsize * 24


def test_layers_of_nearly_equal_number_share_one_group_size() -> None:
    """13 and 12 layers are padded to 13 each, not cut into groups of 12."""
    near = replace(K3, num_layers=25, mla_layers=frozenset(range(13)))
    assert (block_layout(near, 2, FP8).row_groups, block_layout(near, 2, FP8).state_groups) == (1, 1)
    far = replace(K3, num_layers=25, mla_layers=frozenset(range(20)))
    assert (block_layout(far, 2, FP8).row_groups, block_layout(far, 2, FP8).state_groups) == (4, 1)


@given(
    layout=st.builds(
        BlockLayout,
        block_tokens=st.integers(1, 50),
        block_bytes=st.integers(1, 9),
        row_groups=st.integers(1, 3),
        state_groups=st.integers(1, 3),
    ),
    pool_bytes=st.integers(0, 400),
    tokens=st.integers(1, 300),
)
def test_pool_holds_what_counting_says(layout: BlockLayout, pool_bytes: int, tokens: int) -> None:
    pool = UnifiedPool(layout, pool_bytes)
    blocks = list(itertools.takewhile(lambda n: n * layout.block_bytes <= pool_bytes, itertools.count()))[-1]
    assert pool.num_blocks == blocks
    row_blocks = next(n for n in itertools.count() if n * layout.block_tokens >= tokens)
    assert layout.blocks_of(tokens) == layout.row_groups * row_blocks + layout.state_groups
    assert pool.num_requests(tokens) * layout.blocks_of(tokens) <= blocks
    assert (pool.num_requests(tokens) + 1) * layout.blocks_of(tokens) > blocks
    longest = layout.longest(blocks)
    assert longest == 0 or layout.blocks_of(longest) <= blocks
    assert layout.blocks_of(longest + 1) > blocks


def designs_of(example: str) -> tuple[Plan, Designs]:
    plan = read_and_plan([EXAMPLES / example]).plan
    assert isinstance(plan, Plan)
    return plan, compare_designs(architecture(plan.architecture), plan, plan.decode)


@pytest.mark.parametrize("example", ["mi300x-2p2d.yaml", "mi325x-2p2d.yaml", "local/2p2d.yaml"])
def test_both_designs_hold_what_fits_and_not_one_more(example: str) -> None:
    """Counted by hand, at one length, for rows of one type, without slots for handoffs in either."""
    plan, designs = designs_of(example)
    role = plan.decode
    assert designs.rows[-1].context_tokens == role.max_model_len
    for row in designs.rows:
        pages = -(-row.context_tokens // role.page_size_tokens)
        assert row.apart_request_bytes == pages * role.page_bytes + role.slot_bytes
        whole_blocks = designs.pool_bytes // designs.layout.block_bytes * designs.layout.block_bytes
        for requests, request_bytes, pool_bytes in (
            (row.apart, row.apart_request_bytes, designs.pool_bytes),
            (row.unified, row.unified_request_bytes, whole_blocks),
        ):
            assert requests * request_bytes <= pool_bytes < (requests + 1) * request_bytes
    assert designs.longest_apart == (designs.pool_bytes - role.slot_bytes) // role.page_bytes * role.page_size_tokens


def test_fp8_rows_are_counted_in_both_designs() -> None:
    """As the published runs had them, in unified blocks."""
    plan, designs = designs_of("mi300x-2p2d.yaml")
    fp8 = UnifiedPool(block_layout(K3, 2, FP8), designs.pool_bytes)
    assert fp8.layout.block_bytes == 79_626_240
    assert [row.unified_fp8 for row in designs.rows] == [fp8.num_requests(row.context_tokens) for row in designs.rows]
    assert designs.longest_unified_fp8 == fp8.layout.longest(fp8.num_blocks) > 1.8 * designs.longest_unified
    page, slot = plan.decode.page_bytes // 2, plan.decode.slot_bytes
    for row in designs.rows:
        request = -(-row.context_tokens // plan.decode.page_size_tokens) * page + slot
        assert row.apart_fp8 == designs.pool_bytes // request
    assert designs.longest_apart_fp8 > 1.8 * designs.longest_apart


def test_a_short_request_costs_whole_blocks_where_pages_are_small() -> None:
    _, designs = designs_of("mi300x-2p2d.yaml")
    short = designs.rows[0]
    assert (short.context_tokens, short.apart_request_bytes) == (1024, 16 * 64 * 27_648 + 224_686_080)
    assert short.unified_request_bytes == (1 + 3) * 2_944 * 27_648
    assert short.apart > short.unified
