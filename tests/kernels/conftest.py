"""Shared by the kernel tests: one thread, seeded operands, one table of tolerances."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

if str(Path(__file__).parent) not in sys.path:
    # peak_memory
    sys.path.insert(0, str(Path(__file__).parent))

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}
"""Largest difference allowed between two orders of the same sums, by the dtype they are done in."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """draw(*shape, dtype=...) gives normal numbers, the same ones in every run."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal


@pytest.fixture
def close() -> Callable[[Tensor, Tensor], None]:
    """close(got, expected) compares at the tolerance of got's dtype."""

    def check(got: Tensor, expected: Tensor) -> None:
        bound = TOLERANCE[got.dtype]
        torch.testing.assert_close(got.double(), expected.double(), rtol=bound, atol=bound)

    return check
