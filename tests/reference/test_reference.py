"""The float64 reference against the model built from kernels, and the trained checkpoint through the reference."""

import json
from pathlib import Path

import pytest
import torch
from k3 import K3Reference, decode_mxfp4
from kimi_operator.cli.haystack import make_run
from safetensors import safe_open
from tiny_k3.chat import ChatTokenizer
from tiny_k3.checkpoint import INDEX_NAME, load_checkpoint, save_checkpoint
from tiny_k3.model import TinyK3
from tiny_k3.sizes import SPECIAL_IDS, Sizes

FP32_LOGITS = 2e-3
"""Bound on logits between fp32 whole-sequence and float64 token-by-token; logits are up to about 30."""


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every weight random: AttnRes mixes, biases and decays that training might leave near zero."""
    folder = tmp_path_factory.mktemp("random")
    torch.manual_seed(4)
    model = TinyK3(Sizes())
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim < 2 or tensor.shape[0] == 1:
                tensor.add_(0.5 * torch.randn_like(tensor))
    save_checkpoint(model, folder)
    return folder


def test_known_mxfp4_bytes() -> None:
    packed = torch.tensor([[22, 185, 206, 35] + [0] * 12], dtype=torch.uint8)
    got = decode_mxfp4(packed, torch.tensor([[121]], dtype=torch.uint8))[0, :8]
    assert got.tolist() == [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]


def test_both_forms_agree_to_the_last_bits_in_float64(random_folder: Path) -> None:
    tokens = torch.randint(Sizes().vocab, (70,), generator=torch.Generator().manual_seed(1))
    model = load_checkpoint(random_folder).double()
    with torch.inference_mode():
        got = model.lm_head(model(tokens[None]))[0]
    expected = K3Reference(random_folder).logits(tokens.tolist())
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_fp32_stays_near_the_reference(random_folder: Path) -> None:
    tokens = torch.randint(Sizes().vocab, (70,), generator=torch.Generator().manual_seed(2))
    model = load_checkpoint(random_folder)
    with torch.inference_mode():
        got = model.lm_head(model(tokens[None]))[0]
    torch.testing.assert_close(
        got.double(), K3Reference(random_folder).logits(tokens.tolist()), rtol=0, atol=FP32_LOGITS
    )


def test_every_weight_matters(random_folder: Path) -> None:
    """A wrong name or an unused tensor would show as a weight without a gradient."""
    reference = K3Reference(random_folder)
    tokens = list(range(256, 286))
    reference.logits(tokens)
    for weight in reference.cache.values():
        weight.requires_grad_()
    reference.logits(tokens).square().sum().backward()
    idle = {name for name, weight in reference.cache.items() if weight.grad is None or not weight.grad.any()}
    # The correction bias moves the choice of experts alone.
    assert all(name.endswith("e_score_correction_bias") for name in idle)
    stems = {name.removesuffix("_packed").removesuffix("_scale").removesuffix(".weight") for name in reference.raw}
    unread = stems - {f"language_model.{name}" for name in reference.cache}
    # Experts that no token chose are not read; layer 0 has nothing to mix before its attention.
    assert {name.removeprefix("language_model.model.layers.") for name in unread if ".experts." not in name} == {
        "0.self_attention_res_norm",
        "0.self_attention_res_proj",
    }


@pytest.mark.parametrize("num_tokens", [96, 160])
def test_trained_checkpoint_answers_needles_through_the_reference(num_tokens: int, checkpoint_folder: Path) -> None:
    tokenizer, reference = ChatTokenizer(checkpoint_folder), K3Reference(checkpoint_folder)
    model = load_checkpoint(checkpoint_folder)
    needle = next(make_run(seed=num_tokens, lengths=[num_tokens], num_needles=3))
    prompt, answer = tokenizer.encode_prompt(needle.prompt_text), tokenizer.encode_answer(needle.answer)
    expected = reference.logits([*prompt, *answer[:-1]])
    assert expected[-len(answer) :].argmax(-1).tolist() == answer
    with torch.inference_mode():
        got = model.lm_head(model(torch.tensor([[*prompt, *answer[:-1]]])))[0]
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=FP32_LOGITS)


def test_checkpoint_has_the_released_shape(checkpoint_folder: Path) -> None:
    sizes = Sizes()
    index = json.loads((checkpoint_folder / INDEX_NAME).read_text())
    config = json.loads((checkpoint_folder / "config.json").read_text())
    text = config["text_config"]
    found: dict[str, tuple[list[int], str]] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        with safe_open(checkpoint_folder / file_name, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert index["weight_map"][name] == file_name
                tensor = file.get_slice(name)
                found[name] = (tensor.get_shape(), tensor.get_dtype())
    assert set(found) == set(index["weight_map"])
    layer = "language_model.model.layers."
    expert = f"{layer}1.block_sparse_moe.experts.7"
    assert found[f"{layer}0.self_attn.A_log"] == ([128], "F32")
    assert found[f"{layer}0.self_attn.q_conv1d.weight"] == ([sizes.heads * sizes.kda_dim, 1, 4], "F32")
    assert found[f"{layer}0.mlp.gate_proj.weight"] == ([sizes.dense, sizes.hidden], "BF16")
    assert found[f"{expert}.w1.weight_packed"] == ([sizes.expert_width, sizes.latent // 2], "U8")
    assert found[f"{expert}.w2.weight_scale"] == ([sizes.latent, sizes.expert_width // 32], "U8")
    assert found[f"{layer}3.self_attn.kv_b_proj.weight"] == (
        [sizes.heads * (sizes.nope + sizes.v_dim), sizes.kv_lora], "BF16",
    )  # fmt: skip
    # Counts of the release: 14 KDA, 8 MLA, 6 norm and residual, 3 dense, 8 MoE trunk and 6 an expert.
    kda, mla, moe = 14 + 6, 8 + 6, 8 + 6 * sizes.experts
    assert len(found) == 3 * kda + 2 * mla + 3 + 4 * moe + 5
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 5]
    assert config["eos_token_id"] == SPECIAL_IDS["<|end_of_msg|>"]
    payload = sum(path.stat().st_size for path in checkpoint_folder.glob("*.safetensors"))
    assert index["metadata"]["total_size"] < payload < 10e6
