"""Kimi-K3 in float64, one token at a time, written from its formulas: the slow truth for every faster form.

It shares no code with the kernels or the worker: own file reading, own MXFP4 decoding, plain loops over tokens and
heads. Sizes come from config.json, so it runs any checkpoint in the released format that fits in memory.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

PREFIX = "language_model."
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
L2_EPS = 1e-6
LORA_EPS = 1e-6


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """[rows, n/2] and [rows, n/32] bytes to [rows, n] float64, byte by byte as the format says."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    columns = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    columns[:, 0::2] = table[(packed % 16).long()]
    columns[:, 1::2] = table[(packed // 16).long()]
    return columns * (2.0 ** (scale.double() - 127)).repeat_interleave(32, dim=1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def mix(rows: Sequence[Tensor], norm: Tensor, proj: Tensor, eps: float = 1e-5) -> Tensor:
    """AttnRes over rows of [D]: softmax of the normalised rows' scores, sum of the raw rows."""
    scores = [((row / torch.sqrt((row * row).mean() + eps)) * norm * proj).sum() for row in rows]
    largest = max(scores)
    weights = [torch.exp(score - largest) for score in scores]
    return sum(weight * row for weight, row in zip(weights, rows, strict=True)) / sum(weights)


@dataclass
class LayerState:
    """What one layer remembers of the tokens before: convolution inputs and S, or latent rows."""

    conv: dict[str, list[Tensor]] = field(default_factory=dict)
    memory: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)


class K3Reference:
    """A checkpoint folder as a function from token ids to logits."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
        self.linear = self.config["linear_attn_config"]
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        self.raw: dict[str, Tensor] = {}
        for file_name in set(index["weight_map"].values()):
            with safe_open(folder / file_name, "pt") as file:
                self.raw |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        self.cache: dict[str, Tensor] = {}

    def weight(self, name: str) -> Tensor:
        """A tensor below `language_model.` as float64; quantised exactly when its packed form exists."""
        if name not in self.cache:
            stem = PREFIX + name
            packed = self.raw.get(f"{stem}.weight_packed")
            if packed is not None:
                self.cache[name] = decode_mxfp4(packed, self.raw[f"{stem}.weight_scale"])
            else:
                self.cache[name] = self.raw[f"{stem}.weight" if f"{stem}.weight" in self.raw else stem].double()
        return self.cache[name]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits after each token: [T, vocab] float64. Starts from an empty state."""
        states = [LayerState() for _ in range(self.config["num_hidden_layers"])]
        return torch.stack([self.step(token, states) for token in tokens])

    def step(self, token: int, states: list[LayerState]) -> Tensor:
        """Logits [vocab] after one more token; states are advanced."""
        eps = self.config["rms_norm_eps"]
        prefix = self.weight("model.embed_tokens")[token]
        bank: list[Tensor] = []
        for index, state in enumerate(states):
            name = f"model.layers.{index}"
            x = self._mix_site(f"{name}.self_attention_res", prefix, bank) if bank else prefix
            starts_block = index % self.config["attn_res_block_size"] == 0
            if starts_block:
                bank = [*bank, prefix]
            is_full = index + 1 in self.linear["full_attn_layers"]
            attend = self._mla if is_full else self._kda
            attended = attend(f"{name}.self_attn", rms(x, self.weight(f"{name}.input_layernorm"), eps), state)
            prefix = attended if starts_block else prefix + attended
            x = self._mix_site(f"{name}.mlp_res", prefix, bank)
            x = rms(x, self.weight(f"{name}.post_attention_layernorm"), eps)
            dense = index < self.config["first_k_dense_replace"]
            prefix = prefix + (self._mlp(f"{name}.mlp", x) if dense else self._moe(f"{name}.block_sparse_moe", x))
        x = self._mix_site("model.output_attn_res", prefix, bank)
        return self.weight("lm_head") @ rms(x, self.weight("model.norm"), eps)

    def _mix_site(self, name: str, prefix: Tensor, bank: list[Tensor]) -> Tensor:
        return mix([*bank, prefix], self.weight(f"{name}_norm"), self.weight(f"{name}_proj")[0])

    def _conv(self, name: str, x: Tensor, state: LayerState) -> Tensor:
        """Four taps over this input and the three before it, then SiLU."""
        taps = self.weight(f"{name}_conv1d")[:, 0]
        window = [*state.conv.get(name, [torch.zeros_like(x)] * 3), x]
        state.conv[name] = window[1:]
        y = sum(taps[:, j] * window[j] for j in range(4))
        return y * torch.sigmoid(y)

    def _kda(self, name: str, x: Tensor, state: LayerState) -> Tensor:
        heads, dim = self.linear["num_heads"], self.linear["head_dim"]
        inputs = {part: self.weight(f"{name}.{part}_proj") @ x for part in "qkv"}
        q, k, v = (self._conv(f"{name}.{part}", inputs[part], state).view(heads, dim) for part in "qkv")
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + L2_EPS) * dim**-0.5
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + L2_EPS)
        z = self.weight(f"{name}.f_b_proj") @ (self.weight(f"{name}.f_a_proj") @ x) + self.weight(f"{name}.dt_bias")
        rate = torch.exp(self.weight(f"{name}.A_log")[:heads, None])
        decay = self.linear["gate_lower_bound"] * torch.sigmoid(rate * z.view(heads, dim))
        beta = torch.sigmoid(self.weight(f"{name}.b_proj") @ x)
        memory = torch.zeros(heads, dim, dim, dtype=torch.float64) if state.memory is None else state.memory
        outputs = []
        updated = []
        for h in range(heads):
            s = torch.exp(decay[h])[:, None] * memory[h]
            s = s + beta[h] * torch.outer(k[h], v[h] - s.T @ k[h])
            updated.append(s)
            outputs.append(rms(s.T @ q[h], self.weight(f"{name}.o_norm"), self.config["rms_norm_eps"]))
        state.memory = torch.stack(updated)
        gated = torch.cat(outputs) * torch.sigmoid(self.weight(f"{name}.g_proj") @ x)
        return self.weight(f"{name}.o_proj") @ gated

    def _mla(self, name: str, x: Tensor, state: LayerState) -> Tensor:
        c = self.config
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        rank, v_dim = c["kv_lora_rank"], c["v_head_dim"]
        low = rms(self.weight(f"{name}.q_a_proj") @ x, self.weight(f"{name}.q_a_layernorm"), LORA_EPS)
        q = (self.weight(f"{name}.q_b_proj") @ low).view(heads, nope + rope)
        row = self.weight(f"{name}.kv_a_proj_with_mqa") @ x
        latent = rms(row[:rank], self.weight(f"{name}.kv_a_layernorm"), LORA_EPS)
        state.rows.append(torch.cat([latent, row[rank:]]))
        rows = torch.stack(state.rows)
        kv_b = self.weight(f"{name}.kv_b_proj").view(heads, nope + v_dim, rank)
        outputs = []
        for h in range(heads):
            keys = torch.cat([rows[:, :rank] @ kv_b[h, :nope].T, rows[:, rank:]], dim=1)
            share = torch.softmax(keys @ q[h] / math.sqrt(nope + rope), dim=0)
            outputs.append(share @ (rows[:, :rank] @ kv_b[h, nope:].T))
        return self.weight(f"{name}.o_proj") @ (torch.cat(outputs) * torch.sigmoid(self.weight(f"{name}.g_proj") @ x))

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        return situ(gate, up, self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"])

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        inner = self._situ(self.weight(f"{name}.gate_proj") @ x, self.weight(f"{name}.up_proj") @ x)
        return self.weight(f"{name}.down_proj") @ inner

    def _moe(self, name: str, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.weight(f"{name}.gate") @ x)
        biased = scores + self.weight(f"{name}.gate.e_score_correction_bias")
        chosen = sorted(range(len(biased)), key=lambda e: -biased[e].item())[: self.config["num_experts_per_token"]]
        total = sum(scores[e] for e in chosen) + 1e-20
        z = self.weight(f"{name}.routed_expert_down_proj") @ x
        mixed = torch.zeros_like(z)
        for e in chosen:
            expert = f"{name}.experts.{e}"
            inner = self._situ(self.weight(f"{expert}.w1") @ z, self.weight(f"{expert}.w3") @ z)
            share = scores[e] / total * self.config["routed_scaling_factor"]
            mixed = mixed + share * (self.weight(f"{expert}.w2") @ inner)
        mixed = rms(mixed, self.weight(f"{name}.routed_expert_norm"), self.config["rms_norm_eps"])
        return self.weight(f"{name}.routed_expert_up_proj") @ mixed + self._mlp(f"{name}.shared_experts", x)
