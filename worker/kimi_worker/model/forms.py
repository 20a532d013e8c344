"""Which of several equal ways the model computes and stores things: what suits the device, or what a test names."""

from dataclasses import dataclass
from enum import Enum

import torch
from kimi_kernels.backend import Backend


class AttentionForm(Enum):
    """How absorbed queries attend to pages."""

    FUSED = "fused"
    """Torch's fused attention over gathered rows: the fastest on a CPU."""
    BLOCKED = "blocked"
    """The kernels' operators: scratch memory is bounded at any context length."""


class ExpertStorage(Enum):
    """How routed experts stay in memory."""

    PACKED = "packed"
    """MXFP4 as in the files, decoded at each use: 4.25 bits a weight are what lets the model fit on its GPUs."""
    DECODED = "decoded"
    """In the compute dtype, decoded once: a CPU takes longer to decode a weight than to multiply with it."""


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of one model; they differ in speed and memory, and in results only by rounding.

    backend  of the operators that have a Triton kernel: MXFP4 decoding, BLOCKED attention of decodes, KDA decodes
    """

    attention: AttentionForm
    experts: ExpertStorage
    backend: Backend

    @classmethod
    def suited_to(cls, device: torch.device) -> "Forms":
        is_cpu = device.type == "cpu"
        return cls(
            attention=AttentionForm.FUSED if is_cpu else AttentionForm.BLOCKED,
            experts=ExpertStorage.DECODED if is_cpu else ExpertStorage.PACKED,
            backend=Backend.suited_to(device),
        )
