"""The Triton decoder: compiled for gfx942 without a GPU, and interpreted against the reference, bit for bit."""

import os
import subprocess
import sys
import warnings

import pytest

INTERPRETED = """
import torch
from kimi_kernels import mxfp4
from kimi_kernels.mxfp4 import kernel

generator = torch.Generator().manual_seed(0)
for shape in ((1, 16), (3, 16), (5, 48), (2, 7, 32), (130, 16), (0, 16)):
    packed = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    # 255 is NaN in E8M0 and no code of a weight; the ends of the range leave bf16's normal numbers.
    scale = torch.randint(3, 253, (*shape[:-1], shape[-1] // 16), generator=generator, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        got, expected = kernel.dequantise(packed, scale, dtype), mxfp4.dequantise(packed, scale, dtype)
        assert got.dtype == dtype and torch.equal(got, expected), (shape, dtype)
try:
    kernel.dequantise(torch.zeros(16, 4, dtype=torch.uint8).T, torch.zeros(4, 1, dtype=torch.uint8))
except ValueError as error:
    assert "contiguous" in str(error)
else:
    raise AssertionError("a strided tensor was accepted")
print("equal")
"""


def test_interpreted_kernel_equals_the_reference() -> None:
    # Triton reads the switch at import, so the interpreter has a process of its own.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


@pytest.mark.parametrize("out_type", ["bf16", "fp32"])
def test_kernel_compiles_for_gfx942(out_type: str) -> None:
    import triton  # noqa: PLC0415 - slow to import, and only here
    from kimi_kernels.mxfp4.kernel import BLOCK_GROUPS, dequantise_kernel  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    signature = {"packed_ptr": "*u8", "scale_ptr": "*u8", "out_ptr": f"*{out_type}", "num_groups": "i32"}
    source = ASTSource(
        dequantise_kernel, signature | {"BLOCK_GROUPS": "constexpr"}, constexprs={"BLOCK_GROUPS": BLOCK_GROUPS}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        compiled = triton.compile(source, target=GPUTarget("hip", "gfx942", 64))
    assert "gfx942" in compiled.asm["amdgcn"]
    assert compiled.asm["hsaco"][:4] == b"\x7fELF"
