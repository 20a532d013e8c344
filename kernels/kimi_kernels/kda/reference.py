"""KDA token by token, in plain torch, and the small maps around it."""

import torch
from torch import Tensor

L2_EPS = 1e-6


def l2norm(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis, in fp32 (fp64 stays fp64): [..., H, K] to [..., H, K]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


def gate(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float = -5.0) -> Tensor:
    """Log decay of each key channel: lower_bound * sigmoid(exp(a_log) * (z + dt_bias)).

    z        [..., H, K]  f_b(f_a(x)), any float dtype
    a_log    [>= H]       fp32, one a head; the entries past H are padding of the released files and are dropped
    dt_bias  [H * K]      fp32
    returns  [..., H, K]  fp32 in (lower_bound, 0)
    """
    num_heads, key_dim = z.shape[-2:]
    wide = z.to(torch.promote_types(z.dtype, torch.float32)) + dt_bias.view(num_heads, key_dim)
    return lower_bound * torch.sigmoid(a_log[:num_heads].exp().unsqueeze(-1) * wide)


def gated_norm(o: Tensor, output_gate: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Per-head rms of the attention output times the sigmoid of the output gate, all in fp32.

    o            [..., H, V]  fp32, from step or chunk
    output_gate  [..., H, V]  g_proj(x), activation dtype
    weight       [V]          `o_norm.weight`, fp32
    returns      [..., H, V]  output_gate's dtype
    """
    wide = o.to(torch.promote_types(o.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return (normed * torch.sigmoid(output_gate.to(wide.dtype))).to(output_gate.dtype)


def step(  # noqa: PLR0913, PLR0917 - the recurrence has seven operands
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Advance each of R requests by one token: decay, delta correction, read.

    q, k     [R, H, K]     l2-normalised
    v        [R, H, V]
    g        [R, H, K]     log decay, fp32, in [-5, 0]
    beta     [R, H]        fp32 in (0, 1)
    state    [R, H, K, V]  fp32; not written to
    scale    K ** -0.5
    returns  o [R, H, V] and the new state [R, H, K, V], both in state's dtype

    Any leading axes may stand for R.
    """
    q, k, v, g, beta = (x.to(state.dtype) for x in (q, k, v, g, beta))
    decayed = g.exp().unsqueeze(-1) * state
    error = v - torch.einsum("...kv,...k->...v", decayed, k)
    new_state = decayed + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
    return torch.einsum("...kv,...k->...v", new_state, q) * scale, new_state


def recurrent(  # noqa: PLR0913, PLR0917 - the recurrence has seven operands
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Run T tokens of one sequence one after the other: the slow truth for chunk.

    q, k     [..., T, H, K]   l2-normalised
    v        [..., T, H, V]
    g        [..., T, H, K]   log decay
    beta     [..., T, H]
    state    [..., H, K, V]   fp32; not written to
    returns  o [..., T, H, V] and the new state, both in state's dtype
    """
    outputs = []
    for t in range(q.shape[-3]):
        o, state = step(
            q[..., t, :, :], k[..., t, :, :], v[..., t, :, :], g[..., t, :, :], beta[..., t, :], state, scale
        )
        outputs.append(o)
    return torch.stack(outputs, dim=-3), state
