"""Attention residuals in plain torch."""

import torch
from torch import Tensor


def site_weight(norm: Tensor, proj: Tensor) -> Tensor:
    """Fold a site's two weights into one score vector; do this once a site.

    norm     [D]          `*_res_norm.weight`, any float dtype
    proj     [1, D] | [D] `*_res_proj.weight`, any float dtype
    returns  [D]          fp32 (fp64 stays fp64)
    """
    dtype = torch.promote_types(norm.dtype, torch.float32)
    return norm.to(dtype) * proj.reshape(-1).to(dtype)


def mix(prefix: Tensor, bank: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Mix the bank's rows and the prefix by softmax of their scores.

    prefix   [..., D]      running sum since the last block boundary
    bank     [B, ..., D]   snapshots, oldest first, B >= 1; prefix's dtype
    weight   [D]           from site_weight
    returns  [..., D]      prefix's dtype; scores, softmax and sum are fp32

    The rows are normalised for the scores only; there is no 1/sqrt(D) scale. Local to a token: no row sees another.
    """
    rows = torch.cat([bank, prefix.unsqueeze(0)]).to(weight.dtype)
    scale = torch.rsqrt(rows.square().mean(-1) + eps)
    scores = (rows @ weight) * scale
    share = torch.softmax(scores, dim=0)
    return (share.unsqueeze(-1) * rows).sum(0).to(prefix.dtype)
