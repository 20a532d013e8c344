"""Kimi-K3's forward pass for one rank, for inference only."""

from collections.abc import Callable

import torch
from kimi_kernels.norm import rms
from torch import Tensor
from torch.nn import functional

from kimi_worker.engine.caches import Caches
from kimi_worker.model.attn_res import MixSite, ResidualStream
from kimi_worker.model.batch import Batch
from kimi_worker.model.inventory import LM_HEAD, MODEL, layer_prefix
from kimi_worker.model.kda import KdaAttention
from kimi_worker.model.mla import MlaAttention
from kimi_worker.model.moe import LatentMoe, Mlp
from kimi_worker.model.weights import WeightSource
from kimi_worker.parallel.experts import ExpertExchange, exchange_for
from kimi_worker.parallel.groups import Groups


class Layer:
    """One decoder layer: attention and feed-forward, each reading a mix of the residual stream."""

    def __init__(self, source: WeightSource, layer: int, groups: Groups, exchange: ExpertExchange) -> None:
        config, place = source.checkpoint.config, groups.place
        prefix = layer_prefix(layer)
        self._layer, self._eps, self._lane = layer, config.rms_norm_eps, groups.lane
        self._attention_site = MixSite(source, f"{prefix}self_attention_res", config)
        self._ffn_site = MixSite(source, f"{prefix}mlp_res", config)
        self._attention_norm = source.keep(source.read(f"{prefix}input_layernorm.weight"))
        self._ffn_norm = source.keep(source.read(f"{prefix}post_attention_layernorm.weight"))
        attention = f"{prefix}self_attn."
        self._attention: Callable[[Tensor, Batch, Caches], Tensor]
        if layer in config.mla_layers:
            self._attention = MlaAttention(source, attention, config, place, config.mla_layers.index(layer))
        else:
            self._attention = KdaAttention(source, attention, config, place, config.kda_layers.index(layer))
        self._ffn: Mlp | LatentMoe
        if layer < config.dense_layers:
            self._ffn = Mlp(source, f"{prefix}mlp.", config, place.share(config.dense_width, "intermediate_size"))
        else:
            self._ffn = LatentMoe(source, f"{prefix}block_sparse_moe.", config, place, exchange)

    def __call__(self, stream: ResidualStream, batch: Batch, caches: Caches) -> None:
        """Advance the stream by this layer."""
        mixed = self._attention_site(stream)
        stream.begin_layer(self._layer)
        stream.add(self._sum(self._attention(rms(mixed, self._attention_norm, self._eps), batch, caches)))
        stream.add(self._sum(self._ffn(rms(self._ffn_site(stream), self._ffn_norm, self._eps))))

    def join_idle(self, nothing: Tensor) -> None:
        """Without tokens only the exchange with the other lanes remains; `nothing` is [0, hidden]."""
        if isinstance(self._ffn, LatentMoe):
            self._ffn.join_idle(nothing)

    def _sum(self, part: Tensor) -> Tensor:
        return part if self._lane is None else self._lane.all_reduce(part)


class Kimi:
    """The whole model on one rank: embedding, layers, head."""

    def __init__(self, source: WeightSource, groups: Groups) -> None:
        config, place = source.checkpoint.config, groups.place
        self._config, self._lane, self._dtype, self._device = config, groups.lane, source.dtype, source.device
        self._vocab = place.share(config.vocab_size, "vocab_size")
        exchange = exchange_for(groups, config.num_experts)
        self._embedding = source.keep(source.linear(f"{MODEL}embed_tokens", rows=self._vocab))
        self._layers = [Layer(source, layer, groups, exchange) for layer in range(config.num_layers)]
        self._final_site = MixSite(source, f"{MODEL}output_attn_res", config)
        self._norm = source.keep(source.read(f"{MODEL}norm.weight"))
        self._head = source.keep(source.linear(LM_HEAD, rows=self._vocab))

    def forward(self, batch: Batch, caches: Caches) -> Tensor | None:
        """Run one step. Collective over the group.

        returns  [n, vocab] fp32, logits of the batch's sampled tokens, on the lane's leader; None on its followers
        """
        if batch.num_tokens == 0:
            nothing = torch.empty(0, self._config.hidden_size, dtype=self._dtype, device=self._device)
            for layer in self._layers:
                layer.join_idle(nothing)
            return self._logits(nothing)
        stream = ResidualStream(self._embed(batch.token_ids), self._config)
        for layer in self._layers:
            layer(stream, batch, caches)
        stream.select(batch.sampled)
        return self._logits(self._final_site(stream))

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding, of which each rank of the lane holds a part: [T, hidden]."""
        if self._lane is None:
            return self._embedding[token_ids]
        local = token_ids - self._vocab.start
        is_here = (local >= 0) & (local < len(self._vocab))
        rows = self._embedding[torch.where(is_here, local, 0)] * is_here.unsqueeze(-1)
        return self._lane.all_reduce(rows)

    def _logits(self, mixed: Tensor) -> Tensor | None:
        """[n, hidden] to [n, vocab] fp32 on the leader; the same n on every rank of the lane."""
        part = functional.linear(rms(mixed, self._norm, self._config.rms_norm_eps), self._head)
        if self._lane is None:
            return part.float()
        if mixed.shape[0] == 0:
            return part.new_empty(0, self._config.vocab_size, dtype=torch.float32) if self._lane.rank == 0 else None
        parts = self._lane.gather(part)
        return None if parts is None else torch.cat(parts, dim=-1).float()
