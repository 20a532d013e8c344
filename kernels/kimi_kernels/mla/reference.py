"""Multi-head latent attention in plain torch. A cache row is [latent after its norm | rope part raw]."""

import torch
from torch import Tensor
from torch.nn import functional

from kimi_kernels.mla.table import PageTable


def split_kv_b(weight: Tensor, num_heads: int, nope_dim: int) -> tuple[Tensor, Tensor]:
    """View `kv_b_proj.weight` as its key and value halves.

    weight   [H * (nope + V), L]
    returns  w_uk [H, nope, L], w_uv [H, V, L]
    """
    heads = weight.unflatten(0, (num_heads, -1))
    return heads[:, :nope_dim], heads[:, nope_dim:]


def absorb_query(q_nope: Tensor, q_rope: Tensor, w_uk: Tensor) -> Tensor:
    """Move a query into the latent space, where one cache row serves all heads.

    q_nope   [..., H, nope]
    q_rope   [..., H, rope]
    w_uk     [H, nope, L]
    returns  [..., H, L + rope]
    """
    return torch.cat([torch.einsum("...hn,hnl->...hl", q_nope, w_uk), q_rope], dim=-1)


def expand_output(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Bring attended latents back to head values: [..., H, L] and [H, V, L] to [..., H, V]."""
    return torch.einsum("...hl,hvl->...hv", o_latent, w_uv)


def _attend(q: Tensor, rows: Tensor, hidden: Tensor, scale: float, latent_rank: int) -> Tensor:
    """q [..., H, D], rows [..., n, D], hidden [..., 1, n] bool (True = not seen); fp32 inside."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    wide = rows.to(dtype)
    scores = torch.einsum("...hd,...nd->...hn", q.to(dtype), wide) * scale
    share = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("...hn,...nl->...hl", share, wide[..., :latent_rank]).to(q.dtype)


def paged(  # noqa: PLR0913 - one cache is described by three of them
    q_latent: Tensor, cache: Tensor, page_ids: Tensor, num_cached: int, scale: float, *, latent_rank: int
) -> Tensor:
    """The obvious form of blocks.paged: all scores [T, H, num_cached] at once."""
    num_new = q_latent.shape[0]
    num_pages = -(-num_cached // cache.shape[1])
    rows = cache[page_ids[:num_pages].long()].flatten(0, 1)[:num_cached]
    position = torch.arange(num_cached, device=cache.device)
    hidden = position[None, None, :] > position[num_cached - num_new :, None, None]
    return _attend(q_latent, rows, hidden, scale, latent_rank)


def paged_decode(q_latent: Tensor, cache: Tensor, table: PageTable, scale: float, *, latent_rank: int) -> Tensor:
    """The obvious form of blocks.paged_decode: every request padded to the longest."""
    rows = cache[table.page_ids[:, : -(-table.longest // cache.shape[1])].long()].flatten(1, 2)
    unseen = torch.arange(rows.shape[1], device=cache.device)[None, :] >= table.lengths[:, None]
    # A row past the length may hold anything, NaN included, and 0 * NaN is NaN.
    rows = rows.masked_fill(unseen[..., None], 0.0)
    return _attend(q_latent, rows, unseen[:, None, :], scale, latent_rank)


def full(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention over whole sequences with keys and values expanded; differentiable.

    q, k     [..., T, H, nope + rope]
    v        [..., T, H, V]
    returns  [..., T, H, V]  q's dtype, softmax in fp32
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = (x.to(dtype).transpose(-3, -2) for x in (q, k, v))
    # Torch's fused attention takes one width for all three; zero columns of the values come out as zeros.
    values = functional.pad(values, (0, queries.shape[-1] - values.shape[-1]))
    out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    return out[..., : v.shape[-1]].transpose(-3, -2).to(q.dtype)
