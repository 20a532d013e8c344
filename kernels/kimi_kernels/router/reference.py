"""Sigmoid top-k routing with a correction bias, in plain torch."""

import torch
from torch import Tensor


def route(  # noqa: PLR0913 - the six are the router's whole configuration
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, *, renormalize: bool = True, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts a token.

    x        [..., D]  the normed full-width row, any float dtype
    weight   [E, D]    `gate.weight`
    bias     [E]       `gate.e_score_correction_bias`, fp32; moves the choice, never the weights
    returns  indices [..., top_k] int64 and weights [..., top_k] fp32 that sum to `scaling` when renormalised

    Scores are sigmoids in fp32. The order of the chosen experts has no meaning.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    scores = torch.sigmoid(x.to(dtype) @ weight.to(dtype).T)
    indices = torch.topk(scores.detach() + bias.to(dtype), top_k, dim=-1).indices
    weights = scores.gather(-1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return indices, weights * scaling
