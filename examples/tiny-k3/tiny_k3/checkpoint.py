"""Write the model in the released file format, and read it back."""

import json
from pathlib import Path

import torch
from kimi_kernels import mxfp4
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_k3.chat import write_tokenizer
from tiny_k3.model import Moe, TinyK3
from tiny_k3.sizes import SPECIAL_IDS, Sizes

MAX_TOKENS = 8192
PREFIX = "language_model."
_KEPT_F32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
INDEX_NAME = "model.safetensors.index.json"


def released_tensors(model: TinyK3) -> dict[str, Tensor]:
    """All tensors under their released names, in the dtypes of the release; experts as MXFP4."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        parent, _, leaf = name.rpartition(".")
        if leaf in {"w1", "w2", "w3"}:
            for expert in range(value.shape[0]):
                packed, scale = mxfp4.quantise(value[expert])
                stem = f"{PREFIX}{parent}.experts.{expert}.{leaf}"
                tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"] = packed, scale
        elif leaf == "A_log":
            # The released files pad A_log with zeros past the heads.
            padded = torch.zeros(model.sizes.a_log_entries)
            padded[: value.shape[0]] = value
            tensors[PREFIX + name] = padded
        else:
            tensors[PREFIX + name] = value.float() if name.endswith(_KEPT_F32) else value.bfloat16()
    return {name: value.contiguous() for name, value in tensors.items()}


def save_checkpoint(model: TinyK3, folder: Path) -> int:
    """Write config, shards, index and tokenizer; one shard a layer and one for the rest, as in the release.

    Returns the number of payload bytes.
    """
    tensors = released_tensors(model)
    num_shards = model.sizes.layers + 1
    shards: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    for name, value in tensors.items():
        parts = name.split(".")
        shards[int(parts[3]) if parts[2] == "layers" else num_shards - 1][name] = value
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{num_shards:06}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        # safetensors makes files for the owner alone; pods read them as another user.
        (folder / file_name).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    _write_json(
        folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )
    _write_json(folder / "config.json", make_config(model.sizes))
    stops = [SPECIAL_IDS["<|end_of_msg|>"], SPECIAL_IDS["[EOS]"]]
    ids = {"bos_token_id": SPECIAL_IDS["[BOS]"], "eos_token_id": stops, "pad_token_id": SPECIAL_IDS["[PAD]"]}
    _write_json(folder / "generation_config.json", ids | {"do_sample": False})
    write_tokenizer(folder, MAX_TOKENS)
    return total


def load_checkpoint(folder: Path) -> TinyK3:
    """Build the model from a folder that save_checkpoint wrote, weights exactly as stored."""
    index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / file_name)
    model = TinyK3(Sizes())
    state = model.state_dict()
    for name, target in state.items():
        parent, _, leaf = name.rpartition(".")
        if leaf in {"w1", "w2", "w3"}:
            stems = [f"{PREFIX}{parent}.experts.{expert}.{leaf}" for expert in range(target.shape[0])]
            experts = [mxfp4.dequantise(tensors[f"{s}.weight_packed"], tensors[f"{s}.weight_scale"]) for s in stems]
            target.copy_(torch.stack(experts))
        else:
            target.copy_(tensors[PREFIX + name][: target.shape[0]])
    for module in model.modules():
        if isinstance(module, Moe):
            module.rounds_experts = False
    return model.eval()


def make_config(sizes: Sizes) -> dict[str, object]:
    """config.json in the shape of the release, with this model's sizes."""
    ids = {
        "bos_token_id": SPECIAL_IDS["[BOS]"],
        "eos_token_id": SPECIAL_IDS["<|end_of_msg|>"],
        "pad_token_id": SPECIAL_IDS["[PAD]"],
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        **ids,
        "media_placeholder_token_id": SPECIAL_IDS["<|media_pad|>"],
        "dtype": "bfloat16",
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": _text_config(sizes) | ids,
    }


def _text_config(sizes: Sizes) -> dict[str, object]:
    mla = [index + 1 for index in sizes.mla_layers]
    return {
        # The release keeps the older architecture's names here; the top level says what it is.
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.dense,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.q_lora,
        "kv_lora_rank": sizes.kv_lora,
        "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope,
        "v_head_dim": sizes.v_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "max_position_embeddings": MAX_TOKENS,
        "num_experts": sizes.experts,
        "num_experts_per_token": sizes.top_k,
        "num_shared_experts": sizes.shared_experts,
        "moe_intermediate_size": sizes.expert_width,
        "routed_expert_hidden_size": sizes.latent,
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
        "activation_situ_beta": sizes.situ_beta,
        "activation_situ_linear_beta": sizes.situ_linear_beta,
        "attn_res_block_size": sizes.attn_res_block,
        "rms_norm_eps": sizes.eps,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "gate_lower_bound": sizes.gate_lower_bound,
            "head_dim": sizes.kda_dim,
            "kda_layers": [layer for layer in range(1, sizes.layers + 1) if layer not in mla],
            "num_heads": sizes.heads,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "quantization_config": _quantization_config(),
    }


def _quantization_config() -> dict[str, object]:
    weights = {
        "actorder": None,
        "dynamic": False,
        "group_size": mxfp4.GROUP_SIZE,
        "num_bits": 4,
        "observer": "minmax",
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
