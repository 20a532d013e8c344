"""A checkpoint is checked from its headers: each fault is named with tensor, file, expectation and remedy."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kimi_kernels import mxfp4
from kimi_worker.model.checkpoint import INDEX_FILE, CheckpointError, check_checkpoint
from kimi_worker.parallel.ranks import ParallelError, RankPlace
from safetensors.torch import load_file, save_file

LAYER = "language_model.model.layers.2."
EXPERT = f"{LAYER}block_sparse_moe.experts.3.w1"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that the test may break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def weight_map(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX_FILE).read_text())["weight_map"])


def write_index(folder: Path, names: dict[str, str]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def shard_of(folder: Path, name: str) -> Path:
    return folder / weight_map(folder)[name]


def rewrite(folder: Path, name: str, replace: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace a tensor in its shard, or take it out of shard and index."""
    path = shard_of(folder, name)
    tensors = load_file(path)
    new = replace(tensors.pop(name))
    if new is None:
        write_index(folder, {key: file for key, file in weight_map(folder).items() if key != name})
    else:
        tensors[name] = new
    save_file(tensors, path)


def fails(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        check_checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_a_right_checkpoint_is_counted(checkpoint: Path) -> None:
    found = check_checkpoint(checkpoint)
    assert not [name for name in found.tensors if name.startswith(("vision_tower", "mm_projector"))]
    vision = shard_of(checkpoint, "mm_projector.bias")
    payload = sum(
        tensor.nbytes
        for path in checkpoint.glob("*.safetensors")
        if path != vision
        for tensor in load_file(path).values()
    )
    assert found.num_bytes == payload


def test_missing_shard(copy: Path) -> None:
    path = shard_of(copy, EXPERT + ".weight_packed")
    path.unlink()
    fails(copy, rf"{path.name}: No such file.*copy it to this node")


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_shard(kept: int, copy: Path) -> None:
    path = shard_of(copy, EXPERT + ".weight_packed")
    path.write_bytes(path.read_bytes()[:kept])
    fails(copy, rf"{path.name}: .*copy it again")


def test_overlong_shard(copy: Path) -> None:
    path = shard_of(copy, EXPERT + ".weight_packed")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"12345")
    fails(copy, rf"{path.name}: expected {size} bytes from its header, got {size + 5}")


def test_a_pointer_instead_of_a_file(copy: Path) -> None:
    path = shard_of(copy, EXPERT + ".weight_packed")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    fails(copy, rf"{path.name}: .*Git LFS pointer")


def test_a_header_that_is_not_json(copy: Path) -> None:
    path = shard_of(copy, EXPERT + ".weight_packed")
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    fails(copy, rf"{path.name}: the safetensors header cannot be read")


def test_a_header_whose_sizes_disagree(copy: Path) -> None:
    path = shard_of(copy, f"{LAYER}self_attn.dt_bias")
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F32","shape":[64]', b'"dtype":"F32","shape":[65]'))
    fails(copy, rf"{path.name}: .*F32 \[65\] needs 260 bytes, its header gives 256")


def test_mislabelled_shards(copy: Path) -> None:
    """Two shards under each other's names."""
    one, two = (shard_of(copy, f"language_model.model.layers.{layer}.mlp_res_norm.weight") for layer in (1, 2))
    one.rename(copy / "aside")
    two.rename(one)
    (copy / "aside").rename(two)
    fails(copy, rf"{one.name}: .*layers\.1\..*the index puts it here, but it is in {two.name}; .*mislabelled")


def test_a_tensor_that_the_index_does_not_know(copy: Path) -> None:
    names = weight_map(copy)
    file = names.pop(f"{EXPERT}.weight_scale")
    write_index(copy, names)
    fails(copy, rf"{file}: {EXPERT}\.weight_scale: the index puts it in no file")


def test_missing_tensor(copy: Path) -> None:
    rewrite(copy, f"{LAYER}mlp_res_proj.weight", lambda tensor: None)
    fails(copy, rf"{LAYER}mlp_res_proj\.weight: missing, expected BF16 \[1, 64\]; copy the whole release")


def test_missing_scale(copy: Path) -> None:
    rewrite(copy, f"{EXPERT}.weight_scale", lambda tensor: None)
    fails(copy, rf"{EXPERT}\.weight_scale: missing, expected U8 \[32, 1\]")


def test_wrong_shape(copy: Path) -> None:
    rewrite(copy, f"{LAYER}self_attn.b_proj.weight", lambda tensor: tensor[:3].clone())
    fails(copy, r"b_proj\.weight: expected shape \[4, 64\] from config\.json, got \[3, 64\]")


def test_short_a_log(copy: Path) -> None:
    rewrite(copy, f"{LAYER}self_attn.A_log", lambda tensor: tensor[:3].clone())
    fails(copy, r"A_log: expected at least 4 entries \(linear_attn_config\.num_heads\), got 3")


def test_wrong_type(copy: Path) -> None:
    rewrite(copy, f"{LAYER}self_attn.q_conv1d.weight", lambda tensor: tensor.bfloat16())
    fails(copy, r"q_conv1d\.weight: expected type F32, got BF16")


def test_unknown_quantisation_of_a_tensor(copy: Path) -> None:
    path, name = shard_of(copy, EXPERT + ".weight_packed"), f"{EXPERT}.weight_shape"
    save_file(load_file(path) | {name: torch.tensor([32, 32])}, path)
    write_index(copy, weight_map(copy) | {name: path.name})
    fails(copy, rf"{name}: unknown tensor \(I64 \[2\]\); quantised weights are read only as MXFP4")


def test_packed_weights_without_a_format(copy: Path, factory: ModuleType) -> None:
    config = factory.config_json()
    del config["text_config"]["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    fails(copy, r"quantization_config: missing, but .*weight_packed exists")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("{}", "weight_map: expected an object"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', r"weight_map\.a: expected a file name in the same folder"),
    ],
)
def test_wrong_index(content: str, message: str, copy: Path) -> None:
    (copy / INDEX_FILE).write_text(content)
    fails(copy, message)


def test_missing_index(copy: Path) -> None:
    (copy / INDEX_FILE).unlink()
    fails(copy, "a released checkpoint has an index")


def test_plain_experts_are_read_too(copy: Path, make_runner: Callable[..., Any]) -> None:
    """Quantised exactly when `weight_packed` exists: an expert may be stored in bf16."""
    for path in sorted(copy.glob("*.safetensors")):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            base = name.removesuffix(".weight_packed")
            tensors[f"{base}.weight"] = mxfp4.dequantise(tensors.pop(name), tensors.pop(f"{base}.weight_scale"))
        save_file(tensors, path)
    write_index(copy, {name: path.name for path in copy.glob("*.safetensors") for name in load_file(path)})
    assert make_runner(copy).memory.weights_bytes > 0


def test_a_group_that_cannot_share_the_heads(checkpoint: Path) -> None:
    with pytest.raises(ParallelError, match=r"linear_attn_config\.num_heads 4 is not a multiple of tensor_parallel 3"):
        RankPlace(0, 3, 3, 3).share(check_checkpoint(checkpoint).config.kda_num_heads, "linear_attn_config.num_heads")


def test_preflight_needs_no_torch() -> None:
    code = "import sys, kimi_worker.model.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
