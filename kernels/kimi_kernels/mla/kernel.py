"""Latent attention of decodes as a Triton kernel for gfx942: the context is split, the parts are merged."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.mla.blocks import SCRATCH_BYTES
from kimi_kernels.mla.table import PageTable

BLOCK_HEADS = 16
"""Heads of a program: the height of an MFMA tile."""
BLOCK_ROWS = 32
"""Cache rows of one round in 2-byte types, half as many in fp32: 32 of the 64 KiB that a compute unit shares."""
NUM_WARPS = 4

# Two programs for each of the 304 compute units of MI300X, and no split below so many rows.
_ENOUGH_PROGRAMS = 608
_LEAST_ROWS = 256


# The table is as wide as the longest request of the moment: one variant must do for all widths, compiled before Ready.
@triton.jit(do_not_specialize=["stride_table"])
def decode_kernel(  # noqa: PLR0913, PLR0917 - Triton has no structures
    q_ptr,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    part_ptr,
    weight_ptr,
    scale,
    num_heads,
    stride_page,
    stride_row,
    stride_table,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Attend BLOCK_H heads of one request to one split of its rows; products in fp32 if IS_WIDE, else in q's dtype.

    part    [R, H, splits, L]  softmax-weighted rows of the split; zeros when the split is empty
    weight  [R, H, splits]     log2 of the split's sum of exponentials; -inf when it is empty
    """
    i_request = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    length = tl.load(lengths_ptr + i_request).to(tl.int32)
    split_rows = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    begin = i_split * split_rows
    end = tl.minimum(begin + split_rows, length)

    o_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_latent, o_rope = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_D)
    is_head, is_latent, is_rope = o_head < num_heads, o_latent < LATENT, o_rope < ROPE
    o_query = (i_request * num_heads + o_head)[:, None] * (LATENT + ROPE)
    b_q = tl.load(q_ptr + o_query + o_latent[None, :], mask=is_head[:, None] & is_latent[None, :], other=0.0)
    b_q_rope = tl.load(q_ptr + o_query + LATENT + o_rope[None, :], mask=is_head[:, None] & is_rope[None, :], other=0.0)

    if IS_WIDE:
        b_q, b_q_rope = b_q.to(tl.float32), b_q_rope.to(tl.float32)

    b_peak = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_H,), tl.float32)
    b_result = tl.zeros((BLOCK_H, BLOCK_L), tl.float32)
    for start in range(begin, end, BLOCK_N):
        o_row = start + tl.arange(0, BLOCK_N)
        is_row = o_row < end
        b_page = tl.load(table_ptr + i_request * stride_table + o_row // PAGE_SIZE, mask=is_row, other=0)
        o_cache = (b_page.to(tl.int64) * stride_page + (o_row % PAGE_SIZE) * stride_row)[:, None]
        b_rows = tl.load(cache_ptr + o_cache + o_latent[None, :], mask=is_row[:, None] & is_latent[None, :], other=0.0)
        b_ropes = tl.load(
            cache_ptr + o_cache + LATENT + o_rope[None, :], mask=is_row[:, None] & is_rope[None, :], other=0.0
        )
        b_rows, b_ropes = b_rows.to(b_q.dtype), b_ropes.to(b_q.dtype)
        b_score = tl.dot(b_q, tl.trans(b_rows), input_precision="ieee")
        b_score += tl.dot(b_q_rope, tl.trans(b_ropes), input_precision="ieee")
        # 1 / ln 2: powers of two are what the hardware computes.
        b_score = tl.where(is_row[None, :], b_score * (scale * 1.4426950408889634), float("-inf"))
        b_new_peak = tl.maximum(b_peak, tl.max(b_score, axis=1))
        b_shrink = tl.exp2(b_peak - b_new_peak)
        b_share = tl.exp2(b_score - b_new_peak[:, None])
        b_sum = b_sum * b_shrink + tl.sum(b_share, axis=1)
        b_result = b_result * b_shrink[:, None] + tl.dot(b_share.to(b_q.dtype), b_rows, input_precision="ieee")
        b_peak = b_new_peak

    # An empty split has met no row: its sum is 0, and its peak, minus infinity, is its weight.
    b_result = b_result / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    b_weight = b_peak + tl.log2(tl.where(b_sum == 0.0, 1.0, b_sum))
    o_part = (i_request * num_heads + o_head) * num_splits + i_split
    tl.store(
        part_ptr + o_part[:, None] * LATENT + o_latent[None, :], b_result, mask=is_head[:, None] & is_latent[None, :]
    )
    tl.store(weight_ptr + o_part, b_weight, mask=is_head)


def num_splits(num_requests: int, num_heads: int, latent_rank: int, longest: int) -> int:
    """Parts to cut every context into: enough programs for the device, parts worth a program, scratch within bounds."""
    wanted = -(-_ENOUGH_PROGRAMS // (num_requests * -(-num_heads // BLOCK_HEADS)))
    fitting = SCRATCH_BYTES // (num_requests * num_heads * (latent_rank + 2) * 4)
    return max(1, min(wanted, fitting, longest // _LEAST_ROWS))


def paged_decode(q_latent: Tensor, cache: Tensor, table: PageTable, scale: float, *, latent_rank: int) -> Tensor:
    """Arguments and result as blocks.paged_decode, in float32 or bfloat16; products are in q's dtype, sums in fp32.

    Raises ValueError when the last axis of the cache is strided.
    """
    num_requests, num_heads, width = q_latent.shape
    if cache.stride(-1) != 1:
        raise ValueError(f"cache has strides {cache.stride()}, expected contiguous rows; make the last stride 1")
    if num_requests == 0:
        return q_latent.new_empty(0, num_heads, latent_rank)
    splits = num_splits(num_requests, num_heads, latent_rank, table.longest)
    part = torch.empty(num_requests, num_heads, splits, latent_rank, dtype=torch.float32, device=q_latent.device)
    weight = torch.empty(part.shape[:-1], dtype=torch.float32, device=q_latent.device)
    page_ids = table.page_ids if table.page_ids.stride(-1) == 1 else table.page_ids.contiguous()
    itemsize = max(q_latent.element_size(), cache.element_size())
    grid = (num_requests, triton.cdiv(num_heads, BLOCK_HEADS), splits)
    decode_kernel[grid](
        q_latent.contiguous(), cache, page_ids, table.lengths, part, weight, scale, num_heads,
        cache.stride(0), cache.stride(1), page_ids.stride(0),
        **block_sizes(latent_rank, width - latent_rank, cache.shape[1], itemsize),
        # On a CPU Triton's interpreter runs, which would multiply the bits of bf16 as integers.
        IS_WIDE=q_latent.device.type == "cpu",
        num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip
    # Weights are logarithms to base 2.
    share = torch.softmax(weight * 0.6931471805599453, dim=-1)
    return torch.einsum("rhs,rhsl->rhl", share, part).to(q_latent.dtype)


def block_sizes(latent_rank: int, rope_dim: int, page_size: int, itemsize: int) -> dict[str, int]:
    """Compile-time arguments of the kernel that follow from sizes; `itemsize` is of the wider of queries and cache.

    Tiles are powers of two, and of at least 16 for the matrix units.
    """
    return {
        "LATENT": latent_rank,
        "ROPE": rope_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_H": BLOCK_HEADS,
        "BLOCK_N": BLOCK_ROWS if itemsize == 2 else BLOCK_ROWS // 2,
        "BLOCK_L": max(16, triton.next_power_of_2(latent_rank)),
        "BLOCK_D": max(16, triton.next_power_of_2(rope_dim)),
    }
