"""MXFP4: E2M1 codes in pairs a byte, one E8M0 scale for 32 columns."""

from kimi_kernels.mxfp4.reference import GROUP_SIZE, dequantise, fake_quantise, pack, quantise, unpack

__all__ = ["GROUP_SIZE", "dequantise", "fake_quantise", "pack", "quantise", "unpack"]
