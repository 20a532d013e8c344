"""RMS norm: fp32 statistics, cast back to the input's dtype, then the weight."""

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis of x and scale it.

    x        [..., D]  any float dtype
    weight   [D]       any float dtype
    returns  [..., D]  x's dtype

    The cast to x's dtype comes before the multiplication by the weight; in bf16 the other order gives other bits.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)
