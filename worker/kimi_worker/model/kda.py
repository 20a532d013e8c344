"""A Kimi Delta Attention layer over the rank's heads."""

import torch
from kimi_kernels import kda
from torch import Tensor
from torch.nn import functional

from kimi_worker.engine.caches import Caches
from kimi_worker.model.batch import Batch
from kimi_worker.model.config import KimiConfig
from kimi_worker.model.weights import WeightSource
from kimi_worker.parallel.ranks import RankPlace


class KdaAttention:
    """Holds the weights of this rank's heads; the recurrent state lives in the caches."""

    def __init__(
        self, source: WeightSource, prefix: str, config: KimiConfig, place: RankPlace, cache_layer: int
    ) -> None:
        """`prefix` ends in `self_attn.`; `cache_layer` is the layer's index among the KDA layers."""
        heads = place.share(config.kda_num_heads, "linear_attn_config.num_heads")
        self._heads, self._dim, self._layer = len(heads), config.kda_head_dim, cache_layer
        self._backend = source.forms.backend
        self._eps, self._lower_bound = config.rms_norm_eps, config.gate_lower_bound
        rows = range(heads.start * self._dim, heads.stop * self._dim)
        # One product for everything that reads the layer's input: q, k, v, output gate, decay (low rank) and beta.
        self._w_in = source.keep(
            *(source.linear(f"{prefix}{name}_proj", rows=rows) for name in ("q", "k", "v", "g")),
            source.linear(f"{prefix}f_a_proj"),
            source.linear(f"{prefix}b_proj", rows=heads),
        )
        width = len(rows)
        self._split = [3 * width, width, self._w_in.shape[0] - 4 * width - self._heads, self._heads]
        self._w_decay = source.keep(source.linear(f"{prefix}f_b_proj", rows=rows))
        self._conv = source.keep(
            *(source.read(f"{prefix}{name}_conv1d.weight", rows=rows) for name in ("q", "k", "v")), dtype=torch.float32
        )
        # The file holds a padded vector: all heads first, then zeros.
        self._a_log = source.keep(source.read(f"{prefix}A_log", rows=heads), dtype=torch.float32)
        self._dt_bias = source.keep(source.read(f"{prefix}dt_bias", rows=rows), dtype=torch.float32)
        self._norm = source.keep(source.read(f"{prefix}o_norm.weight"), dtype=torch.float32)
        self._w_out = source.keep(source.linear(f"{prefix}o_proj", columns=rows))

    def __call__(self, x: Tensor, batch: Batch, caches: Caches) -> Tensor:
        """[T, hidden] to this rank's part of [T, hidden]; advances the states of the batch's slots."""
        qkv, gate, decay_in, beta_in = functional.linear(x, self._w_in).split(self._split, dim=-1)
        z = functional.linear(decay_in, self._w_decay).unflatten(-1, (self._heads, self._dim))
        decay = kda.gate(z, self._a_log, self._dt_bias, self._lower_bound)
        beta = torch.sigmoid(beta_in.float())
        outputs = []
        if batch.num_decodes:
            outputs.append(self._decode(qkv, decay, beta, batch, caches))
        for piece in batch.pieces:
            part = slice(piece.start, piece.stop)
            outputs.append(self._advance(qkv[part], decay[part], beta[part], piece.slot, caches))
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        normed = kda.gated_norm(o, gate.unflatten(-1, (self._heads, self._dim)), self._norm, self._eps)
        return functional.linear(normed.flatten(-2), self._w_out)

    def _decode(self, qkv: Tensor, decay: Tensor, beta: Tensor, batch: Batch, caches: Caches) -> Tensor:
        """One token of each decoding request: [R, H, V] fp32."""
        num, slots = batch.num_decodes, batch.decode_slots
        conv, state = caches.conv_layers[self._layer], caches.state_layers[self._layer]
        y, new_conv = kda.conv_step(qkv[:num], self._conv, conv.index_select(0, slots))
        conv.index_copy_(0, slots, new_conv)
        q, k, v = self._heads_of(y)
        return kda.step_slots(q, k, v, decay[:num], beta[:num], state, slots, self._dim**-0.5, backend=self._backend)

    def _advance(self, qkv: Tensor, decay: Tensor, beta: Tensor, slot: int, caches: Caches) -> Tensor:
        """Several tokens of one sequence: [T, H, V] fp32."""
        conv, state = caches.conv_layers[self._layer][slot], caches.state_layers[self._layer][slot]
        y, new_conv = kda.conv_chunk(qkv, self._conv, conv)
        q, k, v = self._heads_of(y)
        o, new_state = kda.chunk(q, k, v, decay, beta, state, self._dim**-0.5)
        conv.copy_(new_conv)
        state.copy_(new_state)
        return o

    def _heads_of(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [..., 3 * H * K] into normalised q and k and plain v, each [..., H, K]."""
        parts = y.unflatten(-1, (3, self._heads, self._dim))
        q, k = kda.l2norm(parts[..., :2, :, :]).unbind(-3)
        return q, k, parts[..., 2, :, :]
