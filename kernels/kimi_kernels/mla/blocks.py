"""Latent attention in blocks: plain torch for any device, with scratch memory that does not grow with the context.

Scores of a whole context do not fit: 2,048 queries of 48 heads over 524,288 rows are 192 GiB in fp32. So blocks of
queries meet blocks of pages, and a softmax that runs over the blocks keeps the largest score, the sum and the result.
"""

import torch
from torch import Tensor

from kimi_kernels.mla.table import PageTable

SCRATCH_BYTES = 256 << 20
"""Most bytes that one call of paged or paged_decode allocates besides its result, at any context length.

At least one query token, or one request, meets one page; only sizes for which that alone is more exceed it.
"""

BLOCK_ROWS = 1024
"""Most rows that a prompt's queries meet at once. Contexts longer than this and a chunk show no new shapes."""

# Numbers of width one a query and head: largest score (old, new, of the block), sum (old, of the block), shrinkage.
_SCALARS = 6


class _RunningSoftmax:
    """Attention results [B, q, L] over rows that arrive in blocks."""

    def __init__(self, queries: Tensor, scale: float, latent_rank: int) -> None:
        """queries [B, q, D]."""
        self._rank, self._dtype = latent_rank, _wide(queries)
        self._queries = queries.to(self._dtype, copy=True).mul_(scale)
        self._peak = self._queries.new_full((*queries.shape[:-1], 1), float("-inf"))
        self._sum = torch.zeros_like(self._peak)
        self._result = self._queries.new_zeros((*queries.shape[:-1], latent_rank))

    def take(self, rows: Tensor, hidden: Tensor | None) -> None:
        """Attend the first b queries to one block each.

        rows    [b, n, D]  cache dtype
        hidden  broadcasts to [b, q, n] after unflattening q as hidden does; True = not seen. Of its first block every
                query must see a row.
        """
        here, rows = slice(rows.shape[0]), rows.to(self._dtype)
        scores = torch.bmm(self._queries[here], rows.transpose(1, 2))
        if hidden is not None:
            scores.view(*hidden.shape[:-2], -1, hidden.shape[-1]).masked_fill_(hidden, float("-inf"))
        old, total, result = self._peak[here], self._sum[here], self._result[here]
        peak = torch.maximum(old, scores.amax(-1, keepdim=True))
        shrink = (old - peak).exp_()
        scores.sub_(peak).exp_()
        total.mul_(shrink).add_(scores.sum(-1, keepdim=True))
        result.mul_(shrink).baddbmm_(scores, rows[..., : self._rank])
        old.copy_(peak)

    def result(self) -> Tensor:
        """[B, q, L]; ends the softmax."""
        return self._result.div_(self._sum)


def paged(  # noqa: PLR0913 - one cache is described by three of them
    q_latent: Tensor,
    cache: Tensor,
    page_ids: Tensor,
    num_cached: int,
    scale: float,
    *,
    latent_rank: int,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """Attend the last T tokens of one sequence over its pages, causal among themselves.

    q_latent       [T, H, L + rope]  from absorb_query
    cache          [P, S, L + rope]  pages of one layer; the rows of the T tokens are already written
    page_ids       [n]               int, pages of the sequence in order; those past num_cached are ignored
    num_cached     rows of the sequence in the cache, the T new ones included: num_cached >= T
    scale          (nope + rope) ** -0.5
    latent_rank    L
    scratch_bytes  see SCRATCH_BYTES
    returns        [T, H, L]         q's dtype, accumulated in fp32; feed expand_output
    """
    num_new, num_heads, width = q_latent.shape
    dtype = _wide(q_latent)
    row_bytes = _row_bytes(cache, dtype)
    page_size = cache.shape[1]
    block = max(1, min(BLOCK_ROWS, scratch_bytes // 4 // row_bytes) // page_size) * page_size
    block = min(block, -(-num_cached // page_size) * page_size)
    # A row of the mask and its two arms are a bool and two int64 a cache row.
    token_bytes = num_heads * (width + block + latent_rank + _SCALARS) * dtype.itemsize + block
    tokens = max(1, (scratch_bytes - block * (row_bytes + 16)) // token_bytes)
    out = q_latent.new_empty(num_new, num_heads, latent_rank)
    for first in range(0, num_new, tokens):
        last = min(first + tokens, num_new)
        positions = range(num_cached - num_new + first, num_cached - num_new + last)
        softmax = _RunningSoftmax(q_latent[first:last].reshape(1, -1, width), scale, latent_rank)
        _attend_causal(softmax, cache, page_ids, positions, block // page_size)
        out[first:last] = softmax.result().view(last - first, num_heads, latent_rank)
        # Gone before the next block of queries takes its own.
        del softmax
    return out


def _attend_causal(
    softmax: _RunningSoftmax, cache: Tensor, page_ids: Tensor, positions: range, pages_together: int
) -> None:
    """Attend the queries at consecutive positions of a sequence to all rows that they see."""
    page_size = cache.shape[1]
    for start in range(0, positions.stop, pages_together * page_size):
        stop = min(start + pages_together * page_size, positions.stop)
        ids = page_ids[start // page_size : -(-stop // page_size)]
        hidden = None
        if stop > positions.start + 1:
            rows = torch.arange(start, stop, device=cache.device)
            queries = torch.arange(positions.start, positions.stop, device=cache.device)
            hidden = (rows > queries[:, None])[:, None, :]
        # No name for the rows: they are gone before the next ones are gathered.
        softmax.take(cache[ids].flatten(0, 1)[None, : stop - start], hidden)


def paged_decode(  # noqa: PLR0913 - attention and the bound of its scratch
    q_latent: Tensor,
    cache: Tensor,
    table: PageTable,
    scale: float,
    *,
    latent_rank: int,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """Attend one new token a request over its pages; a request is read only as far as it goes, up to one block.

    q_latent       [R, H, L + rope]
    cache          [P, S, L + rope]  the rows of the new tokens are already written
    table          of the R requests, longest first
    scratch_bytes  see SCRATCH_BYTES
    returns        [R, H, L]         q's dtype, accumulated in fp32
    """
    num_requests, num_heads, width = q_latent.shape
    dtype = _wide(q_latent)
    page_size = cache.shape[1]
    fixed_bytes = num_heads * (width + latent_rank + _SCALARS) * dtype.itemsize
    # Besides the row and its scores: the page id, the mask and one arm of it.
    page_bytes = page_size * (_row_bytes(cache, dtype) + num_heads * dtype.itemsize + 9)
    together = max(1, min(num_requests, scratch_bytes // (page_bytes + fixed_bytes)))
    pages = max(1, (scratch_bytes // together - fixed_bytes) // page_bytes)
    out = q_latent.new_empty(num_requests, num_heads, latent_rank)
    for first in range(0, num_requests, together):
        group = slice(first, first + together)
        part = PageTable(table.page_ids[group], table.lengths[group], table.host_lengths[group])
        softmax = _RunningSoftmax(q_latent[group], scale, latent_rank)
        _attend_decodes(softmax, cache, part, pages)
        out[group] = softmax.result()
        # Gone before the next group takes its own.
        del softmax
    return out


def _attend_decodes(softmax: _RunningSoftmax, cache: Tensor, table: PageTable, pages_together: int) -> None:
    """Attend one query a request to all its rows."""
    page_size = cache.shape[1]
    for start in range(0, table.longest, pages_together * page_size):
        stop = min(start + pages_together * page_size, table.longest)
        # The longest come first, so those that reach this block are the first of all.
        reach = sum(length > start for length in table.host_lengths)
        ids = table.page_ids[:reach, start // page_size : -(-stop // page_size)]
        if table.host_lengths[reach - 1] >= stop:
            softmax.take(cache[ids].flatten(1, 2)[:, : stop - start], None)
            continue
        unseen = torch.arange(start, stop, device=cache.device) >= table.lengths[:reach, None]
        # A row past the length may hold anything, NaN included, and 0 * NaN is NaN.
        softmax.take(
            cache[ids].flatten(1, 2)[:, : stop - start].masked_fill_(unseen[..., None], 0.0), unseen[:, None, :]
        )


def _wide(x: Tensor) -> torch.dtype:
    """What is computed in: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def _row_bytes(cache: Tensor, dtype: torch.dtype) -> int:
    """Scratch of one gathered cache row: in the cache's dtype, and in the one that is computed in where they differ."""
    return cache.shape[-1] * (cache.element_size() + (dtype.itemsize if dtype != cache.dtype else 0))
