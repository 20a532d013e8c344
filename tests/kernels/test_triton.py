"""The Triton kernels: compiled for gfx942 without a GPU, and interpreted against their references."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from kimi_kernels.mla import SCRATCH_BYTES

SCRIPTS = sorted((Path(__file__).parent / "interpreted").glob("*.py"))
LDS_BYTES = 64 << 10
"""What a compute unit of gfx942 shares among the waves of a program."""
RELEASED_HEADS, LATENT, ROPE, PAGE, KDA_DIM = 48, 512, 64, 64, 128
"""Of a lane of two ranks."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_interpreted_kernel_equals_its_reference(script: Path) -> None:
    # Triton reads the switch at import, so the interpreter has a process of its own.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_kernel_is_interpreted() -> None:
    assert [script.stem for script in SCRIPTS] == ["kda_step", "mla_decode", "mxfp4_dequantise"]


def compile_for_gfx942(kernel: Any, signature: str, constants: dict[str, Any], num_warps: int = 4) -> Any:
    """Compile as a launch would with pointers and strides that are multiples of 16; `signature` in argument order."""
    import triton  # noqa: PLC0415 - slow to import, and only here
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    types = signature.split()
    arguments = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    even = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
    source = ASTSource(kernel, arguments, constexprs=constants, attrs=even)
    options = {"num_warps": num_warps, "num_stages": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        compiled = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
    assembly = compiled.asm["amdgcn"]
    assert "gfx942" in assembly
    assert compiled.asm["hsaco"][:4] == b"\x7fELF"
    assert re.search(r"\.wavefront_size: +64\b", assembly)
    # What does not fit into registers or LDS would run from memory, or not at all.
    assert re.search(r"\.vgpr_spill_count: +0\b", assembly)
    assert compiled.metadata.shared <= LDS_BYTES
    return assembly


@pytest.mark.parametrize("out_type", ["bf16", "fp32"])
def test_mxfp4_compiles(out_type: str) -> None:
    from kimi_kernels.mxfp4 import kernel  # noqa: PLC0415

    constants = {"BLOCK_GROUPS": kernel.BLOCK_GROUPS}
    compile_for_gfx942(kernel.dequantise_kernel, f"*u8 *u8 *{out_type} i32", constants)


@pytest.mark.parametrize(
    ("query", "cache", "product"),
    [("bf16", "bf16", "16x16x16_bf16"), ("bf16", "fp32", "16x16x16_bf16"), ("fp32", "fp32", "16x16x4_f32")],
)
def test_mla_decode_compiles_to_matrix_instructions(query: str, cache: str, product: str) -> None:
    from kimi_kernels.mla import kernel  # noqa: PLC0415

    itemsize = 4 if "fp32" in {query, cache} else 2
    constants = kernel.block_sizes(LATENT, ROPE, PAGE, itemsize) | {"IS_WIDE": False}
    signature = f"*{query} *{cache} *i64 *i64 *fp32 *fp32 fp32 i32 i32 i32 i32"
    assembly = compile_for_gfx942(kernel.decode_kernel, signature, constants, kernel.NUM_WARPS)
    assert f"v_mfma_f32_{product}" in assembly


@pytest.mark.parametrize("value_type", ["bf16", "fp32"])
def test_kda_step_compiles(value_type: str) -> None:
    from kimi_kernels.kda import kernel  # noqa: PLC0415

    constants = {"K": KDA_DIM, "V": KDA_DIM, "BLOCK_K": KDA_DIM, "BLOCK_V": kernel.BLOCK_V}
    signature = f"*fp32 *fp32 *{value_type} *fp32 *fp32 *fp32 *i64 *fp32 fp32 i32 i32"
    compile_for_gfx942(kernel.step_kernel, signature, constants, kernel.NUM_WARPS)


def test_a_long_context_is_split_for_all_compute_units_and_within_scratch() -> None:
    from kimi_kernels.mla.kernel import num_splits  # noqa: PLC0415

    assert num_splits(1, RELEASED_HEADS, LATENT, longest=100) == 1
    # One request: 3 blocks of heads, so 203 parts make 609 programs.
    assert num_splits(1, RELEASED_HEADS, LATENT, longest=524_288) == 203
    assert num_splits(1, RELEASED_HEADS, LATENT, longest=2048) == 8
    for requests in (1, 8, 64, 512, 5000):
        splits = num_splits(requests, RELEASED_HEADS, LATENT, longest=524_288)
        assert splits >= 1
        assert splits == 1 or splits * requests * RELEASED_HEADS * (LATENT + 1) * 4 <= SCRATCH_BYTES
