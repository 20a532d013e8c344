"""Kimi-K3 over whole sequences, differentiable, built from kimi_kernels.

Parameters carry the released names below `language_model.`; only the experts are stacked, one tensor for w1, w2 and w3.
"""

import torch
from kimi_kernels import attn_res, kda, mla, mxfp4, norm, router, situ
from torch import Tensor, nn
from torch.nn import functional

from tiny_k3.sizes import Sizes


class Weight(nn.Module):
    """One tensor named `weight`, so that a plain tree of modules gives the released names."""

    def __init__(self, *shape: int, std: float | None = None, value: float | None = None) -> None:
        super().__init__()
        if value is None:
            data = torch.randn(*shape) * (shape[-1] ** -0.5 if std is None else std)
        else:
            data = torch.full(shape, value)
        self.weight = nn.Parameter(data)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Kda(nn.Module):
    """One Kimi Delta Attention layer from a zero state."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, heads, dim = sizes.hidden, sizes.heads, sizes.kda_dim
        width = heads * dim
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, Weight(width, hidden))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            setattr(self, name, Weight(width, 1, kda.CONV_TAPS, std=0.3))
        self.f_a_proj = Weight(dim, hidden)
        self.f_b_proj = Weight(width, dim)
        self.b_proj = Weight(heads, hidden)
        self.o_norm = Weight(dim, value=1.0)
        self.o_proj = Weight(hidden, width, std=0.5 * width**-0.5)
        self.A_log = nn.Parameter(torch.zeros(heads))
        # Each head starts at its own pace, the slowest forgets little in a thousand tokens: with fast decay alone a
        # needle is gone before anything is learnt from it.
        pace = torch.logspace(-0.5, -3.5, heads) / -sizes.gate_lower_bound
        self.dt_bias = nn.Parameter(torch.logit(pace).repeat_interleave(dim))
        # Queries start as keys do, over a plain sum of four tokens: what was seen before is found from the first step,
        # and training only has to choose. From unlike starts the look-up by key did not form in 500 steps.
        self.k_proj.weight.data.copy_(self.q_proj.weight.data)
        self.q_conv1d.weight.data.fill_(0.5)
        self.k_conv1d.weight.data.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        heads, dim = self.sizes.heads, self.sizes.kda_dim
        width = heads * dim
        inputs = (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj)
        mixed = functional.linear(x, torch.cat([part.weight for part in inputs]))
        qkv, output_gate, low, b = mixed.split([3 * width, width, dim, heads], dim=-1)
        taps = torch.cat([conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        qkv, _ = kda.conv_chunk(qkv, taps, qkv.new_zeros(*qkv.shape[:-2], kda.CONV_TAPS - 1, 3 * width))
        q, k, v = qkv.unflatten(-1, (3 * heads, dim)).split(heads, dim=-2)
        decay = kda.gate(
            self.f_b_proj(low).unflatten(-1, (heads, dim)), self.A_log, self.dt_bias, self.sizes.gate_lower_bound
        )
        state = x.new_zeros(*x.shape[:-2], heads, dim, dim)
        beta = torch.sigmoid(b)
        o, _ = kda.chunk(kda.l2norm(q), kda.l2norm(k), v, decay, beta, state, dim**-0.5)
        output_gate = output_gate.unflatten(-1, (heads, dim))
        return self.o_proj(kda.gated_norm(o, output_gate, self.o_norm.weight, self.sizes.eps).flatten(-2))


class Mla(nn.Module):
    """One gated latent attention layer, keys and values expanded."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, heads = sizes.hidden, sizes.heads
        self.q_a_proj = Weight(sizes.q_lora, hidden)
        self.q_a_layernorm = Weight(sizes.q_lora, value=1.0)
        self.q_b_proj = Weight(heads * (sizes.nope + sizes.rope), sizes.q_lora)
        self.kv_a_proj_with_mqa = Weight(sizes.kv_lora + sizes.rope, hidden)
        self.kv_a_layernorm = Weight(sizes.kv_lora, value=1.0)
        self.kv_b_proj = Weight(heads * (sizes.nope + sizes.v_dim), sizes.kv_lora)
        self.g_proj = Weight(heads * sizes.v_dim, hidden)
        self.o_proj = Weight(hidden, heads * sizes.v_dim, std=0.5 * (heads * sizes.v_dim) ** -0.5)
        # As in KDA, queries start as keys do.
        self.kv_a_proj_with_mqa.weight.data[: sizes.kv_lora].copy_(self.q_a_proj.weight.data)
        keys = self.kv_b_proj.weight.data.unflatten(0, (heads, -1))[:, : sizes.nope]
        keys.copy_(self.q_b_proj.weight.data.unflatten(0, (heads, -1))[:, : sizes.nope])

    def forward(self, x: Tensor) -> Tensor:
        sizes, heads = self.sizes, self.sizes.heads
        q = self.q_b_proj(norm.rms(self.q_a_proj(x), self.q_a_layernorm.weight, sizes.lora_eps))
        q = q.unflatten(-1, (heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split([sizes.kv_lora, sizes.rope], dim=-1)
        latent = norm.rms(latent, self.kv_a_layernorm.weight, sizes.lora_eps)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (heads, -1)).split([sizes.nope, sizes.v_dim], dim=-1)
        k = torch.cat([k_nope, shared.unsqueeze(-2).expand(*k_nope.shape[:-1], sizes.rope)], dim=-1)
        o = mla.full(q, k, v, (sizes.nope + sizes.rope) ** -0.5).flatten(-2)
        return self.o_proj(o * torch.sigmoid(self.g_proj(x)))


class Mlp(nn.Module):
    """SiTU-GLU MLP: layer 0 and the shared experts."""

    def __init__(self, sizes: Sizes, width: int) -> None:
        super().__init__()
        self.betas = (sizes.situ_beta, sizes.situ_linear_beta)
        self.gate_proj = Weight(width, sizes.hidden)
        self.up_proj = Weight(width, sizes.hidden)
        self.down_proj = Weight(sizes.hidden, width, std=0.5 * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(situ.situ(self.gate_proj(x), self.up_proj(x), *self.betas))


class Gate(nn.Module):
    """The router's two tensors and the load that its bias is moved against."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sizes.experts, sizes.hidden) * sizes.hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(sizes.experts))
        self.register_buffer("load", torch.zeros(sizes.experts), persistent=False)


class Moe(nn.Module):
    """Latent mixture of experts with shared experts beside it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        experts, width, latent = sizes.experts, sizes.expert_width, sizes.latent
        self.gate = Gate(sizes)
        self.routed_expert_down_proj = Weight(latent, sizes.hidden)
        self.routed_expert_norm = Weight(latent, value=1.0)
        self.routed_expert_up_proj = Weight(sizes.hidden, latent, std=0.5 * latent**-0.5)
        self.shared_experts = Mlp(sizes, sizes.shared_experts * width)
        self.w1 = nn.Parameter(torch.randn(experts, width, latent) * latent**-0.5)
        self.w3 = nn.Parameter(torch.randn(experts, width, latent) * latent**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, latent, width) * width**-0.5)
        self.rounds_experts = False

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.sizes
        flat = x.flatten(0, -2)
        indices, weights = router.route(flat, self.gate.weight, self.gate.e_score_correction_bias, sizes.top_k)
        counts = torch.bincount(indices.flatten(), minlength=sizes.experts)
        if self.training:
            self.gate.load += counts
        # Rows sorted by expert, so that each expert is one product over its own rows.
        order = indices.flatten().argsort()
        token = order // sizes.top_k
        rows = self.routed_expert_down_proj(flat).index_select(0, token).split(counts.tolist())
        w1, w2, w3 = (mxfp4.fake_quantise(w) if self.rounds_experts else w for w in (self.w1, self.w2, self.w3))
        both = torch.cat([functional.linear(r, w) for r, w in zip(rows, torch.cat([w1, w3], 1), strict=True)])
        inner = situ.situ(*both.chunk(2, dim=-1), sizes.situ_beta, sizes.situ_linear_beta).split(counts.tolist())
        outer = torch.cat([functional.linear(r, w) for r, w in zip(inner, w2, strict=True)])
        outer = outer * weights.flatten()[order].unsqueeze(-1)
        mixed = outer.new_zeros(flat.shape[0], sizes.latent).index_add(0, token, outer).view(*x.shape[:-1], -1)
        mixed = norm.rms(mixed, self.routed_expert_norm.weight, sizes.eps)
        return self.routed_expert_up_proj(mixed) + self.shared_experts(x)


class Layer(nn.Module):
    """One layer with its two AttnRes sites."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        self.eps = sizes.eps
        self.starts_block = index % sizes.attn_res_block == 0
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            setattr(self, name, Weight(sizes.hidden, value=1.0))
        self.self_attention_res_proj = Weight(1, sizes.hidden, value=0.0)
        self.mlp_res_proj = Weight(1, sizes.hidden, value=0.0)
        self.self_attn = Mla(sizes) if index in sizes.mla_layers else Kda(sizes)
        if index == 0:
            self.mlp = Mlp(sizes, sizes.dense)
        else:
            self.block_sparse_moe = Moe(sizes)

    def forward(self, prefix: Tensor, bank: list[Tensor]) -> Tensor:
        x = _mix(prefix, bank, self.self_attention_res_norm, self.self_attention_res_proj) if bank else prefix
        attended = self.self_attn(norm.rms(x, self.input_layernorm.weight, self.eps))
        if self.starts_block:
            bank.append(prefix)
            prefix = attended
        else:
            prefix = prefix + attended
        x = norm.rms(
            _mix(prefix, bank, self.mlp_res_norm, self.mlp_res_proj), self.post_attention_layernorm.weight, self.eps
        )
        return prefix + (self.mlp(x) if hasattr(self, "mlp") else self.block_sparse_moe(x))


def _mix(prefix: Tensor, bank: list[Tensor], site_norm: Weight, site_proj: Weight) -> Tensor:
    return attn_res.mix(prefix, torch.stack(bank), attn_res.site_weight(site_norm.weight, site_proj.weight))


class TinyK3(nn.Module):
    """The text model; forward gives the final rows, logits come from lm_head on the rows that matter."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = nn.ModuleDict(
            {
                "embed_tokens": Weight(sizes.vocab, sizes.hidden, std=1.0),
                "layers": nn.ModuleList(Layer(sizes, index) for index in range(sizes.layers)),
                "norm": Weight(sizes.hidden, value=1.0),
                "output_attn_res_norm": Weight(sizes.hidden, value=1.0),
                "output_attn_res_proj": Weight(1, sizes.hidden, value=0.0),
            }
        )
        self.lm_head = Weight(sizes.vocab, sizes.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..., T] int64 to final rows [..., T, hidden] fp32."""
        prefix = functional.embedding(tokens, self.model["embed_tokens"].weight)
        bank: list[Tensor] = []
        for layer in self.model["layers"]:
            prefix = layer(prefix, bank)
        mixed = _mix(prefix, bank, self.model["output_attn_res_norm"], self.model["output_attn_res_proj"])
        return norm.rms(mixed, self.model["norm"].weight, self.sizes.eps)
