"""The model's sizes, read from the released `config.json`. No torch here: preflight and the API process read it too."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

CONFIG_FILE = "config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
LATENT_NORM_EPS = 1e-6
"""Eps of `q_a_layernorm` and `kv_a_layernorm`: the released code leaves it at the class default."""


class ConfigError(Exception):
    """config.json is not one that this worker can run; the message names file and field."""


@dataclass(frozen=True, slots=True)
class KimiConfig:
    """Sizes and constants of one Kimi-K3. Layer numbers are 0-based."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    attn_res_block: int
    """A snapshot joins the AttnRes bank at every layer whose number is a multiple of this."""
    mla_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]
    # MLA
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    """Width of the part of a latent row that is not normalised; nothing is rotated."""
    v_dim: int
    # KDA
    kda_num_heads: int
    kda_head_dim: int
    gate_lower_bound: float
    # feed-forward
    dense_layers: int
    """The first so many layers have a dense MLP."""
    dense_width: int
    num_experts: int
    experts_per_token: int
    latent_size: int
    expert_width: int
    shared_width: int
    renormalize: bool
    routed_scaling: float
    situ_beta: float
    situ_linear_beta: float
    # tokens and format
    eos_token_ids: tuple[int, ...]
    media_token_id: int | None
    """Placeholder of an image; a prompt that holds it cannot be served."""
    quantised: bool
    """Whether config.json announces MXFP4 (`mxfp4-pack-quantized`) weights."""

    @property
    def latent_row(self) -> int:
        """Numbers in one MLA cache row: latent and rope part."""
        return self.kv_lora_rank + self.rope_dim


class _Part(BaseModel):
    # Released files carry many fields of the Hugging Face base class that mean nothing here.
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Weights(_Part):
    num_bits: Literal[4] = 4
    type: Literal["float"] = "float"
    group_size: Literal[32] = 32


class _Group(_Part):
    weights: _Weights
    input_activations: None = None
    output_activations: None = None


class _Quantisation(_Part):
    quant_method: Literal["compressed-tensors"]
    format: Literal["mxfp4-pack-quantized"]
    config_groups: dict[str, _Group] = {}
    kv_cache_scheme: None = None


class _LinearAttention(_Part):
    num_heads: PositiveInt
    head_dim: PositiveInt
    short_conv_kernel_size: Literal[4]
    use_full_rank_gate: Literal[True]
    # The chunked form needs decays of at least exp(-5) a token to stay inside float32.
    gate_lower_bound: Annotated[float, Field(ge=-5.0, lt=0.0)]
    full_attn_layers: list[int]
    kda_layers: list[int]


class _Text(_Part):
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    mla_use_nope: Literal[True]
    mla_use_output_gate: Literal[True]
    max_position_embeddings: PositiveInt
    num_experts: PositiveInt
    num_experts_per_token: PositiveInt
    num_shared_experts: PositiveInt
    moe_intermediate_size: PositiveInt
    routed_expert_hidden_size: PositiveInt
    latent_moe_use_norm: Literal[True]
    moe_router_activation_func: Literal["sigmoid"]
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_renormalize: bool
    routed_scaling_factor: PositiveFloat
    num_expert_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    first_k_dense_replace: Annotated[int, Field(ge=0)]
    moe_layer_freq: Literal[1] = 1
    hidden_act: Literal["situ"]
    activation_situ_beta: PositiveFloat
    activation_situ_linear_beta: PositiveFloat
    attn_res_block_size: PositiveInt
    rms_norm_eps: PositiveFloat
    num_nextn_predict_layers: Literal[0] = 0
    tie_word_embeddings: Literal[False] = False
    linear_attn_config: _LinearAttention
    quantization_config: _Quantisation | None = None
    eos_token_id: int | list[int] | None = None

    @model_validator(mode="after")
    def _sizes_agree(self) -> "_Text":
        _check_layers(self.linear_attn_config, self.num_hidden_layers)
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} differs from num_attention_heads "
                f"{self.num_attention_heads}; MLA has one latent for all heads, so both must be equal"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token {self.num_experts_per_token} exceeds num_experts {self.num_experts}"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace {self.first_k_dense_replace} exceeds num_hidden_layers {self.num_hidden_layers}"
            )
        return self


class _Top(_Part):
    model_type: Literal["kimi_k3"]
    architectures: Annotated[list[str], Field(min_length=1)]
    text_config: _Text
    eos_token_id: int | list[int] | None = None
    media_placeholder_token_id: int | None = None
    quantization_config: _Quantisation | None = None

    @model_validator(mode="after")
    def _is_kimi_k3(self) -> "_Top":
        if "KimiK3ForConditionalGeneration" not in self.architectures:
            raise ValueError(f"architectures {self.architectures} lack KimiK3ForConditionalGeneration")
        return self


def _check_layers(linear: _LinearAttention, num_layers: int) -> None:
    """Both lists are 1-based and together name every layer once. Raises ValueError."""
    full, kda = linear.full_attn_layers, linear.kda_layers
    if outside := [layer for layer in full + kda if not 1 <= layer <= num_layers]:
        raise ValueError(
            f"linear_attn_config names layers {outside} outside 1..{num_layers}; "
            "full_attn_layers and kda_layers count from 1"
        )
    if len(full) + len(kda) != num_layers or len({*full, *kda}) != num_layers:
        raise ValueError(
            f"linear_attn_config: full_attn_layers {full} and kda_layers {kda} must name each of the layers "
            f"1..{num_layers} exactly once"
        )


def read_config(checkpoint: Path) -> KimiConfig:
    """Read a checkpoint folder's config.json, and the tokenizer's eos where its file is there. Raises ConfigError."""
    path = checkpoint / CONFIG_FILE
    content = _read_object(path)
    try:
        top = _Top.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        got = f" (got {first['input']!r:.120})" if first["type"] not in {"missing", "value_error"} else ""
        raise ConfigError(
            f"{path}: {field}: {first['msg']}{got}; only released Kimi-K3 checkpoints (model_type kimi_k3) are served"
        ) from error
    eos = read_end_ids(checkpoint)
    if not eos:
        raise ConfigError(f"{path}: eos_token_id: missing; without it no answer would end")
    return _convert(top, eos)


def _read_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; model.checkpoint must be a folder with a released Kimi-K3 checkpoint"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}; copy the file again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """An entry of `added_tokens_decoder`."""

    text: str
    is_hidden: bool
    """Whether the text of an answer leaves it out."""


def read_special_tokens(checkpoint: Path) -> dict[int, SpecialToken]:
    """The special tokens that tokenizer_config.json names, by id. Raises ConfigError."""
    path = checkpoint / TOKENIZER_CONFIG_FILE
    added = _read_object(path).get("added_tokens_decoder", {})
    if not isinstance(added, dict):
        raise ConfigError(f"{path}: added_tokens_decoder: want an object, got {type(added).__name__}")
    tokens = {}
    for key, entry in added.items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not (key.isascii() and key.isdigit() and isinstance(text, str)):
            want = '{"<id>": {"content": "<text>"}}'
            raise ConfigError(f"{path}: added_tokens_decoder: want {want}, got {key[:40]!r}: {entry!r:.80}")
        tokens[int(key)] = SpecialToken(text, bool(entry.get("special", True)))
    return tokens


def read_end_ids(checkpoint: Path) -> tuple[int, ...]:
    """Ids that end an answer: the config's (end of message) and the tokenizer's (end of document) differ in K3.

    A checkpoint without tokenizer_config.json has only the first. Raises ConfigError.
    """
    path = checkpoint / CONFIG_FILE
    content = _read_object(path)
    text_config = content.get("text_config")
    found: list[int] = []
    for part in (content, text_config if isinstance(text_config, dict) else {}):
        value = part.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token_id) is not int:
                raise ConfigError(f"{path}: eos_token_id: want an integer or a list of them, got {value!r:.80}")
            found.append(token_id)
    path = checkpoint / TOKENIZER_CONFIG_FILE
    if path.exists():
        eos = _read_object(path).get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        found += [token_id for token_id, token in read_special_tokens(checkpoint).items() if token.text == text]
    return tuple(sorted(set(found)))


def _convert(top: _Top, eos: tuple[int, ...]) -> KimiConfig:
    text, linear = top.text_config, top.text_config.linear_attn_config
    return KimiConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        attn_res_block=text.attn_res_block_size,
        mla_layers=tuple(sorted(layer - 1 for layer in linear.full_attn_layers)),
        kda_layers=tuple(sorted(layer - 1 for layer in linear.kda_layers)),
        num_heads=text.num_attention_heads,
        q_lora_rank=text.q_lora_rank,
        kv_lora_rank=text.kv_lora_rank,
        nope_dim=text.qk_nope_head_dim,
        rope_dim=text.qk_rope_head_dim,
        v_dim=text.v_head_dim,
        kda_num_heads=linear.num_heads,
        kda_head_dim=linear.head_dim,
        gate_lower_bound=linear.gate_lower_bound,
        dense_layers=text.first_k_dense_replace,
        dense_width=text.intermediate_size,
        num_experts=text.num_experts,
        experts_per_token=text.num_experts_per_token,
        latent_size=text.routed_expert_hidden_size,
        expert_width=text.moe_intermediate_size,
        shared_width=text.num_shared_experts * text.moe_intermediate_size,
        renormalize=text.moe_renormalize,
        routed_scaling=text.routed_scaling_factor,
        situ_beta=text.activation_situ_beta,
        situ_linear_beta=text.activation_situ_linear_beta,
        eos_token_ids=eos,
        media_token_id=top.media_placeholder_token_id,
        quantised=(text.quantization_config or top.quantization_config) is not None,
    )
