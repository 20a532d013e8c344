"""MXFP4: bytes of the release, every code, rounding, exactness."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kimi_kernels import mxfp4
from torch import Tensor

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def group(values: list[float]) -> Tensor:
    return torch.tensor(values + [0.0] * (32 - len(values)))


def test_known_bytes_of_the_release() -> None:
    packed = torch.tensor([22, 185, 206, 35] + [0] * 12, dtype=torch.uint8)
    got = mxfp4.dequantise(packed, torch.tensor([121], dtype=torch.uint8))
    assert got.dtype == torch.bfloat16
    assert got[:8].tolist() == [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]


def test_every_code_at_every_scale_is_exact_in_bf16() -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 16
    # 255 means NaN in E8M0 and 1..2 below the smallest normal bf16; the release holds 110..123.
    for scale in range(3, 253):
        got = mxfp4.dequantise(mxfp4.pack(codes), torch.tensor([scale], dtype=torch.uint8), torch.bfloat16)
        signs = [1.0] * 8 + [-1.0] * 8
        assert got.double().tolist()[:16] == [
            s * m * 2.0 ** (scale - 127) for s, m in zip(signs, MAGNITUDES * 2, strict=True)
        ]


def test_unpack_undoes_pack() -> None:
    codes = torch.randint(16, (3, 5, 64), dtype=torch.uint8)
    assert torch.equal(mxfp4.unpack(mxfp4.pack(codes)), codes)
    assert mxfp4.pack(codes[0, 0])[0] == codes[0, 0, 0] + 16 * codes[0, 0, 1]


@pytest.mark.parametrize("power", [-20, -1, 0, 3])
def test_ties_go_to_the_even_code_and_large_values_saturate(power: int) -> None:
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.75, -5.0, -7.9]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -1.0, -4.0, -6.0]
    got = mxfp4.dequantise(*mxfp4.quantise(group(values) * 2.0**power), torch.float32)
    assert got[: len(values)].tolist() == [value * 2.0**power for value in expected]


@settings(max_examples=200)
@example([1.4e-45] * 32)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32))
def test_each_value_becomes_the_nearest_of_its_group(values: list[float]) -> None:
    weight = torch.tensor(values, dtype=torch.float32)
    packed, scale = mxfp4.quantise(weight)
    step = 2.0 ** (int(scale[0]) - 127)
    # Below 4 times the smallest scale there is no scale to go down to.
    if weight.abs().max() >= 4 * 2.0**-127:
        assert 4 <= weight.abs().max().item() / step < 8
    got = mxfp4.dequantise(packed, scale, torch.float64)
    choices = torch.tensor([s * m * step for s, m in itertools.product((1, -1), MAGNITUDES)], dtype=torch.float64)
    nearest = (weight.double()[:, None] - choices).abs().min(1).values
    assert torch.equal((weight.double() - got).abs(), nearest)


@settings(max_examples=100)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64))
def test_rounding_twice_changes_nothing(values: list[float]) -> None:
    first = mxfp4.quantise(torch.tensor(values, dtype=torch.float32).view(2, 32))
    second = mxfp4.quantise(mxfp4.dequantise(*first, torch.bfloat16))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_fake_quantise_rounds_forward_and_passes_gradients(draw: Callable[..., Tensor]) -> None:
    weight = draw(4, 64).requires_grad_()
    rounded = mxfp4.fake_quantise(weight)
    rounded.backward(torch.ones_like(weight))
    expected = mxfp4.dequantise(*mxfp4.quantise(weight), torch.float32)
    torch.testing.assert_close(rounded.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    packed = torch.zeros(4, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scale has shape \(4, 1\), expected \(4, 2\)"):
        mxfp4.dequantise(packed, torch.zeros(4, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="multiple of 32 columns, got 48"):
        mxfp4.quantise(torch.zeros(4, 48))
