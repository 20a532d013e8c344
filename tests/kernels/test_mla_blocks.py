"""Attention in blocks: equal to the obvious form at any block sizes, and within its bound of memory at any length."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_kernels import mla
from kimi_kernels.mla import blocks, reference
from peak_memory import peak_bytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


RANK, ROPE = 6, 2
PROFILES = Path(__file__).parents[2] / "operator/kimi_operator/profiles/hardware"


def decode_case(seed: int, lengths: tuple[int, ...], page: int, heads: int) -> dict[str, Any]:
    """Operands over a cache in which every row that no request owns is NaN."""
    rank, rope = RANK, ROPE
    pages = -(-lengths[0] // page)
    cache = torch.full((len(lengths) * pages + 1, page, rank + rope), float("nan"), dtype=torch.float64)
    ids = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(seed)).view(-1, pages)
    for r, length in enumerate(lengths):
        rows = cache[ids[r]].flatten(0, 1)
        rows[:length] = normal(seed + r, length, rank + rope)
        cache[ids[r]] = rows.view(pages, page, -1)
    table = mla.PageTable(ids, torch.tensor(lengths), lengths)
    return {"q_latent": 3 * normal(seed, len(lengths), heads, rank + rope), "cache": cache, "table": table}


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 50), st.integers(1, 50)), page=st.sampled_from([1, 4, 16]), heads=st.integers(1, 3),
    budget=st.integers(1, 60_000), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_blocks_of_a_prompt_give_the_same(
    sizes: tuple[int, int], page: int, heads: int, budget: int, seed: int
) -> None:
    new, num_cached = sorted(sizes)
    case = decode_case(seed, (num_cached,), page, heads)
    q, ids = 3 * normal(seed, new, heads, 8), torch.cat([case["table"].page_ids[0], torch.tensor([0])])
    expected = reference.paged(q, case["cache"], ids, num_cached, 0.3, latent_rank=RANK)
    got = blocks.paged(q, case["cache"], ids, num_cached, 0.3, latent_rank=RANK, scratch_bytes=budget)
    torch.testing.assert_close(got, expected, **TIGHT)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), page=st.sampled_from([1, 4, 16]),
    heads=st.integers(1, 3), budget=st.integers(1, 60_000), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_blocks_of_decodes_give_the_same(lengths: list[int], page: int, heads: int, budget: int, seed: int) -> None:
    case = decode_case(seed, tuple(sorted(lengths, reverse=True)), page, heads)
    expected = reference.paged_decode(**case, scale=0.3, latent_rank=RANK)
    got = blocks.paged_decode(**case, scale=0.3, latent_rank=RANK, scratch_bytes=budget)
    torch.testing.assert_close(got, expected, **TIGHT)


def test_large_scores_do_not_overflow() -> None:
    """Scores of thousands in fp32, whose plain exponentials are infinite, in blocks of one page."""
    case = decode_case(1, (50, 7), 4, 2)
    for shift in (1.0, -1.0):
        got = blocks.paged_decode(
            (case["q_latent"] * 1000 * shift).float(), case["cache"].float(), case["table"], 1.0,
            latent_rank=RANK, scratch_bytes=1,
        )  # fmt: skip
        wide = case | {"q_latent": (case["q_latent"] * 1000 * shift).float().double()}
        wide["cache"] = case["cache"].float().double()
        expected = reference.paged_decode(**wide, scale=1.0, latent_rank=RANK)
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("num_cached", "cache_dtype"), [(8_192, torch.float32), (524_288, torch.bfloat16)])
def test_a_chunk_of_a_prompt_stays_within_its_scratch(num_cached: int, cache_dtype: torch.dtype) -> None:
    heads, rank, rope, page, new, budget = 2, 8, 4, 64, 96, 1 << 20
    # All pages are the same one: only what the call allocates is of interest.
    cache, ids = (
        torch.zeros(1, page, rank + rope, dtype=cache_dtype),
        torch.zeros(num_cached // page, dtype=torch.int64),
    )
    q = torch.zeros(new, heads, rank + rope, dtype=torch.bfloat16)
    used = peak_bytes(lambda: blocks.paged(q, cache, ids, num_cached, 1.0, latent_rank=rank, scratch_bytes=budget))
    assert used - new * heads * rank * q.element_size() <= budget
    # The measure is no trivial one: the obvious form needs all scores at once.
    assert used > budget // 2


@pytest.mark.parametrize(
    ("lengths", "cache_dtype"),
    [((16_384,) * 8, torch.float32), ((524_288, 300_001, *[100] * 30), torch.bfloat16)],
)
def test_decodes_stay_within_their_scratch(lengths: tuple[int, ...], cache_dtype: torch.dtype) -> None:
    heads, rank, rope, page, budget = 2, 8, 4, 64, 8 << 20
    cache = torch.zeros(1, page, rank + rope, dtype=cache_dtype)
    table = mla.PageTable(
        torch.zeros(len(lengths), lengths[0] // page, dtype=torch.int64), torch.tensor(lengths), lengths
    )
    q = torch.zeros(len(lengths), heads, rank + rope, dtype=torch.bfloat16)
    used = peak_bytes(lambda: blocks.paged_decode(q, cache, table, 1.0, latent_rank=rank, scratch_bytes=budget))
    assert used - q.shape[0] * heads * rank * q.element_size() <= budget
    assert used > budget // 2


def test_the_released_sizes_stay_within_the_bound() -> None:
    """48 heads of a lane of two ranks, 2,048 new tokens, bf16; the context is short, which the test above allows."""
    q, cache = torch.zeros(2048, 48, 576, dtype=torch.bfloat16), torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    ids = torch.zeros(32, dtype=torch.int64)
    # One block of queries is the peak; the rest would only take time.
    shown = q[:700]
    used = peak_bytes(lambda: mla.paged(shown, cache, ids, 2048, 1.0, latent_rank=512))
    assert mla.SCRATCH_BYTES // 2 < used - 700 * 48 * 512 * 2 <= mla.SCRATCH_BYTES


@pytest.mark.parametrize("profile", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_bound_is_a_small_part_of_what_the_planner_sets_aside(profile: Path) -> None:
    amount = yaml.safe_load(profile.read_text())["spec"]["reserve"]["activations"]
    assert amount.endswith("Gi")
    assert float(amount.removesuffix("Gi")) * 2**30 / 8 >= mla.SCRATCH_BYTES


class _HostReads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host, each of which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
        return func(*args, **(kwargs or {}))


def test_decodes_never_wait_for_the_device() -> None:
    case = decode_case(2, (40, 9, 1), 4, 2)
    with _HostReads() as reads:
        blocks.paged_decode(**case, scale=0.3, latent_rank=RANK, scratch_bytes=4000)
        assert reads.count == 0
        int(case["table"].lengths.max())
        assert reads.count == 1
