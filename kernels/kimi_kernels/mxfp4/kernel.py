"""MXFP4 decoding as a Triton kernel for gfx942; same bits as the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.mxfp4.reference import GROUP_SIZE, check_shapes

BLOCK_GROUPS = 64
"""Groups a program decodes: 1 KiB of codes in, 4 KiB of bf16 out."""


@triton.jit
def dequantise_kernel(packed_ptr, scale_ptr, out_ptr, num_groups, BLOCK_GROUPS: tl.constexpr):
    """Decode BLOCK_GROUPS groups: 16 bytes of codes and one scale each, to 32 values in memory order."""
    i_block = tl.program_id(0).to(tl.int64)
    o_group = i_block * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    inside = o_group < num_groups
    o_packed = o_group[:, None] * 16 + tl.arange(0, 16)[None, :]
    b_packed = tl.load(packed_ptr + o_packed, mask=inside[:, None], other=0).to(tl.int32)
    b_scale = tl.load(scale_ptr + o_group, mask=inside, other=0).to(tl.int32)
    # Low nibble first: the last axis of the join is the order in memory.
    b_code = tl.reshape(tl.join(b_packed & 0xF, b_packed >> 4), (BLOCK_GROUPS, 32))
    b_exponent = (b_code >> 1) & 3
    b_mantissa = b_code & 1
    # fp32 bits of 1.m * 2^(e - 1); with e = 0 there is no leading one, and m alone is a half.
    b_normal = ((b_exponent + 126) << 23) | (b_mantissa << 22)
    b_value = tl.where(b_exponent == 0, b_mantissa * 0.5, b_normal.to(tl.float32, bitcast=True))
    b_value = tl.where((b_code & 8) != 0, -b_value, b_value)
    # 2^(s - 127) is the number whose exponent field is s; s = 0 is the subnormal 2^-127.
    b_factor = tl.where(b_scale == 0, 1 << 22, b_scale << 23).to(tl.float32, bitcast=True)
    b_out = (b_value * b_factor[:, None]).to(out_ptr.dtype.element_ty)
    o_out = o_group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + o_out, b_out, mask=inside[:, None])


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode a weight on the device where it lies; arguments, result and errors as reference.dequantise.

    packed and scale must be contiguous; dtype is bfloat16 or float32.
    """
    check_shapes(packed, scale)
    if not (packed.is_contiguous() and scale.is_contiguous()):
        raise ValueError("MXFP4 decoding needs contiguous packed and scale tensors; call .contiguous() on both")
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    num_groups = out.numel() // GROUP_SIZE
    if num_groups:
        grid = (triton.cdiv(num_groups, BLOCK_GROUPS),)
        dequantise_kernel[grid](packed, scale, out, num_groups, BLOCK_GROUPS=BLOCK_GROUPS)
    return out
