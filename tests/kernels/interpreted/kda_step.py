"""Run by test_triton.py under TRITON_INTERPRET=1: one KDA token by Triton equals the reference, in the same slots."""

import pytest
import torch
from kimi_kernels import kda
from kimi_kernels.backend import Backend
from torch import Tensor

generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


for num_requests, heads, key_dim, value_dim in ((0, 2, 16, 16), (1, 1, 16, 8), (3, 2, 24, 40), (2, 2, 128, 128)):
    # Views of one layer of a memory of two, and of q and k side by side, as the model has them.
    q, k = kda.l2norm(normal(num_requests, heads, 2, key_dim)).unbind(-2)
    v, beta = normal(num_requests, heads, value_dim).bfloat16(), torch.sigmoid(normal(num_requests, heads))
    g = -5 * torch.sigmoid(3 * normal(num_requests, heads, key_dim))
    memory, slots = normal(7, 2, heads, key_dim, value_dim), torch.randperm(7, generator=generator)[:num_requests]
    results = []
    for backend in Backend:
        own = memory.clone()
        o = kda.step_slots(q, k, v, g, beta, own[:, 1], slots, key_dim**-0.5, backend=backend)
        results.append((o, own))
    for expected, got in zip(*results, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    untouched = torch.ones(7, 2, dtype=torch.bool)
    untouched[slots, 1] = False
    assert torch.equal(results[1][1][untouched], memory[untouched])
    assert num_requests == 0 or not torch.equal(results[1][1], memory)

with pytest.raises(ValueError, match="contiguous slots"):
    kda.step_slots(q, k, v, g, beta, memory[:, 1].transpose(2, 3), slots, 1.0, backend=Backend.TRITON)
