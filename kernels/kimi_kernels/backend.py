"""Which implementation of an operator runs, where there are two."""

from enum import Enum

import torch


class Backend(Enum):
    """Both compute the same; tests name one, the model takes the one that suits its device."""

    TORCH = "torch"
    TRITON = "triton"
    """Also on a CPU, under Triton's interpreter."""

    @classmethod
    def suited_to(cls, device: torch.device) -> "Backend":
        return cls.TRITON if device.type == "cuda" else cls.TORCH
