"""Attention of absorbed queries over paged latent rows: the kernels' operators, or torch's fused attention on a CPU.

The fused form keys and values with the same rows, so that its fast path (equal widths) applies, and drops the rope part
of the result. It is 2 to 3 times faster on a CPU than the plain operators, and never holds all scores at once.
"""

import torch
from kimi_kernels import mla
from torch import Tensor
from torch.nn import functional

from kimi_worker.model.batch import Batch, Piece
from kimi_worker.model.forms import AttentionForm, Forms


class LatentAttention:
    """Scale, width and form of one layer's attention."""

    def __init__(self, scale: float, latent_rank: int, forms: Forms) -> None:
        self._scale, self._rank = scale, latent_rank
        self._is_fused, self._backend = forms.attention is AttentionForm.FUSED, forms.backend

    def decodes(self, query: Tensor, pages: Tensor, batch: Batch) -> Tensor:
        """One token a request: query [R, H, L + rope], pages [P, S, L + rope] of one layer, to [R, H, L]."""
        table = batch.decode_table
        if not self._is_fused:
            return mla.paged_decode(query, pages, table, self._scale, latent_rank=self._rank, backend=self._backend)
        ids = table.page_ids
        rows = pages.index_select(0, ids.flatten()).view(ids.shape[0], 1, -1, pages.shape[-1])
        seen = torch.arange(rows.shape[2], device=rows.device) < table.lengths.unsqueeze(-1)
        # A row past the length may hold anything, NaN included, and 0 * NaN is NaN.
        rows = rows.masked_fill(~seen[:, None, :, None], 0.0)
        return self._fused(query.unsqueeze(1), rows, seen[:, None, None, :]).squeeze(1)

    def piece(self, query: Tensor, pages: Tensor, piece: Piece) -> Tensor:
        """Several tokens of one sequence, causal among themselves: [T, H, L + rope] to [T, H, L]."""
        if not self._is_fused:
            return mla.paged(query, pages, piece.page_ids, piece.num_cached, self._scale, latent_rank=self._rank)
        num_new, num_heads = query.shape[:2]
        rows = pages.index_select(0, piece.page_ids).view(-1, pages.shape[-1])[: piece.num_cached]
        seen = torch.ones(num_new, piece.num_cached, dtype=torch.bool, device=rows.device)
        seen = seen.tril(piece.num_cached - num_new)
        heads_first = query.transpose(0, 1).unsqueeze(0)
        return self._fused(heads_first, rows.expand(1, num_heads, -1, -1), seen).squeeze(0).transpose(0, 1)

    def _fused(self, query: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
        """query [..., q, D] and rows [..., n, D] in fp32 inside; `seen` broadcasts to [..., q, n]: [..., q, L]."""
        wide, rows = query.float(), rows.float()
        out = functional.scaled_dot_product_attention(wide, rows, rows, attn_mask=seen, scale=self._scale)
        return out[..., : self._rank].to(query.dtype)
