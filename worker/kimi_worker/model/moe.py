"""Feed-forward blocks: the dense MLP, and the latent mixture of experts with its shared experts."""

import torch
from kimi_kernels import router
from kimi_kernels.norm import rms
from kimi_kernels.situ import situ
from torch import Tensor
from torch.nn import functional

from kimi_worker.model.config import KimiConfig
from kimi_worker.model.weights import WeightSource
from kimi_worker.parallel.experts import ExpertExchange
from kimi_worker.parallel.ranks import RankPlace

# Up to so many bytes of expert weights are copied together for one batched product: with few tokens that is cheaper
# than one small product an expert.
_GATHER_BYTES = 4 << 20


class Mlp:
    """down(situ(gate x, up x)), column- and row-parallel over the lane: the dense layer and the shared experts."""

    def __init__(self, source: WeightSource, prefix: str, config: KimiConfig, part: range) -> None:
        """`prefix` ends before `gate_proj`; `part` is the rank's share of the hidden width."""
        self._w_in = source.keep(*(source.linear(f"{prefix}{name}_proj", rows=part) for name in ("gate", "up")))
        self._w_out = source.keep(source.linear(f"{prefix}down_proj", columns=part))
        self._betas = (config.situ_beta, config.situ_linear_beta)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to this rank's part of [T, hidden]."""
        gate, up = functional.linear(x, self._w_in).chunk(2, dim=-1)
        return functional.linear(situ(gate, up, *self._betas), self._w_out)


class Experts:
    """The routed experts that this rank owns, decoded or packed as the source stores them."""

    def __init__(self, source: WeightSource, prefix: str, config: KimiConfig, place: RankPlace) -> None:
        """`prefix` ends in `experts.`."""
        owned = place.experts(config.num_experts)
        self.first = owned.start
        self._w_in = source.experts([[f"{prefix}{e}.w1", f"{prefix}{e}.w3"] for e in owned])
        self._w_out = source.experts([[f"{prefix}{e}.w2"] for e in owned])
        self._betas = (config.situ_beta, config.situ_linear_beta)

    def __call__(self, rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of this rank's experts for every row.

        rows     [n, latent]  activation dtype
        indices  [n, top_k]   int64 global expert ids; those of other ranks are passed over
        weights  [n, top_k]   fp32
        returns  [n, latent]  fp32
        """
        if rows.shape[0] == 0:
            return torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        local = indices - self.first
        is_here = (local >= 0) & (local < self._w_in.num_experts)
        if indices.numel() * (self._w_in.expert_bytes + self._w_out.expert_bytes) <= _GATHER_BYTES:
            return self._run_gathered(rows, torch.where(is_here, local, 0), torch.where(is_here, weights, 0.0))
        return self._run_by_expert(rows, local, is_here, weights)

    def _run_gathered(self, rows: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        """Every choice [n, top_k] has its own copy of its expert, also those of other ranks, which weigh nothing."""
        num, top_k = expert.shape
        copies = rows.unsqueeze(1).expand(-1, top_k, -1).reshape(num * top_k, 1, -1)
        w_in, w_out = (weight.take(expert.flatten(), rows.dtype) for weight in (self._w_in, self._w_out))
        gate, up = torch.bmm(copies, w_in.transpose(1, 2)).chunk(2, dim=-1)
        y = torch.bmm(situ(gate, up, *self._betas), w_out.transpose(1, 2)).view(num, top_k, -1)
        return torch.bmm(weights.unsqueeze(1), y.float()).squeeze(1)

    def _run_by_expert(self, rows: Tensor, local: Tensor, is_here: Tensor, weights: Tensor) -> Tensor:
        """One product an expert over all rows that chose it."""
        token, choice = is_here.nonzero(as_tuple=True)
        expert = local[token, choice]
        order = expert.argsort(stable=True)
        token, weight = token[order], weights[token, choice][order].unsqueeze(-1)
        out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        start = 0
        for e, count in enumerate(torch.bincount(expert, minlength=self._w_in.num_experts).tolist()):
            if count:
                part = slice(start, start + count)
                w_in, w_out = self._w_in.get(e, rows.dtype), self._w_out.get(e, rows.dtype)
                gate, up = functional.linear(rows[token[part]], w_in).chunk(2, dim=-1)
                y = functional.linear(situ(gate, up, *self._betas), w_out)
                out.index_add_(0, token[part], y.float() * weight[part])
                start += count
        return out


class LatentMoe:
    """Routed experts in the latent space plus shared experts on the full width."""

    def __init__(
        self, source: WeightSource, prefix: str, config: KimiConfig, place: RankPlace, exchange: ExpertExchange
    ) -> None:
        """`prefix` ends in `block_sparse_moe.`."""
        self._place, self._exchange, self._config = place, exchange, config
        # The router stays in fp32: close scores decide which experts run.
        self._w_router = source.keep(source.linear(f"{prefix}gate"), dtype=torch.float32)
        self._bias = source.keep(source.read(f"{prefix}gate.e_score_correction_bias"), dtype=torch.float32)
        self._w_down = source.keep(source.linear(f"{prefix}routed_expert_down_proj"))
        self._w_up = source.keep(source.linear(f"{prefix}routed_expert_up_proj"))
        self._norm = source.keep(source.read(f"{prefix}routed_expert_norm.weight"))
        part = place.share(config.shared_width, "num_shared_experts * moe_intermediate_size")
        self._shared = Mlp(source, f"{prefix}shared_experts.", config, part)
        self._experts = Experts(source, f"{prefix}experts.", config, place)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to this rank's part of [T, hidden].

        The ranks of a lane hold the same rows, so each routes only its share of them; the sum over the lane that the
        shared experts need anyway puts the shares together.
        """
        num, size, rank = x.shape[0], self._place.tp_size, self._place.tp_rank
        own = slice(num * rank // size, num * (rank + 1) // size)
        routed = self._route(x[own])
        if size == 1:
            return self._shared(x) + routed
        out = self._shared(x)
        out[own] += routed
        return out

    def join_idle(self, x: Tensor) -> None:
        """Take part in the exchange without tokens; x is [0, hidden]."""
        self._route(x)

    def _route(self, x: Tensor) -> Tensor:
        config = self._config
        indices, weights = router.route(
            x, self._w_router, self._bias, config.experts_per_token,
            renormalize=config.renormalize, scaling=config.routed_scaling,
        )  # fmt: skip
        latent = functional.linear(x, self._w_down)
        # The sum over experts comes before the norm, which is not linear.
        combined = self._exchange.run(latent, indices, weights, self._experts).to(x.dtype)
        return functional.linear(rms(combined, self._norm, config.rms_norm_eps), self._w_up)
