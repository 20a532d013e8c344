"""KDA over whole chunks: the same sums as the recurrence in another order, so that most work is matrix products."""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_TOKENS = 32
"""Tokens in a chunk. At a decay of -5 a token, half a chunk reaches exp(80), the most that fp32 holds with room."""


def chunk(  # noqa: PLR0913, PLR0917 - the recurrence has seven operands
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Run T tokens of one sequence; equal to recurrent up to rounding, differentiable.

    q, k     [..., T, H, K]   l2-normalised
    v        [..., T, H, V]
    g        [..., T, H, K]   log decay, in [-5, 0]
    beta     [..., T, H]
    state    [..., H, K, V]   fp32 (fp64 is kept); not written to
    scale    K ** -0.5
    returns  o [..., T, H, V] and the new state [..., H, K, V], both in state's dtype

    T may be any number >= 1; leading axes are independent sequences of equal length.
    """
    num_tokens = q.shape[-3]
    q, k, v, g = (_to_chunks(x.to(state.dtype)) for x in (q * scale, k, v, g))
    beta = _to_chunks(beta.to(state.dtype).unsqueeze(-1))
    # Each axis order is [..., chunk, H, token in chunk, channel] from here on.
    total = g.cumsum(-2)
    last = total[..., -1:, :]
    middle = total[..., CHUNK_TOKENS // 2 - 1 : CHUNK_TOKENS // 2, :]
    # exp(total_i - total_j) is split at the middle token: neither factor leaves fp32.
    shrink, grow = (total - middle).exp(), (middle - total).exp()
    k_grown = (k * grow).transpose(-1, -2)
    among_keys = ((k * shrink) @ k_grown).tril(-1)
    among_queries = ((q * shrink) @ k_grown).tril()
    from_start = total.exp()
    # One solve gives both the values' part and the part that the incoming state will correct.
    unit = torch.eye(CHUNK_TOKENS, dtype=state.dtype, device=state.device)
    right = torch.cat([v, k * from_start], dim=-1) * beta
    solved = torch.linalg.solve_triangular(unit + beta * among_keys, right, upper=False, unitriangular=True)
    written, corrected = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q_start = q * from_start
    k_end = (k * (last - total).exp()).transpose(-1, -2)
    decay = last.exp().transpose(-1, -2)
    outputs = []
    per_chunk = (written, corrected, q_start, among_queries, decay, k_end)
    for new, old, read, among, keep, end in zip(*(x.unbind(-4) for x in per_chunk), strict=True):
        update = new - old @ state
        outputs.append(read @ state + among @ update)
        state = keep * state + end @ update
    # [..., chunk, H, token, V] back to [..., T, H, V]
    o = torch.stack(outputs, dim=-4).transpose(-3, -2).flatten(-4, -3)
    return o[..., :num_tokens, :, :], state


def _to_chunks(x: Tensor) -> Tensor:
    """[..., T, H, C] to [..., ceil(T / CHUNK), H, CHUNK, C]; zero padding is a token that changes nothing."""
    missing = -x.shape[-3] % CHUNK_TOKENS
    padded = functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return padded.unflatten(-3, (-1, CHUNK_TOKENS)).transpose(-3, -2)
