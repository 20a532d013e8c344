"""What the profiles of gfx950 say of the bundled worker: its kernels compile for that chip too, without one at hand."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
from kimi_operator.profiles import built_in_profiles

ARCHITECTURE = "gfx950"
LDS_BYTES = 64 << 10
"""Of the 160 KiB of a compute unit: what the kernels' sizes were chosen for."""
LATENT, ROPE, PAGE, KDA_DIM = 512, 64, 64, 128
"""Of the released model."""


def compiled(kernel: Any, signature: str, constants: dict[str, Any], num_warps: int = 4) -> str:
    """The assembly, as a launch with aligned pointers would have it compiled; `signature` in argument order."""
    import triton  # noqa: PLC0415 - slow to import, and only here
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    types = signature.split()
    arguments = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
    source = ASTSource(kernel, arguments, constexprs=constants, attrs=aligned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = triton.compile(
            source, target=GPUTarget("hip", ARCHITECTURE, 64), options={"num_warps": num_warps, "num_stages": 1}
        )
    assert result.metadata.shared <= LDS_BYTES
    assembly: str = result.asm["amdgcn"]
    return assembly


def check(assembly: str) -> None:
    assert ARCHITECTURE in assembly
    assert re.search(r"\.wavefront_size: +64\b", assembly)
    assert re.search(r"\.vgpr_spill_count: +0\b", assembly)


def test_mxfp4_decoder() -> None:
    from kimi_kernels.mxfp4 import kernel  # noqa: PLC0415

    check(compiled(kernel.dequantise_kernel, "*u8 *u8 *bf16 i32", {"BLOCK_GROUPS": kernel.BLOCK_GROUPS}))


def test_mla_decode_in_bfloat16_matrix_instructions() -> None:
    from kimi_kernels.mla import kernel  # noqa: PLC0415

    constants = kernel.block_sizes(LATENT, ROPE, PAGE, 2) | {"IS_WIDE": False}
    signature = "*bf16 *bf16 *i64 *i64 *fp32 *fp32 fp32 i32 i32 i32 i32"
    assembly = compiled(kernel.decode_kernel, signature, constants, kernel.NUM_WARPS)
    check(assembly)
    # Twice the depth of gfx942's.
    assert "v_mfma_f32_16x16x32_bf16" in assembly


def test_kda_step() -> None:
    from kimi_kernels.kda import kernel  # noqa: PLC0415

    constants = {"K": KDA_DIM, "V": KDA_DIM, "BLOCK_K": KDA_DIM, "BLOCK_V": kernel.BLOCK_V}
    signature = "*fp32 *fp32 *bf16 *fp32 *fp32 *fp32 *i64 *fp32 fp32 i32 i32"
    check(compiled(kernel.step_kernel, signature, constants, kernel.NUM_WARPS))


@pytest.mark.parametrize("name", ["mi350x", "mi355x"])
def test_the_profiles_say_so(name: str) -> None:
    spec = built_in_profiles()[name].spec
    assert spec.worker is not None
    assert spec.gpu.architecture == ARCHITECTURE
    assert spec.worker.works[0].startswith(f"kernels compile for {ARCHITECTURE}: wave64, no spilled vector registers")
