"""Sizes of a Kimi-K3 model, read from a config in the shape of the released config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kimi_operator.errors import InvalidSpec, Problem

MOST = 2**24
"""Of any size; a larger one is a slip of the keyboard."""
MOST_LAYERS = 1024


class Vision(Struct, frozen=True):
    """Vision tower and projector. They are part of the checkpoint; the bundled worker does not load them."""

    num_layers: int
    hidden: int
    qkv: int
    intermediate: int
    patch: int
    positions: tuple[int, int]
    merge: tuple[int, int]


class Architecture(Struct, frozen=True):
    """Sizes of the model, in elements unless said otherwise. Layers are counted from 0."""

    name: str
    vocab: int
    hidden: int
    num_layers: int
    mla_layers: frozenset[int]
    num_heads: int
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    kda_heads: int
    kda_head: int
    conv_kernel: int
    dense_layers: int
    """The first layers, whose feed-forward part is dense."""
    dense_width: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    latent: int
    num_shared_experts: int
    quant_group: int
    """Weights that share one scale."""
    max_positions: int
    vision: Vision | None

    @property
    def num_mla_layers(self) -> int:
        """Layers that cache a row a token."""
        return len(self.mla_layers)

    @property
    def num_kda_layers(self) -> int:
        """Layers that keep a state of fixed size."""
        return self.num_layers - len(self.mla_layers)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_layers - self.dense_layers

    @property
    def shared_width(self) -> int:
        """Width of the shared experts together."""
        return self.num_shared_experts * self.expert_width

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert of one layer."""
        return 3 * self.expert_width * self.latent


def read_architecture(name: str, config: Mapping[str, Any]) -> Architecture:
    """Read a config.json. Raises InvalidSpec that names the key which is missing or wrong."""
    text = _Section(name, "text_config", config.get("text_config"))
    linear = _Section(name, "text_config.linear_attn_config", text.values.get("linear_attn_config"))
    num_layers = text.size("num_hidden_layers", most=MOST_LAYERS)
    architecture = Architecture(
        name=name,
        vocab=text.size("vocab_size"),
        hidden=text.size("hidden_size"),
        num_layers=num_layers,
        mla_layers=_mla_layers(linear, num_layers),
        num_heads=text.size("num_attention_heads"),
        q_lora=text.size("q_lora_rank"),
        kv_lora=text.size("kv_lora_rank"),
        qk_nope=text.size("qk_nope_head_dim"),
        qk_rope=text.size("qk_rope_head_dim"),
        v_head=text.size("v_head_dim"),
        kda_heads=linear.size("num_heads"),
        kda_head=linear.size("head_dim"),
        conv_kernel=linear.size("short_conv_kernel_size"),
        dense_layers=text.size("first_k_dense_replace", least=0),
        dense_width=text.size("intermediate_size"),
        num_experts=text.size("num_experts"),
        experts_per_token=text.size("num_experts_per_token"),
        expert_width=text.size("moe_intermediate_size"),
        latent=text.size("routed_expert_hidden_size"),
        num_shared_experts=text.size("num_shared_experts"),
        quant_group=_quant_group(text),
        max_positions=text.size("max_position_embeddings"),
        vision=_vision(name, config.get("vision_config")),
    )
    _check_agreement(architecture, text)
    return architecture


def _check_agreement(a: Architecture, text: _Section) -> None:
    """Sizes that are possible each, but not together."""
    if a.dense_layers > a.num_layers:
        raise text.refuse("first_k_dense_replace", a.dense_layers, f"at most num_hidden_layers, {a.num_layers}")
    if a.experts_per_token > a.num_experts:
        raise text.refuse("num_experts_per_token", a.experts_per_token, f"at most num_experts, {a.num_experts}")
    if not 0 < a.num_mla_layers < a.num_layers:
        expected = f"some but not all of the {a.num_layers} layers: the others are KDA layers"
        raise text.refuse("linear_attn_config.full_attn_layers", f"{a.num_mla_layers} layers", expected)
    for key, width in (("moe_intermediate_size", a.expert_width), ("routed_expert_hidden_size", a.latent)):
        if width % a.quant_group or width % 2:
            raise text.refuse(key, width, f"an even multiple of the {a.quant_group} weights that share a scale")


class _Section(Struct, frozen=True):
    """One object of the config, with the path that errors name."""

    architecture: str
    path: str
    values: Any

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise self.refuse("", self.values, "an object")

    def refuse(self, key: str, got: object, expected: str) -> InvalidSpec:
        """The error for one key."""
        path = f"{self.architecture}/config.json:{self.path}" + (f".{key}" if key else "")
        return InvalidSpec((Problem(path, repr(got), expected, "use the config.json of a Kimi-K3 checkpoint"),))

    def size(self, key: str, *, least: int = 1, most: int = MOST) -> int:
        """A whole number in a range."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refuse(key, value, f"a whole number from {least} to {most:,}")
        return value

    def pair(self, key: str) -> tuple[int, int]:
        """Two positive whole numbers."""
        value = self.values.get(key)
        match value:
            case [int(first), int(second)] if 0 < first <= MOST and 0 < second <= MOST:
                return first, second
            case _:
                raise self.refuse(key, value, "two positive whole numbers")


def _mla_layers(linear: _Section, num_layers: int) -> frozenset[int]:
    """The config counts layers from 1."""
    listed = linear.values.get("full_attn_layers")
    if not isinstance(listed, list) or not all(type(i) is int and 1 <= i <= num_layers for i in listed):
        raise linear.refuse("full_attn_layers", listed, f"a list of layers from 1 to {num_layers}")
    return frozenset(i - 1 for i in listed)


def _quant_group(text: _Section) -> int:
    value: Any = text.values
    for key in ("quantization_config", "config_groups", "group_0", "weights", "group_size"):
        value = value.get(key) if isinstance(value, Mapping) else None
    if type(value) is not int or not 1 <= value <= MOST:
        key = "quantization_config.config_groups.group_0.weights.group_size"
        raise text.refuse(key, value, f"a whole number from 1 to {MOST:,}")
    return value


def _vision(name: str, values: Any) -> Vision | None:
    if values is None:
        return None
    section = _Section(name, "vision_config", values)
    return Vision(
        num_layers=section.size("vt_num_hidden_layers"),
        hidden=section.size("vt_hidden_size"),
        qkv=section.size("qkv_hidden_size"),
        intermediate=section.size("vt_intermediate_size"),
        patch=section.size("patch_size"),
        positions=(section.size("init_pos_emb_height"), section.size("init_pos_emb_width")),
        merge=section.pair("merge_kernel_size"),
    )
