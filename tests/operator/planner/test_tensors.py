"""The tensor table: names, shapes and placements, on the full and on the tiny model."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path

import pytest
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner.architecture import read_architecture
from kimi_operator.planner.tensors import Placement, Stored, Tensor, tensor_table, total_bytes
from kimi_operator.profiles import architecture

REPOSITORY = Path(__file__).resolve().parents[3]
TINY_CHECKPOINT = REPOSITORY / "examples" / "tiny-k3"
ARCHITECTURES = REPOSITORY / "operator" / "kimi_operator" / "profiles" / "architectures"
K3 = architecture("kimi-k3")


def by_name(tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}


def config(name: str) -> dict:
    return json.loads((ARCHITECTURES / f"{name}.json").read_text())


def test_layer_kinds_follow_the_config_which_counts_from_one() -> None:
    assert {3, 7, 91, 92} <= K3.mla_layers
    assert 0 not in K3.mla_layers
    assert (K3.num_mla_layers, K3.num_kda_layers, K3.num_moe_layers) == (24, 69, 92)


def test_names_are_unique_and_expand_to_every_expert() -> None:
    tensors = tensor_table(architecture("kimi-k3-tiny"))
    names = Counter(name for tensor in tensors for name in tensor.names())
    assert max(names.values()) == 1
    assert "language_model.model.layers.1.block_sparse_moe.experts.7.w2.weight_scale" in names
    assert "language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_packed" not in names


@pytest.mark.parametrize(
    ("layer", "tensors", "size"),
    [(0, 14 + 6 + 3, None), (1, 14 + 6 + 8 + 5376, 16_990_911_504 - 818_704), (3, 8 + 6 + 8 + 5376, None)],
)
def test_counts_and_bytes_of_a_layer(layer: int, tensors: int, size: int | None) -> None:
    of_layer = [tensor for tensor in tensor_table(K3) if f".layers.{layer}." in tensor.name]
    assert sum(tensor.copies for tensor in of_layer) == tensors
    if size is not None:  # the file that holds this layer, less its header
        assert total_bytes(of_layer) == size


def test_float32_tensors_are_those_of_the_released_files() -> None:
    stored = [tensor for tensor in tensor_table(K3) if tensor.stored is Stored.F32]
    assert sum(tensor.copies for tensor in stored) == 506
    assert sum(tensor.elements for tensor in stored) == 11_122_432


@pytest.mark.parametrize(
    ("name", "shape", "placement"),
    [
        ("layers.0.self_attn.A_log", (128,), Placement.TENSOR_PARALLEL),
        ("layers.0.self_attn.f_a_proj.weight", (128, 7168), Placement.REPLICATED),
        ("layers.0.self_attn.f_b_proj.weight", (12288, 128), Placement.TENSOR_PARALLEL),
        ("layers.3.self_attn.q_b_proj.weight", (18432, 1536), Placement.TENSOR_PARALLEL),
        ("layers.3.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), Placement.REPLICATED),
        ("layers.1.block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168), Placement.REPLICATED),
        ("layers.1.block_sparse_moe.shared_experts.down_proj.weight", (7168, 6144), Placement.TENSOR_PARALLEL),
        ("layers.1.block_sparse_moe.experts.{expert}.w2.weight_packed", (3584, 1536), Placement.EXPERT_PARALLEL),
        ("layers.1.block_sparse_moe.experts.{expert}.w1.weight_scale", (3072, 112), Placement.EXPERT_PARALLEL),
    ],
)
def test_shape_and_placement(name: str, shape: tuple[int, ...], placement: Placement) -> None:
    tensor = by_name(tensor_table(K3))[f"language_model.model.{name}"]
    assert (tensor.shape, tensor.placement) == (shape, placement)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": None}, "text_config.hidden_size"),
        ({"num_experts": -8}, "text_config.num_experts"),
        ({"vocab_size": "448"}, "text_config.vocab_size"),
        ({"linear_attn_config": {"num_heads": 4, "full_attn_layers": [0]}}, "linear_attn_config"),
        ({"linear_attn_config": 7}, "text_config.linear_attn_config"),
        ({"quantization_config": {}}, "group_size"),
        (
            {"hidden_size": 10**30},
            r"text_config\.hidden_size: got 1000\d+, expected a whole number from 1 to 16,777,216",
        ),
        ({"hidden_size": True}, "text_config.hidden_size: got True"),
        ({"num_hidden_layers": 10**6}, r"num_hidden_layers: got 1000000, expected a whole number from 1 to 1,024"),
        ({"first_k_dense_replace": 6}, "first_k_dense_replace: got 6, expected at most num_hidden_layers, 5"),
        ({"num_experts_per_token": 9}, "num_experts_per_token: got 9, expected at most num_experts, 8"),
        ({"moe_intermediate_size": 33}, "moe_intermediate_size: got 33, expected an even multiple"),
    ],
)
def test_a_broken_config_is_refused_by_its_key(change: dict, field: str) -> None:
    broken = config("kimi-k3-tiny")
    broken["text_config"] |= change
    with pytest.raises(InvalidSpec, match=field):
        read_architecture("broken", broken)


@pytest.mark.parametrize("layers", [[], [1, 2, 3, 4, 5], [True], [6], "all"])
def test_full_attention_layers_leave_layers_of_both_kinds(layers: object) -> None:
    broken = config("kimi-k3-tiny")
    broken["text_config"]["linear_attn_config"]["full_attn_layers"] = layers
    with pytest.raises(InvalidSpec, match=r"linear_attn_config\.full_attn_layers"):
        read_architecture("broken", broken)


def test_a_model_without_dense_layers_is_possible() -> None:
    all_experts = config("kimi-k3-tiny")
    all_experts["text_config"]["first_k_dense_replace"] = 0
    assert read_architecture("sparse", all_experts).num_moe_layers == 5


def test_a_broken_vision_config_is_refused_by_its_key() -> None:
    broken = config("kimi-k3")
    broken["vision_config"]["merge_kernel_size"] = [2]
    with pytest.raises(InvalidSpec, match=r"vision_config\.merge_kernel_size"):
        read_architecture("broken", broken)


def test_an_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.model\.architecture.*'kimi-k2'.*kimi-k3-tiny"):
        architecture("kimi-k2")


def test_built_in_tiny_architecture_is_the_checkpoint_in_examples() -> None:
    trained = json.loads((TINY_CHECKPOINT / "config.json").read_text())
    assert config("kimi-k3-tiny")["text_config"] == trained["text_config"]


def test_table_of_the_tiny_model_equals_the_headers_of_its_files() -> None:
    held: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(TINY_CHECKPOINT.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        held |= {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"
        }
    table = {
        name: (tensor.stored.value[0], tensor.shape)
        for tensor in tensor_table(architecture("kimi-k3-tiny"))
        for name in tensor.names()
    }
    assert table == held
