"""What a rank runs before Ready: as much memory as any step may need, and nothing left behind."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kimi_kernels.backend import Backend
from kimi_worker.engine.runner import Runner
from kimi_worker.model.forms import AttentionForm, ExpertStorage, Forms
from kimi_worker.protocol.step import SequenceStep, StepPlan
from kimi_worker.settings import WorkerSettings
from kimi_worker.wiring import _warm_up

MakeRunner = Callable[..., Runner]
PAGE, LONGEST, CHUNK, REQUESTS = 64, 2000, 32, 5
LIMITS = {
    "max_num_seqs": REQUESTS, "max_num_batched_tokens": CHUNK, "num_pages": 100, "page_size_tokens": PAGE,
    "num_state_slots": 7,
}  # fmt: skip
GPU_FORMS_IN_TORCH = Forms(AttentionForm.BLOCKED, ExpertStorage.PACKED, Backend.TORCH)


@pytest.fixture(scope="module")
def peak_bytes(load: Callable[[Path], ModuleType]) -> Callable[[Callable[[], object]], int]:
    """peak_memory.peak_bytes of the kernels' tests."""
    return load(Path(__file__).parents[2] / "kernels" / "peak_memory.py").peak_bytes


@pytest.fixture
def sections(checkpoint: Path) -> dict[str, object]:
    return {"limits": LIMITS, "model": {"checkpoint": checkpoint, "served_name": "tiny", "max_model_len": LONGEST}}


def settings_of(sections: dict[str, object]) -> WorkerSettings:
    return WorkerSettings.model_validate({"deployment": "test", "role": "both", **sections})


def test_no_later_step_needs_more_memory(
    checkpoint: Path, make_runner: MakeRunner, sections: dict[str, object], peak_bytes: Callable
) -> None:
    runner = make_runner(checkpoint, GPU_FORMS_IN_TORCH, **sections)
    warm = peak_bytes(lambda: _warm_up(settings_of(sections), runner))
    pages = list(range(-(-LONGEST // PAGE)))
    last_chunk = SequenceStep([1] * CHUNK, LONGEST - CHUNK, pages, 0, sample=True)
    first_chunk = SequenceStep([1] * CHUNK, 0, pages, 0, sample=True)
    decodes = [SequenceStep([1], LONGEST - 1 - slot, pages, slot, sample=True) for slot in range(REQUESTS)]
    plans = [StepPlan(0, sequences) for sequences in ([first_chunk], [last_chunk], decodes)]
    needs = [peak_bytes(partial(runner.execute, plan)) for plan in plans]
    assert max(needs) <= warm


@pytest.mark.parametrize("keeps_state", [False, True])
def test_nothing_is_left_behind(
    keeps_state: bool, checkpoint: Path, make_runner: MakeRunner, sections: dict[str, object]
) -> None:
    """Not even where the fault is on that leaves a recycled slot as it is."""
    sections |= {"faults": {"keep_recycled_state": keeps_state}}
    runner, fresh = make_runner(checkpoint, **sections), make_runner(checkpoint, **sections)
    _warm_up(settings_of(sections), runner)
    for region in runner.caches.regions:
        assert not region.tensor.any()
    step = StepPlan(0, [SequenceStep([5, 6, 7], 0, [0], 3, sample=True)])
    logits = [each.execute(step) for each in (runner, fresh)]
    assert torch.equal(*logits)
