"""RMS norm with the rounding order of the released model."""

from kimi_kernels.norm.reference import rms

__all__ = ["rms"]
