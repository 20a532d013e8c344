"""The causal depthwise convolution in front of KDA, with the last three inputs carried."""

import torch
from torch import Tensor

CONV_TAPS = 4
"""Tokens seen by the convolution; its state holds the CONV_TAPS - 1 inputs before the next token."""


def conv_chunk(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve T tokens of a sequence and apply SiLU.

    x        [..., T, D]    projected q, k or v before the convolution
    weight   [D, 1, 4]      fp32, tap 3 is the current token; no bias
    state    [..., 3, D]    inputs of the three tokens before, oldest first; zeros for a new sequence
    returns  y [..., T, D] x's dtype, computed in fp32, and the new state [..., 3, D] in state's dtype

    On a CPU the bits of a token's y depend neither on T nor on where a chunk is cut.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    num_tokens = x.shape[-2]
    window = torch.cat([state.to(dtype), x.to(dtype)], dim=-2)
    taps = weight[:, 0].to(dtype)
    y = sum(window[..., j : j + num_tokens, :] * taps[:, j] for j in range(CONV_TAPS))
    return _silu(y).to(x.dtype), window[..., num_tokens:, :].to(state.dtype)


def conv_step(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve one token of each of R requests.

    x        [R, D]
    weight   [D, 1, 4]  fp32
    state    [R, 3, D]  oldest first
    returns  y [R, D] in x's dtype and the new state [R, 3, D] in state's dtype
    """
    y, new_state = conv_chunk(x.unsqueeze(-2), weight, state)
    return y.squeeze(-2), new_state


def _silu(y: Tensor) -> Tensor:
    """Torch's own SiLU rounds the last elements of a tensor in another way than the rest on a CPU; its exp does not."""
    # Past 80 the result is below 1e-33; without the bound the gradient there would be 0 * inf.
    return y / (1 + torch.exp((-y).clamp_max(80.0)))
