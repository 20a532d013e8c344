"""MXFP4 in plain torch. Decoding is exact: every value is a bf16 number."""

import functools
import itertools

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Input columns that share one scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
# Largest E2M1 exponent: 6 = 1.5 * 2^2. A group's scale puts its largest value into [4, 8).
_MAX_EXPONENT = 2


def _tie_to_even_bounds() -> list[float]:
    """Upper bounds of codes 0..6: a value equal to a midpoint goes to the even code of the two."""
    bounds = []
    for code, (low, high) in enumerate(itertools.pairwise(_MAGNITUDES)):
        middle = (low + high) / 2
        # For an odd code the middle belongs to the next one: the bound is the fp32 number just below it.
        bounds.append(middle if code % 2 == 0 else middle * (1 - 2.0**-24))
    return bounds


_BOUNDS = _tie_to_even_bounds()


def pack(codes: Tensor) -> Tensor:
    """Put two 4-bit codes into a byte, even column in the low nibble.

    codes    [..., n]    uint8 in 0..15, n even
    returns  [..., n/2]  uint8
    """
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Undo pack: [..., n/2] uint8 to [..., n] uint8 codes."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def check_shapes(packed: Tensor, scale: Tensor) -> None:
    """Raise ValueError unless scale has one entry for each 32 columns of packed."""
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP_SIZE)
    if tuple(scale.shape) != expected or packed.shape[-1] * 2 % GROUP_SIZE:
        raise ValueError(
            f"MXFP4 scale has shape {tuple(scale.shape)}, expected {expected} for packed {tuple(packed.shape)}: "
            f"one scale for {GROUP_SIZE} columns; check that both tensors come from the same weight"
        )


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode a weight; exact in bf16, fp32 and fp64.

    packed   [..., n/2]   uint8, two codes a byte
    scale    [..., n/32]  uint8, value 2^(scale - 127)
    returns  [..., n]     dtype

    Raises ValueError when the shapes do not belong together.
    """
    check_shapes(packed, scale)
    pairs, factors = _tables(dtype, packed.device)
    # Indices of 4 bytes, one for two columns, are the only scratch.
    values = pairs.index_select(0, packed.flatten().int()).view(*scale.shape, GROUP_SIZE)
    values *= factors.index_select(0, scale.flatten().int()).view(*scale.shape, 1)
    return values.flatten(-2)


@functools.cache
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both columns of every byte of codes [256, 2] and the factor of every byte of scales [256]; made once a device."""
    # A tensor of inference mode could not be used in training later.
    with torch.inference_mode(mode=False):
        codes = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES))
        byte = torch.arange(256)
        pairs = torch.stack([codes[byte & 0xF], codes[byte >> 4]], dim=-1)
        factors = torch.ldexp(torch.ones(256), byte - _SCALE_BIAS)
        return pairs.to(device, dtype), factors.to(device, dtype)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to MXFP4: nearest code, ties to even, values above 6 times the scale saturate.

    weight   [..., n]                any float dtype, n a multiple of 32
    returns  packed [..., n/2] uint8, scale [..., n/32] uint8

    quantise(dequantise(p, s)) gives p and s back when every group's largest code is 4 or 6 (as quantise makes them).
    """
    if weight.shape[-1] % GROUP_SIZE:
        raise ValueError(f"MXFP4 needs a multiple of {GROUP_SIZE} columns, got {weight.shape[-1]}")
    groups = weight.detach().float().unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1)
    # frexp is exact where log2 rounds: largest = m * 2^e with m in [0.5, 1), so floor(log2) is e - 1.
    exponent = (torch.frexp(largest).exponent - 1 - _MAX_EXPONENT).clamp(-_SCALE_BIAS, 127)
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    bounds = torch.tensor(_BOUNDS, dtype=torch.float32, device=weight.device)
    codes = torch.bucketize(scaled.abs(), bounds).to(torch.uint8)
    # A negative value that rounds to zero keeps no sign, so that zero has one code.
    negative = (scaled < 0) & (codes > 0)
    codes = codes | (negative.to(torch.uint8) << 3)
    return pack(codes.flatten(-2)), (exponent + _SCALE_BIAS).to(torch.uint8)


def fake_quantise(weight: Tensor) -> Tensor:
    """Round to MXFP4 values in the forward pass, pass the gradient through unchanged.

    weight   [..., n]  fp32, n a multiple of 32
    returns  [..., n]  weight's dtype
    """
    rounded = dequantise(*quantise(weight), dtype=weight.dtype)
    return weight + (rounded - weight).detach()
