"""MXFP4: E2M1 codes in pairs a byte, one E8M0 scale for 32 columns."""

import torch
from torch import Tensor

from kimi_kernels.backend import Backend
from kimi_kernels.mxfp4 import reference
from kimi_kernels.mxfp4.reference import GROUP_SIZE, fake_quantise, pack, quantise, unpack

__all__ = ["GROUP_SIZE", "dequantise", "fake_quantise", "pack", "quantise", "unpack"]


def dequantise(
    packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, *, backend: Backend | None = None
) -> Tensor:
    """reference.dequantise by the backend that is named, or else by the one that suits packed's device; equal bits."""
    if (backend or Backend.suited_to(packed.device)) is Backend.TORCH:
        return reference.dequantise(packed, scale, dtype)
    # Imported late: Triton takes a second, and a CPU does without.
    from kimi_kernels.mxfp4 import kernel  # noqa: PLC0415

    return kernel.dequantise(packed, scale, dtype)
