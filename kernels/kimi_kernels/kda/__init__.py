"""Kimi Delta Attention: gated delta rule with a decay for each key channel, and its short convolution."""

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
]
