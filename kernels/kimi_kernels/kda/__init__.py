"""Kimi Delta Attention: gated delta rule with a decay for each key channel, and its short convolution."""

from torch import Tensor

from kimi_kernels.backend import Backend
from kimi_kernels.kda.chunk import CHUNK_TOKENS, chunk
from kimi_kernels.kda.conv import CONV_TAPS, conv_chunk, conv_step
from kimi_kernels.kda.reference import gate, gated_norm, l2norm, recurrent, step

__all__ = [
    "CHUNK_TOKENS",
    "CONV_TAPS",
    "chunk",
    "conv_chunk",
    "conv_step",
    "gate",
    "gated_norm",
    "l2norm",
    "recurrent",
    "step",
    "step_slots",
]


def step_slots(  # noqa: PLR0913, PLR0917 - the recurrence has seven operands
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    scale: float,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Advance each of R requests by one token, its state in place.

    q, k, v, g, beta, scale  as in step
    state    [num_slots, H, K, V]  fp32, the first axis may be strided; the states of `slots` are replaced
    slots    [R]                   int, each slot at most once
    backend  by default the one that suits state's device
    returns  o [R, H, V] fp32
    """
    if (backend or Backend.suited_to(state.device)) is Backend.TORCH:
        o, advanced = step(q, k, v, g, beta, state.index_select(0, slots), scale)
        state.index_copy_(0, slots, advanced)
        return o
    # Imported late: Triton takes a second, and a CPU does without.
    from kimi_kernels.kda import kernel  # noqa: PLC0415

    return kernel.step_slots(q, k, v, g, beta, state, slots, scale)
