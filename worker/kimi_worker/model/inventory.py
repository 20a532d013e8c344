"""Names, types and shapes of the released checkpoint's tensors, from the model's sizes. No torch."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from kimi_worker.model.config import KimiConfig

MODEL = "language_model.model."
LM_HEAD = "language_model.lm_head"
ANY = -1
"""In an expected shape: any size."""

_CONV_TAPS = 4
_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that is never quantised, under its full name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def tensors(self, present: Container[str]) -> Iterator["Plain"]:  # noqa: ARG002 - one form whatever is there
        yield self


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: `<base>.weight` in bf16, or MXFP4 exactly when `<base>.weight_packed` is present."""

    base: str
    out_width: int
    in_width: int

    def tensors(self, present: Container[str]) -> Iterator[Plain]:
        """The tensors that hold this layer, given the names that the checkpoint has."""
        if f"{self.base}.weight_packed" not in present:
            yield Plain(f"{self.base}.weight", "BF16", (self.out_width, self.in_width))
            return
        yield Plain(f"{self.base}.weight_packed", "U8", (self.out_width, self.in_width // 2))
        yield Plain(f"{self.base}.weight_scale", "U8", (self.out_width, self.in_width // _GROUP_SIZE))


Item = Plain | Linear


def layer_prefix(layer: int) -> str:
    """Prefix of all names of a 0-based layer."""
    return f"{MODEL}layers.{layer}."


def inventory(config: KimiConfig) -> Iterator[Item]:
    """Everything that the language model consists of."""
    hidden = config.hidden_size
    yield Linear(f"{MODEL}embed_tokens", config.vocab_size, hidden)
    yield Linear(LM_HEAD, config.vocab_size, hidden)
    yield _vector(f"{MODEL}norm", hidden)
    yield from _mix_site(f"{MODEL}output_attn_res", hidden)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        yield _vector(f"{prefix}input_layernorm", hidden)
        yield _vector(f"{prefix}post_attention_layernorm", hidden)
        yield from _mix_site(f"{prefix}self_attention_res", hidden)
        yield from _mix_site(f"{prefix}mlp_res", hidden)
        yield from (_mla if layer in config.mla_layers else _kda)(config, f"{prefix}self_attn.")
        if layer < config.dense_layers:
            yield from _mlp(f"{prefix}mlp.", hidden, config.dense_width)
        else:
            yield from _moe(config, f"{prefix}block_sparse_moe.")


def _vector(base: str, size: int) -> Plain:
    return Plain(f"{base}.weight", "BF16", (size,))


def _mix_site(base: str, hidden: int) -> Iterator[Plain]:
    yield _vector(f"{base}_norm", hidden)
    yield Plain(f"{base}_proj.weight", "BF16", (1, hidden))


def _mla(config: KimiConfig, prefix: str) -> Iterator[Item]:
    hidden, heads = config.hidden_size, config.num_heads
    yield Linear(f"{prefix}q_a_proj", config.q_lora_rank, hidden)
    yield _vector(f"{prefix}q_a_layernorm", config.q_lora_rank)
    yield Linear(f"{prefix}q_b_proj", heads * (config.nope_dim + config.rope_dim), config.q_lora_rank)
    yield Linear(f"{prefix}kv_a_proj_with_mqa", config.latent_row, hidden)
    yield _vector(f"{prefix}kv_a_layernorm", config.kv_lora_rank)
    yield Linear(f"{prefix}kv_b_proj", heads * (config.nope_dim + config.v_dim), config.kv_lora_rank)
    yield Linear(f"{prefix}g_proj", heads * config.v_dim, hidden)
    yield Linear(f"{prefix}o_proj", hidden, heads * config.v_dim)


def _kda(config: KimiConfig, prefix: str) -> Iterator[Item]:
    hidden, dim = config.hidden_size, config.kda_head_dim
    width = config.kda_num_heads * dim
    for name in ("q", "k", "v", "g"):
        yield Linear(f"{prefix}{name}_proj", width, hidden)
    for name in ("q", "k", "v"):
        yield Plain(f"{prefix}{name}_conv1d.weight", "F32", (width, 1, _CONV_TAPS))
    # Padded past the number of heads in the release (128 entries for 96 heads).
    yield Plain(f"{prefix}A_log", "F32", (ANY,))
    yield Plain(f"{prefix}dt_bias", "F32", (width,))
    yield Linear(f"{prefix}f_a_proj", dim, hidden)
    yield Linear(f"{prefix}f_b_proj", width, dim)
    yield Linear(f"{prefix}b_proj", config.kda_num_heads, hidden)
    yield Plain(f"{prefix}o_norm.weight", "F32", (dim,))
    yield Linear(f"{prefix}o_proj", hidden, width)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[Linear]:
    yield Linear(f"{prefix}gate_proj", width, hidden)
    yield Linear(f"{prefix}up_proj", width, hidden)
    yield Linear(f"{prefix}down_proj", hidden, width)


def _moe(config: KimiConfig, prefix: str) -> Iterator[Item]:
    hidden, latent = config.hidden_size, config.latent_size
    yield Linear(f"{prefix}gate", config.num_experts, hidden)
    yield Plain(f"{prefix}gate.e_score_correction_bias", "F32", (config.num_experts,))
    yield Linear(f"{prefix}routed_expert_down_proj", latent, hidden)
    yield Linear(f"{prefix}routed_expert_up_proj", hidden, latent)
    yield _vector(f"{prefix}routed_expert_norm", latent)
    yield from _mlp(f"{prefix}shared_experts.", hidden, config.shared_width)
    for expert in range(config.num_experts):
        base = f"{prefix}experts.{expert}."
        yield Linear(f"{base}w1", config.expert_width, latent)
        yield Linear(f"{base}w3", config.expert_width, latent)
        yield Linear(f"{base}w2", latent, config.expert_width)
