"""The plan against the worker itself: the same tensors, and a rank that loads them holds exactly the planned bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from kimi_operator.api import Role
from kimi_operator.cli.manifests import read_and_plan
from kimi_operator.planner import Plan, weights_bytes
from kimi_operator.planner.tensors import Placement, Stored, tensor_table, total_bytes
from kimi_operator.profiles import architecture
from kimi_operator.render import Owner, RenderConfig, RenderInputs
from kimi_operator.render.settings import to_worker_settings
from kimi_worker.engine.runner import Runner
from kimi_worker.model.config import read_config
from kimi_worker.model.inventory import ANY, inventory
from kimi_worker.parallel.groups import Groups
from kimi_worker.parallel.ranks import place
from kimi_worker.settings import WorkerSettings
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "examples" / "local" / "2p2d.yaml"
ARCHITECTURES = REPOSITORY / "operator" / "kimi_operator" / "profiles" / "architectures"
CONFIG = ARCHITECTURES / "kimi-k3-tiny.json"
ITEMSIZE = {"BF16": 2, "F32": 4, "U8": 1}
DTYPES = {Stored.BF16: torch.bfloat16, Stored.F32: torch.float32, Stored.U8: torch.uint8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of zeros, made from nothing but the planner's tensor table and the built-in config."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tensors = {
        name: torch.zeros(tensor.shape, dtype=DTYPES[tensor.stored])
        for tensor in tensor_table(architecture("kimi-k3-tiny"))
        for name in tensor.names()
    }
    save_file(tensors, folder / "model-00001-of-000001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-000001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(CONFIG.read_text())
    return folder


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("rank", range(4))
def test_a_rank_holds_what_was_planned(checkpoint: Path, role: Role, rank: int) -> None:
    planned = read_and_plan([EXAMPLE])
    assert isinstance(planned.plan, Plan)
    owner, config = Owner("k3", "ns", "uid"), RenderConfig(worker_image="worker:1")
    inputs = RenderInputs(owner, planned.deployment.spec, planned.plan, planned.profile, config)
    content = to_worker_settings(inputs, role)
    content["model"]["checkpoint"] = str(checkpoint)
    settings = WorkerSettings.model_validate(content)

    where = place(settings.parallel, ordinal=rank // 2, local=rank % 2)
    runner = Runner(settings, Groups(where, torch.device("cpu")))
    runner.load()

    plan = planned.plan.role(role)
    assert runner.memory.weights_bytes == weights_bytes(plan)
    assert runner.memory.pages_bytes == plan.num_pages * plan.page_bytes
    assert runner.memory.slots_bytes == plan.num_state_slots * plan.slot_bytes


@pytest.mark.parametrize(("model", "num_names"), [("kimi-k3", 497_052), ("kimi-k3-tiny", 320)])
def test_worker_and_plan_know_the_same_tensors(tmp_path: Path, model: str, num_names: int) -> None:
    """Every name, type, shape and byte of the language model; the worker does not load the vision tower."""
    (tmp_path / "config.json").write_text((ARCHITECTURES / f"{model}.json").read_text())
    loaded = [tensor for tensor in tensor_table(architecture(model)) if tensor.placement is not Placement.UNLOADED]
    planned = {name: tensor for tensor in loaded for name in tensor.names()}
    expected = [tensor for item in inventory(read_config(tmp_path)) for tensor in item.tensors(planned)]

    assert len(expected) == len(planned) == num_names
    assert {tensor.name for tensor in expected} == planned.keys()
    num_bytes = 0
    for tensor in expected:
        twin = planned[tensor.name]
        # A_log alone is padded by the release, and the worker takes any padding of it
        shape = twin.shape if tensor.shape == (ANY,) and tensor.name.endswith(".A_log") else tensor.shape
        assert (tensor.dtype, shape, len(tensor.shape)) == (twin.stored.value[0], twin.shape, len(twin.shape))
        num_bytes += math.prod(shape) * ITEMSIZE[tensor.dtype]
    assert num_bytes == total_bytes(loaded)
