"""Norm, SiTU, AttnRes and router against their formulas in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from kimi_kernels import attn_res, norm, router, situ
from torch import Tensor

Draw = Callable[..., Tensor]
Close = Callable[[Tensor, Tensor], None]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms(dtype: torch.dtype, draw: Draw, close: Close) -> None:
    x, weight = draw(3, 5, 64, dtype=dtype), draw(64, dtype=dtype)
    got = norm.rms(x, weight, 1e-5)
    wide = x.double()
    assert got.dtype == dtype
    close(got, wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * weight.double())


def test_rms_casts_before_the_weight() -> None:
    """In bf16 the normalised row is rounded first; the other order gives other bits for this row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator).bfloat16()
    weight = torch.randn(64, generator=generator).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm.rms(x, weight, 1e-5), normed.bfloat16() * weight)
    assert not torch.equal(norm.rms(x, weight, 1e-5), (normed * weight.float()).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_situ(dtype: torch.dtype, draw: Draw, close: Close) -> None:
    gate, up = 4 * draw(7, 32, dtype=dtype), 30 * draw(7, 32, dtype=dtype)
    a, b = gate.double(), up.double()
    expected = 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)
    got = situ.situ(gate, up)
    assert got.dtype == dtype
    close(got, expected)


def test_situ_is_bounded_and_is_silu_near_zero() -> None:
    huge = torch.tensor([1e4, -1e4])
    assert situ.situ(huge, huge).abs().max() <= 100
    small = torch.linspace(-0.01, 0.01, 9, dtype=torch.float64)
    torch.testing.assert_close(situ.situ(small, small), small * torch.sigmoid(small) * small, rtol=1e-4, atol=0)


def test_mix_of_equal_scores_is_the_mean(draw: Draw, close: Close) -> None:
    bank, prefix = draw(3, 5, 16), draw(5, 16)
    got = attn_res.mix(prefix, bank, attn_res.site_weight(torch.ones(16), torch.zeros(1, 16)))
    close(got, torch.cat([bank, prefix[None]]).mean(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mix_equals_its_formula_row_by_row(dtype: torch.dtype, draw: Draw, close: Close) -> None:
    bank, prefix, gain, proj = (draw(*s, dtype=dtype) for s in ((3, 5, 16), (5, 16), (16,), (1, 16)))
    got = attn_res.mix(prefix, bank, attn_res.site_weight(gain, proj))
    assert got.dtype == dtype
    for t in range(5):
        rows = [row.double() for row in (*bank[:, t], prefix[t])]
        scores = [
            sum(
                r / math.sqrt((row @ row) / 16 + 1e-5) * n * p
                for r, n, p in zip(row, gain.double(), proj[0].double(), strict=True)
            )
            for row in rows
        ]
        share = torch.softmax(torch.stack(scores), 0)
        close(got[t], sum(a * row for a, row in zip(share, rows, strict=True)))


def test_mix_is_local_to_a_token(draw: Draw) -> None:
    bank, prefix = draw(2, 6, 16), draw(6, 16)
    weight = attn_res.site_weight(draw(16), draw(1, 16))
    whole = attn_res.mix(prefix, bank, weight)
    torch.testing.assert_close(whole[2:4], attn_res.mix(prefix[2:4], bank[:, 2:4], weight), rtol=0, atol=1e-6)


def test_router_weighs_by_scores_and_chooses_by_bias(draw: Draw, close: Close) -> None:
    x, weight, bias = draw(9, 16), draw(8, 16), 0.3 * draw(8)
    indices, weights = router.route(x, weight, bias, 3)
    for t in range(9):
        scores = torch.sigmoid(x[t].double() @ weight.double().T)
        chosen = sorted(range(8), key=lambda e, s=scores: -(s[e] + bias[e].double()).item())[:3]
        assert sorted(indices[t].tolist()) == sorted(chosen)
        close(weights[t], scores[indices[t]] / scores[chosen].sum())


def test_router_bias_moves_the_choice_and_not_the_weights(draw: Draw) -> None:
    x, weight = draw(9, 16), draw(8, 16)
    indices, _ = router.route(x, weight, torch.tensor([9.0] + [0.0] * 7), 2)
    assert (indices == 0).any(-1).all()
    everything = router.route(x, weight, torch.arange(8.0), 8, renormalize=False)
    plain = torch.sigmoid(x @ weight.T).gather(-1, everything[0])
    assert torch.equal(everything[1], plain)


def test_router_scores_are_fp32_for_bf16_rows(draw: Draw) -> None:
    x, weight = draw(4, 16, dtype=torch.bfloat16), draw(8, 16, dtype=torch.bfloat16)
    _, weights = router.route(x, weight, torch.zeros(8), 2, scaling=2.5)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.full((4,), 2.5))
