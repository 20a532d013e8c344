"""The model on one rank: against the float64 reference, over any chunking, in any company."""

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kimi_kernels.backend import Backend
from kimi_worker.engine.runner import Runner
from kimi_worker.model import moe
from kimi_worker.model.checkpoint import check_checkpoint
from kimi_worker.model.forms import AttentionForm, ExpertStorage, Forms
from kimi_worker.model.weights import WeightSource
from kimi_worker.parallel.ranks import RankPlace
from kimi_worker.protocol.step import SequenceStep, StepPlan
from torch import Tensor

MakeRunner = Callable[..., Runner]

LOGPROB_BOUND = 1e-4
"""Float32 against float64, and one order of float32 sums against another."""
BF16_MEDIAN_BOUND = 0.1
"""bfloat16 activations against float64: the median over positions, because a close choice of experts may flip."""
VOCAB = 90
PAGE_SIZE = 16


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def piece(ids: Sequence[int], start: int, stop: int, place: int = 0) -> SequenceStep:
    """Tokens [start, stop) of a sequence that owns slot `place` and the pages from 6 * place, in a shuffled order."""
    pages = [6 * place + page for page in (3, 0, 5, 1, 4, 2)]
    return SequenceStep(list(ids[start:stop]), start, pages[: -(-stop // PAGE_SIZE)], place, sample=True)


def run(runner: Runner, *pieces: SequenceStep) -> Tensor:
    """Log-probabilities [n, vocab] float64 after each piece."""
    logits = runner.execute(StepPlan(0, list(pieces)))
    assert logits is not None
    return logits.double().log_softmax(-1)


def run_in_pieces(runner: Runner, ids: Sequence[int], sizes: Sequence[int], place: int = 0) -> dict[int, Tensor]:
    """Compute a sequence in pieces; the log-probabilities by the number of tokens seen."""
    seen, found = 0, {}
    for size in sizes:
        found[seen + size] = run(runner, piece(ids, seen, seen + size, place))[0]
        seen += size
    return found


def largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


CPU_FORMS = Forms(AttentionForm.FUSED, ExpertStorage.DECODED, Backend.TORCH)
GPU_FORMS_IN_TORCH = Forms(AttentionForm.BLOCKED, ExpertStorage.PACKED, Backend.TORCH)


def test_forms_suit_the_device() -> None:
    assert Forms.suited_to(torch.device("cpu")) == CPU_FORMS
    on_gpu = Forms(AttentionForm.BLOCKED, ExpertStorage.PACKED, Backend.TRITON)
    assert Forms.suited_to(torch.device("cuda", 3)) == on_gpu


@pytest.mark.parametrize("forms", [CPU_FORMS, GPU_FORMS_IN_TORCH], ids=["cpu", "gpu"])
@pytest.mark.parametrize("seed", [11, 12])
def test_equals_the_float64_reference(
    seed: int, forms: Forms, *, factory: ModuleType, reference: ModuleType, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """A whole chunk, one that goes on from it, and decodes, in the forms of either device."""
    factory.write_checkpoint(tmp_path, seed=seed)
    ids = tokens(70, seed)
    want = reference.K3Reference(tmp_path).logits(ids).log_softmax(-1)
    for seen, got in run_in_pieces(make_runner(tmp_path, forms), ids, [33, 20, *[1] * 17]).items():
        assert largest_difference(got, want[seen - 1]) < LOGPROB_BOUND


def test_the_triton_kernels_equal_the_float64_reference(
    checkpoint: Path, reference: ModuleType, tmp_path: Path
) -> None:
    """What a GPU runs, launched by the model itself, in Triton's interpreter, which needs a process of its own."""
    ids = tokens(36, 9)
    job = {
        "checkpoint": str(checkpoint),
        "ids": ids,
        "sizes": [20, 13, *[1] * 3],
        "logits": str(tmp_path / "logits.pt"),
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "interpreted_model.py", json.dumps(job)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt")
    assert sorted(found) == [20, 33, 34, 35, 36]
    want = reference.K3Reference(checkpoint).logits(ids).log_softmax(-1)
    for seen, logits in found.items():
        assert largest_difference(logits.double().log_softmax(-1), want[seen - 1]) < LOGPROB_BOUND


@pytest.mark.parametrize("forms", [CPU_FORMS, GPU_FORMS_IN_TORCH], ids=["cpu", "gpu"])
def test_decodes_of_many_lengths_share_a_batch(forms: Forms, checkpoint: Path, make_runner: MakeRunner) -> None:
    """Logits come in the plan's order, whatever order the batch puts the requests in."""
    runner, alone = make_runner(checkpoint, forms), make_runner(checkpoint)
    lengths = [5, 40, 1, 17, 33]
    sequences = [tokens(length + 1, seed) for seed, length in enumerate(lengths)]
    for place, (ids, length) in enumerate(zip(sequences, lengths, strict=True)):
        run(runner, piece(ids, 0, length, place))
    got = run(runner, *(piece(ids, len(ids) - 1, len(ids), place) for place, ids in enumerate(sequences)))
    for place, ids in enumerate(sequences):
        want = run_in_pieces(alone, ids, [len(ids)], place)[len(ids)]
        assert largest_difference(got[place], want) < LOGPROB_BOUND


def test_other_sizes_equal_the_reference(
    factory: ModuleType, reference: ModuleType, make_runner: MakeRunner, tmp_path: Path
) -> None:
    config = factory.config_json()
    text = config["text_config"]
    text |= {"num_hidden_layers": 7, "attn_res_block_size": 2, "first_k_dense_replace": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 2, "v_head_dim": 24, "num_experts": 6, "num_experts_per_token": 3}
    text |= {
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 64,
        "moe_renormalize": True,
    }
    text["linear_attn_config"] |= {"num_heads": 2, "head_dim": 32, "gate_lower_bound": -3.0}
    text["linear_attn_config"] |= {"full_attn_layers": [1, 4, 7], "kda_layers": [2, 3, 5, 6]}
    factory.write_checkpoint(tmp_path, seed=3, config=config)
    ids = tokens(40, 3)
    want = reference.K3Reference(tmp_path).logits(ids).log_softmax(-1)
    for seen, got in run_in_pieces(make_runner(tmp_path), ids, [30, *[1] * 10]).items():
        assert largest_difference(got, want[seen - 1]) < LOGPROB_BOUND


def test_the_trained_model_equals_the_reference(reference: ModuleType, make_runner: MakeRunner) -> None:
    """Trained weights are less even than random ones: sharper softmaxes, slower decays."""
    folder = Path(__file__).parents[3] / "examples" / "tiny-k3"
    ids = tokens(90, 7)
    want = reference.K3Reference(folder).logits(ids).log_softmax(-1)
    for seen, got in run_in_pieces(make_runner(folder), ids, [50, 20, *[1] * 20]).items():
        assert largest_difference(got, want[seen - 1]) < LOGPROB_BOUND


@pytest.fixture(scope="module")
def whole(checkpoint: Path, make_runner: MakeRunner) -> tuple[Runner, list[int], dict[int, Tensor]]:
    """A runner, 60 tokens, and their log-probabilities token by token."""
    runner, ids = make_runner(checkpoint), tokens(60, 5)
    return runner, ids, run_in_pieces(runner, ids, [1] * len(ids), place=9)


def test_chunk_boundaries_are_free(whole: tuple[Runner, list[int], dict[int, Tensor]]) -> None:
    runner, ids, want = whole
    for seen, got in run_in_pieces(runner, ids, [7, 5, 7, *[1] * 41]).items():
        assert largest_difference(got, want[seen]) < LOGPROB_BOUND


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 25), min_size=1, max_size=8))
def test_any_split_gives_the_same(whole: tuple[Runner, list[int], dict[int, Tensor]], sizes: list[int]) -> None:
    runner, ids, want = whole
    fitting = [size for i, size in enumerate(sizes) if sum(sizes[: i + 1]) <= len(ids)]
    for seen, got in run_in_pieces(runner, ids, fitting).items():
        assert largest_difference(got, want[seen]) < LOGPROB_BOUND


def test_company_in_the_batch_changes_nothing(checkpoint: Path, make_runner: MakeRunner) -> None:
    """Five sequences advance together, decodes and pieces mixed in any order; each equals its run alone."""
    runner, alone = make_runner(checkpoint), make_runner(checkpoint)
    sequences = [tokens(45, seed) for seed in range(5)]
    want = [run_in_pieces(alone, ids, [1] * 45) for ids in sequences]
    rng, seen = random.Random(2), [0] * 5
    while any(count < 45 for count in seen):
        chosen = [i for i in range(5) if seen[i] < 45 and rng.random() < 0.7]
        rng.shuffle(chosen)
        sizes = {i: min(45 - seen[i], rng.choice([1, 1, 3, 9])) for i in chosen}
        got = run(runner, *(piece(sequences[i], seen[i], seen[i] + sizes[i], place=i) for i in chosen))
        for row, i in enumerate(chosen):
            seen[i] += sizes[i]
            assert largest_difference(got[row], want[i][seen[i]]) < LOGPROB_BOUND


def test_a_plan_samples_only_where_it_says(checkpoint: Path, make_runner: MakeRunner) -> None:
    runner, ids = make_runner(checkpoint), tokens(20)
    quiet = msgspec.structs.replace(piece(ids, 0, 5, place=1), sample=False)
    both = runner.execute(StepPlan(0, [quiet, piece(ids, 0, 9)]))
    assert both is not None
    assert both.shape == (1, 96)
    assert both.dtype == torch.float32
    none = runner.execute(StepPlan(1, []))
    assert none is not None
    assert none.shape == (0, 96)


def test_a_recycled_slot_starts_clean(checkpoint: Path, make_runner: MakeRunner) -> None:
    ids, earlier = tokens(12, 1), tokens(40, 2)
    want = run_in_pieces(make_runner(checkpoint), ids, [12])[12]
    results = {}
    for keep in (False, True):
        runner = make_runner(checkpoint, faults={"keep_recycled_state": keep})
        run_in_pieces(runner, earlier, [40])
        results[keep] = run_in_pieces(runner, ids, [12])[12]
    assert torch.equal(results[False], want)
    # The fault must be plain to see: it is what the slot's zeroing is for.
    assert largest_difference(results[True], want) > 100 * LOGPROB_BOUND


def test_regions_carry_a_whole_sequence(checkpoint: Path, make_runner: MakeRunner) -> None:
    """Copying a sequence's pages and slot, byte for byte, is all that a handoff has to do."""
    source, target, ids = make_runner(checkpoint), make_runner(checkpoint), tokens(50, 8)
    want = run_in_pieces(source, ids, [40, *[1] * 10])
    source = make_runner(checkpoint)
    run_in_pieces(source, ids, [40])
    moved = piece(ids, 0, 40)
    for region in target.caches.regions:
        region.tensor.view(torch.uint8).fill_(0xFF)
    for old, new in zip(source.caches.regions, target.caches.regions, strict=True):
        assert new.tensor.is_contiguous()
        assert new.tensor.nbytes == new.num_units * new.unit_bytes
        units = moved.page_ids if new.unit == "page" else [moved.slot]
        flat_old, flat_new = (region.tensor.view(torch.uint8).view(region.num_units, -1) for region in (old, new))
        assert flat_new.shape[1] == new.unit_bytes
        flat_new[units] = flat_old[units]
    for seen in range(41, 51):
        assert largest_difference(run(target, piece(ids, seen - 1, seen))[0], want[seen]) < LOGPROB_BOUND


def test_layout_hash_tells_what_must_agree(
    checkpoint: Path, factory: ModuleType, make_runner: MakeRunner, tmp_path: Path
) -> None:
    same = [make_runner(checkpoint).layout_hash for _ in range(2)]
    assert same[0] == same[1]
    factory.write_checkpoint(tmp_path, seed=99)
    limits = {"max_num_seqs": 8, "num_pages": 64, "page_size_tokens": 32, "num_state_slots": 10}
    others = [
        make_runner(checkpoint, limits=limits).layout_hash,
        make_runner(checkpoint, runtime={"kv_cache_dtype": "bfloat16"}).layout_hash,
        make_runner(tmp_path).layout_hash,
    ]
    assert len({same[0], *others}) == 4
    # Pool sizes may differ between the roles.
    more = limits | {"page_size_tokens": 16, "num_pages": 40, "num_state_slots": 9}
    assert make_runner(checkpoint, limits=more).layout_hash == same[0]


def test_few_and_many_rows_take_different_paths_to_the_same(
    checkpoint: Path, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(60, 4)
    gathered = run_in_pieces(make_runner(checkpoint), ids, [60])[60]
    monkeypatch.setattr(moe, "_GATHER_BYTES", 0)
    for forms in (CPU_FORMS, GPU_FORMS_IN_TORCH):
        found = run_in_pieces(make_runner(checkpoint, forms), ids, [59, 1])[60]
        assert largest_difference(found, gathered) < LOGPROB_BOUND


def test_packed_experts_equal_decoded_ones(checkpoint: Path) -> None:
    """MXFP4 decodes exactly, so how the experts are stored cannot change a bit of them."""
    place, prefix = RankPlace(0, 1, 1, 1), "language_model.model.layers.2.block_sparse_moe.experts."
    checked, rows = check_checkpoint(checkpoint), torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    results, sizes = [], []
    for storage in ExpertStorage:
        forms = replace(CPU_FORMS, experts=storage)
        source = WeightSource(checked, torch.float32, torch.device("cpu"), forms)
        experts = moe.Experts(source, prefix, checked.config, place)
        indices = torch.arange(18).view(9, 2) % 8
        results.append(experts(rows, indices, torch.full((9, 2), 0.5)))
        sizes.append(source.loaded_bytes)
    assert torch.equal(*results)
    assert sizes[0] * 7 < sizes[1]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
def test_bfloat16_stays_near_the_reference(
    kv_dtype: str, checkpoint: Path, reference: ModuleType, make_runner: MakeRunner
) -> None:
    ids = tokens(30, 6)
    want = reference.K3Reference(checkpoint).logits(ids).log_softmax(-1)
    runner = make_runner(checkpoint, runtime={"dtype": "bfloat16", "kv_cache_dtype": kv_dtype})
    found = run_in_pieces(runner, ids, [10, *[1] * 20])
    differences = [largest_difference(got, want[seen - 1]) for seen, got in found.items()]
    assert statistics.median(differences) < BF16_MEDIAN_BOUND
