"""Run by test_triton.py under TRITON_INTERPRET=1: decoding by Triton equals the reference, bit for bit."""

import pytest
import torch
from kimi_kernels import mxfp4
from kimi_kernels.backend import Backend

generator = torch.Generator().manual_seed(0)
for shape in ((1, 16), (3, 16), (5, 48), (2, 7, 32), (130, 16), (0, 16)):
    packed = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    # 255 is NaN in E8M0 and no code of a weight; the ends of the range leave bf16's normal numbers.
    scale = torch.randint(3, 253, (*shape[:-1], shape[-1] // 16), generator=generator, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        expected, got = (mxfp4.dequantise(packed, scale, dtype, backend=backend) for backend in Backend)
        assert got.dtype == dtype
        assert torch.equal(got, expected), (shape, dtype)
strided = torch.zeros(16, 4, dtype=torch.uint8).T
with pytest.raises(ValueError, match="contiguous"):
    mxfp4.dequantise(strided, torch.zeros(4, 1, dtype=torch.uint8), backend=Backend.TRITON)
