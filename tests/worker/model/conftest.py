"""Fixtures of the model's tests: random small checkpoints and runners over them."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kimi_worker.engine.runner import Runner
from kimi_worker.model.forms import Forms
from kimi_worker.parallel.groups import Groups
from kimi_worker.parallel.ranks import RankPlace
from kimi_worker.settings import WorkerSettings

MakeRunner = Callable[..., Runner]


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def load() -> Callable[[Path], ModuleType]:
    """load(path) imports a file of another folder of tests."""
    return load_module


@pytest.fixture(scope="session")
def factory() -> ModuleType:
    """checkpoint_factory: config_json() and write_checkpoint()."""
    return load_module(Path(__file__).parent / "checkpoint_factory.py")


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The float64 model of tests/reference."""
    return load_module(Path(__file__).parents[2] / "reference" / "k3.py")


@pytest.fixture(scope="session")
def checkpoint(factory: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random small checkpoint that no test may change."""
    folder = tmp_path_factory.mktemp("checkpoint")
    factory.write_checkpoint(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def make_runner() -> MakeRunner:
    """Runner of one rank over a checkpoint folder; keywords change the settings' sections."""

    def make(folder: Path, forms: Forms | None = None, **sections: dict[str, Any]) -> Runner:
        limits = {"max_num_seqs": 8, "num_pages": 64, "page_size_tokens": 16, "num_state_slots": 10}
        settings = WorkerSettings.model_validate(
            {
                "deployment": "test",
                "role": "both",
                "model": {"checkpoint": folder, "served_name": "tiny", "max_model_len": 512},
                "limits": limits,
                **sections,
            }
        )
        runner = Runner(settings, Groups(RankPlace(0, 1, 1, 1), torch.device("cpu")), forms)
        runner.load()
        return runner

    return make
