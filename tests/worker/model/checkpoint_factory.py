"""Writes a random small Kimi-K3 in exactly the released form: config.json, index, shards, MXFP4 experts, padded A_log.

Other tests load it by path; nothing here is random without a seed.
"""

import json
from pathlib import Path
from typing import Any

import torch
from kimi_kernels import mxfp4
from kimi_worker.model.checkpoint import INDEX_FILE
from kimi_worker.model.config import KimiConfig, read_config
from kimi_worker.model.inventory import ANY, Linear, Plain, inventory
from safetensors.torch import save_file

A_LOG_ENTRIES = 16
"""More than there are heads, as in the release."""


def config_json() -> dict[str, Any]:
    """A small config.json with the released fields and traps."""
    num_layers, full = 5, [4, 5]
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": num_layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "max_position_embeddings": 4096,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, num_layers + 1) if layer not in full],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"},
                }
            },
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
        },
    }
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "bos_token_id": 90,
        "eos_token_id": 92,
        "pad_token_id": 95,
        "media_placeholder_token_id": 94,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"num_hidden_layers": 1},
    }


def write_checkpoint(folder: Path, *, seed: int = 0, config: dict[str, Any] | None = None) -> KimiConfig:
    """Write the folder's files and return its sizes. One shard a layer, one for the rest, one for a vision stub."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or config_json(), indent=1))
    tokenizer = {
        "eos_token": "[EOS]",
        "added_tokens_decoder": {"91": {"content": "[EOS]"}, "92": {"content": "<|end_of_msg|>"}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    sizes = read_config(folder)
    generator = torch.Generator().manual_seed(seed)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for item in inventory(sizes):
        name = item.name if isinstance(item, Plain) else item.base
        parts = name.split(".")
        shard = f"layer-{parts[3]}" if parts[2:3] == ["layers"] else "globals"
        shards.setdefault(shard, {}).update(_tensors(item, generator))
    shards["vision"] = {"vision_tower.patch_embed.weight": torch.zeros(4, 4), "mm_projector.bias": torch.zeros(4)}
    weight_map = {}
    for number, tensors in enumerate(shards.values(), start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return sizes


def _tensors(item: Plain | Linear, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if isinstance(item, Plain):
        return {item.name: _plain(item, generator)}
    weight = torch.randn(item.out_width, item.in_width, generator=generator) * item.in_width**-0.5
    if item.base.endswith("embed_tokens"):
        weight = weight * item.in_width**0.5
    if ".experts." in item.base:
        packed, scale = mxfp4.quantise(weight)
        return {f"{item.base}.weight_packed": packed, f"{item.base}.weight_scale": scale}
    return {f"{item.base}.weight": weight.bfloat16()}


def _plain(item: Plain, generator: torch.Generator) -> torch.Tensor:
    shape = [A_LOG_ENTRIES if size == ANY else size for size in item.shape]
    noise = torch.randn(shape, generator=generator)
    if item.name.endswith("A_log"):
        # The padding is not zero here, so that a reader that uses it is found out.
        return noise * 0.5
    if item.name.endswith("dt_bias"):
        return noise - 2.0
    if item.name.endswith("norm.weight"):
        value = 1.0 + 0.2 * noise
    elif item.name.endswith("res_proj.weight"):
        value = noise * item.shape[-1] ** -0.5
    else:
        value = noise * 0.3
    return value if item.dtype == "F32" else value.bfloat16()
