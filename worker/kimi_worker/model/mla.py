"""A gated multi-head latent attention layer over the rank's heads."""

import torch
from kimi_kernels import mla
from kimi_kernels.norm import rms
from torch import Tensor
from torch.nn import functional

from kimi_worker.engine.caches import Caches
from kimi_worker.model.attention import LatentAttention
from kimi_worker.model.batch import Batch
from kimi_worker.model.config import LATENT_NORM_EPS, KimiConfig
from kimi_worker.model.weights import WeightSource
from kimi_worker.parallel.ranks import RankPlace


class MlaAttention:
    """Holds the weights of this rank's heads; the latent rows live in the caches and are the same on every rank."""

    def __init__(
        self, source: WeightSource, prefix: str, config: KimiConfig, place: RankPlace, cache_layer: int
    ) -> None:
        """`prefix` ends in `self_attn.`; `cache_layer` is the layer's index among the MLA layers."""
        heads = place.share(config.num_heads, "num_attention_heads")
        self._heads, self._layer = len(heads), cache_layer
        self._query_split = [config.nope_dim, config.rope_dim]
        self._row_split = [config.kv_lora_rank, config.rope_dim]
        scale = (config.nope_dim + config.rope_dim) ** -0.5
        self._attention = LatentAttention(scale, config.kv_lora_rank, source.forms)

        def rows(width: int) -> range:
            return range(heads.start * width, heads.stop * width)

        # One product for everything that reads the layer's input: query latent, cache row and output gate.
        self._w_in = source.keep(
            source.linear(f"{prefix}q_a_proj"),
            source.linear(f"{prefix}kv_a_proj_with_mqa"),
            source.linear(f"{prefix}g_proj", rows=rows(config.v_dim)),
        )
        self._split = [config.q_lora_rank, config.latent_row, self._heads * config.v_dim]
        self._q_norm = source.keep(source.read(f"{prefix}q_a_layernorm.weight"))
        self._kv_norm = source.keep(source.read(f"{prefix}kv_a_layernorm.weight"))
        query_width = config.nope_dim + config.rope_dim
        self._w_query = source.keep(source.linear(f"{prefix}q_b_proj", rows=rows(query_width)))
        both = source.keep(source.linear(f"{prefix}kv_b_proj", rows=rows(config.nope_dim + config.v_dim)))
        self._w_uk, self._w_uv = mla.split_kv_b(both, self._heads, config.nope_dim)
        self._w_out = source.keep(source.linear(f"{prefix}o_proj", columns=rows(config.v_dim)))

    def __call__(self, x: Tensor, batch: Batch, caches: Caches) -> Tensor:
        """[T, hidden] to this rank's part of [T, hidden]; writes the batch's latent rows."""
        query_latent, row, gate = functional.linear(x, self._w_in).split(self._split, dim=-1)
        latent, rope = row.split(self._row_split, dim=-1)
        row = torch.cat([rms(latent, self._kv_norm, LATENT_NORM_EPS), rope], dim=-1)
        pages = caches.page_layers[self._layer]
        pages.index_put_((batch.row_pages, batch.row_offsets), row.to(pages.dtype))
        query = functional.linear(rms(query_latent, self._q_norm, LATENT_NORM_EPS), self._w_query)
        nope, rope = query.unflatten(-1, (self._heads, -1)).split(self._query_split, dim=-1)
        attended = self._attend(mla.absorb_query(nope, rope, self._w_uk), batch, pages)
        values = mla.expand_output(attended, self._w_uv).flatten(-2)
        return functional.linear(values * torch.sigmoid(gate), self._w_out)

    def _attend(self, query: Tensor, batch: Batch, pages: Tensor) -> Tensor:
        """Query [T, H, L + rope] over the pages [P, S, L + rope] of this layer: [T, H, L]."""
        outputs = []
        if num := batch.num_decodes:
            outputs.append(self._attention.decodes(query[:num], pages, batch))
        for piece in batch.pieces:
            outputs.append(self._attention.piece(query[piece.start : piece.stop], pages, piece))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
