"""Puts the reference and the tiny model's package on the path, and names the checkpoint folder."""

import sys
from pathlib import Path

import pytest
import torch

TINY_K3 = Path(__file__).resolve().parents[2] / "examples/tiny-k3"
for folder in (Path(__file__).resolve().parent, TINY_K3):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint_folder() -> Path:
    """examples/tiny-k3 with the trained checkpoint in it."""
    return TINY_K3
