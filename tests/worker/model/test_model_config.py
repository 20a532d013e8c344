"""config.json: what the released one means, and what every wrong one is told."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kimi_worker.model.config import ConfigError, read_config


def test_released_traps_are_read_right(factory: ModuleType, tmp_path: Path) -> None:
    config = factory.config_json()
    # head_dim is absent in the release; a wrong one must not matter either.
    config["text_config"]["head_dim"] = 74
    sizes = factory.write_checkpoint(tmp_path, config=config)
    assert sizes.mla_layers == (3, 4)
    assert sizes.kda_layers == (0, 1, 2)
    assert sizes.shared_width == 64
    assert sizes.latent_row == 40
    # the config's end of message and the tokenizer's end of document
    assert sizes.eos_token_ids == (91, 92)
    assert sizes.media_token_id == 94
    assert sizes.quantised


def test_the_released_sizes_are_accepted(factory: ModuleType, tmp_path: Path) -> None:
    config = factory.config_json()
    config["text_config"] |= {
        "num_hidden_layers": 93,
        "hidden_size": 7168,
        "num_experts": 896,
        "num_experts_per_token": 16,
    }
    full = [*range(4, 93, 4), 93]
    config["text_config"]["linear_attn_config"] |= {
        "num_heads": 96,
        "head_dim": 128,
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, 94) if layer not in full],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = read_config(tmp_path)
    assert len(sizes.mla_layers) == 24
    assert sizes.mla_layers[-2:] == (91, 92)
    assert len(sizes.kda_layers) == 69
    # no tokenizer file here: only the config's own
    assert sizes.eos_token_ids == (92,)


def change(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = to

    return apply


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def apply(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return apply


def text(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    return change("text_config", *path, to=to)


def linear(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    return change("text_config", "linear_attn_config", *path, to=to)


FAULTS = {
    "another family": (change("model_type", to="kimi_linear"), r"model_type: .*kimi_k3.*got 'kimi_linear'"),
    "another class": (change("architectures", to=["Llama"]), r"architectures \['Llama'\] lack KimiK3"),
    "no text part": (drop("text_config"), r"text_config: Field required.*only released Kimi-K3"),
    "no latent": (drop("text_config", "kv_lora_rank"), r"text_config\.kv_lora_rank: Field required"),
    "text for a number": (text("hidden_size", to="wide"), r"text_config\.hidden_size: .*integer.*got 'wide'"),
    "zero heads": (text("num_attention_heads", to=0), r"text_config\.num_attention_heads: .*greater than 0"),
    "unequal heads": (text("num_key_value_heads", to=2), r"num_key_value_heads 2 differs from num_attention_heads 4"),
    "another activation": (text("hidden_act", to="silu"), r"text_config\.hidden_act: .*situ.*got 'silu'"),
    "rotary": (text("mla_use_nope", to=False), r"text_config\.mla_use_nope"),
    "tied": (text("tie_word_embeddings", to=True), r"text_config\.tie_word_embeddings"),
    "chosen": (text("num_experts_per_token", to=9), r"num_experts_per_token 9 exceeds num_experts 8"),
    "all dense": (text("first_k_dense_replace", to=6), r"first_k_dense_replace 6 exceeds num_hidden_layers 5"),
    "layers from 0": (linear("kda_layers", to=[0, 1, 2]), r"layers \[0\] outside 1\.\.5; .*count from 1"),
    "a layer twice": (linear("kda_layers", to=[1, 2, 4]), r"each of the layers 1\.\.5 exactly once"),
    "a layer in neither": (linear("kda_layers", to=[1, 2]), r"each of the layers 1\.\.5 exactly once"),
    "wide convolution": (linear("short_conv_kernel_size", to=8), r"linear_attn_config\.short_conv_kernel_size"),
    "fast decay": (linear("gate_lower_bound", to=-9.0), r"linear_attn_config\.gate_lower_bound: .*-5.*got -9"),
    "another format": (
        text("quantization_config", "format", to="nvfp4-pack-quantized"),
        r"quantization_config\.format: .*mxfp4-pack-quantized.*got 'nvfp4-pack-quantized'",
    ),
    "quantised activations": (
        text("quantization_config", "config_groups", "group_0", "input_activations", to={"num_bits": 8}),
        r"config_groups\.group_0\.input_activations",
    ),
    "no end": (drop("eos_token_id"), r"eos_token_id: missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_field_is_named(fault: str, factory: ModuleType, tmp_path: Path) -> None:
    config = factory.config_json()
    mutate, message = FAULTS[fault]
    mutate(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON"), ("[]", "expected a JSON object, got list")])
def test_a_wrong_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: No such file.*must be a folder"):
        read_config(tmp_path)
