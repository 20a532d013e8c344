"""Run by test_triton.py under TRITON_INTERPRET=1: attention of decodes by Triton equals the obvious form."""

import itertools

import pytest
import torch
from kimi_kernels import mla
from kimi_kernels.backend import Backend
from kimi_kernels.mla import kernel, reference
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def check(lengths: tuple[int, ...], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    """Compare over one layer of a cache of two, in which all rows that no request owns are NaN; the splits used."""
    heads, rank, rope, page = sizes
    pages = -(-lengths[0] // page)
    ids = torch.randperm(len(lengths) * pages, generator=generator).view(-1, pages)
    cache = torch.full((len(lengths) * pages + 1, 2, page, rank + rope), float("nan"), dtype=dtype)
    layer = cache[:, 1]
    for r, length in enumerate(lengths):
        for t in range(length):
            layer[ids[r, t // page], t % page] = normal(rank + rope).to(dtype)
    table = mla.PageTable(ids.to(torch.int32), torch.tensor(lengths), lengths)
    q = (2 * normal(len(lengths), heads, rank + rope)).to(dtype)
    scale = (rank + rope) ** -0.5
    expected = reference.paged_decode(q.double(), layer.double(), table, scale, latent_rank=rank)
    got = mla.paged_decode(q, layer, table, scale, latent_rank=rank, backend=Backend.TRITON)
    assert got.dtype == dtype
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)
    return kernel.num_splits(len(lengths), heads, rank, lengths[0])


# Small contexts are cut as well, so that requests have many, few and empty parts.
kernel._LEAST_ROWS = 16
shapes = [(1, 16, 16, 1), (5, 20, 8, 8), (17, 48, 16, 16)]
lengths = [(1,), (67, 20, 1), (130, 129, 64, 63, 16)]
splits = set()
for sizes, ragged, dtype in itertools.product(shapes, lengths, TOLERANCE):
    if dtype == torch.bfloat16 and sizes != shapes[-1]:
        continue
    splits.add(check(ragged, sizes, dtype))
assert {1, 4, 8} <= splits, splits

q, cache = torch.zeros(1, 1, 24), torch.zeros(1, 24, 8).transpose(1, 2)
table = mla.PageTable(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([3]), (3,))
with pytest.raises(ValueError, match="last stride"):
    mla.paged_decode(q, cache, table, 1.0, latent_rank=16, backend=Backend.TRITON)
