"""The causal depthwise convolution in front of KDA, with the last three inputs carried."""

import torch
from torch import Tensor
from torch.nn import functional

CONV_TAPS = 4
"""Tokens seen by the convolution; its state holds the CONV_TAPS - 1 inputs before the next token."""


def conv_chunk(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve T tokens of a sequence and apply SiLU.

    x        [..., T, D]    projected q, k or v before the convolution
    weight   [D, 1, 4]      fp32, tap 3 is the current token; no bias
    state    [..., 3, D]    inputs of the three tokens before, oldest first; zeros for a new sequence
    returns  y [..., T, D] x's dtype, computed in fp32, and the new state [..., 3, D] in state's dtype
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    num_tokens = x.shape[-2]
    window = torch.cat([state.to(dtype), x.to(dtype)], dim=-2)
    taps = weight[:, 0].to(dtype)
    y = sum(window[..., j : j + num_tokens, :] * taps[:, j] for j in range(CONV_TAPS))
    return functional.silu(y).to(x.dtype), window[..., num_tokens:, :].to(state.dtype)


def conv_step(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve one token of each of R requests.

    x        [R, D]
    weight   [D, 1, 4]  fp32
    state    [R, 3, D]  oldest first
    returns  y [R, D] in x's dtype and the new state [R, 3, D] in state's dtype
    """
    y, new_state = conv_chunk(x.unsqueeze(-2), weight, state)
    return y.squeeze(-2), new_state
