"""Attention residuals: what takes the place of the residual stream."""

import torch
from kimi_kernels import attn_res
from torch import Tensor

from kimi_worker.model.config import KimiConfig
from kimi_worker.model.weights import WeightSource


class MixSite:
    """One place where the bank's snapshots and the running prefix are mixed into a block's input."""

    def __init__(self, source: WeightSource, name: str, config: KimiConfig) -> None:
        """`name` is the checkpoint's name up to `_norm.weight` and `_proj.weight`."""
        site = attn_res.site_weight(source.read(f"{name}_norm.weight"), source.read(f"{name}_proj.weight"))
        self._weight = source.keep(site, dtype=torch.float32)
        self._eps = config.rms_norm_eps

    def __call__(self, stream: "ResidualStream") -> Tensor:
        """[T, hidden]: the mix over everything the stream holds; the prefix itself while the bank is empty."""
        if stream.num_rows == 0:
            return stream.prefix
        return attn_res.mix(stream.prefix, stream.bank, self._weight, self._eps)


class ResidualStream:
    """The residual state of T tokens within one step: a bank of snapshots and a running prefix. Nothing is kept."""

    def __init__(self, embedding: Tensor, config: KimiConfig) -> None:
        self.prefix = embedding
        self._block = config.attn_res_block
        most_rows = -(-config.num_layers // self._block)
        self._rows = embedding.new_empty((most_rows, *embedding.shape))
        self.num_rows = 0
        self._is_cleared = False

    @property
    def bank(self) -> Tensor:
        """[B, T, hidden], oldest first."""
        return self._rows[: self.num_rows]

    def begin_layer(self, layer: int) -> None:
        """At a block's first layer the prefix becomes a snapshot and starts anew with the next output."""
        if layer % self._block == 0:
            self._rows[self.num_rows] = self.prefix
            self.num_rows += 1
            self._is_cleared = True

    def add(self, output: Tensor) -> None:
        """Take a block's output [T, hidden] into the prefix."""
        self.prefix = output if self._is_cleared else self.prefix + output
        self._is_cleared = False

    def select(self, tokens: Tensor) -> None:
        """Keep only these tokens [n] int64: after the last layer most rows are of no more use."""
        self.prefix = self.prefix[tokens]
        self._rows = self._rows[:, tokens]
