"""Latent attention: absorbed and paged against plain causal attention over expanded keys and values."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from kimi_kernels import mla
from torch import Tensor

Draw = Callable[..., Tensor]
Close = Callable[[Tensor, Tensor], None]
HEADS, NOPE, ROPE, V, L = 4, 16, 8, 12, 20
SCALE = (NOPE + ROPE) ** -0.5
PAGE = 8


@dataclass
class Sequence:
    q_nope: Tensor
    q_rope: Tensor
    rows: Tensor
    expected: Tensor
    """[T, H, V], by the definition."""


@pytest.fixture
def weights(draw: Draw) -> tuple[Tensor, Tensor]:
    return mla.split_kv_b(draw(HEADS * (NOPE + V), L, dtype=torch.float64), HEADS, NOPE)


@pytest.fixture
def make_sequence(draw: Draw, weights: tuple[Tensor, Tensor]) -> Callable[[int], Sequence]:
    w_uk, w_uv = weights

    def make(tokens: int) -> Sequence:
        q_nope, q_rope, rows = (
            draw(tokens, *rest, dtype=torch.float64) for rest in ((HEADS, NOPE), (HEADS, ROPE), (L + ROPE,))
        )
        expected = torch.zeros(tokens, HEADS, V, dtype=torch.float64)
        for t in range(tokens):
            for h in range(HEADS):
                keys = torch.cat([rows[: t + 1, :L] @ w_uk[h].T, rows[: t + 1, L:]], 1)
                share = torch.softmax(keys @ torch.cat([q_nope[t, h], q_rope[t, h]]) * SCALE, 0)
                expected[t, h] = share @ (rows[: t + 1, :L] @ w_uv[h].T)
        return Sequence(q_nope, q_rope, rows, expected)

    return make


def fill(cache: Tensor, pages: list[int], rows: Tensor) -> None:
    for t, row in enumerate(rows):
        cache[pages[t // PAGE], t % PAGE] = row


def test_full_equals_the_definition(make_sequence: Callable, weights: tuple[Tensor, Tensor], close: Close) -> None:
    w_uk, w_uv = weights
    seq = make_sequence(19)
    k_nope = torch.einsum("tl,hnl->thn", seq.rows[:, :L], w_uk)
    k = torch.cat([k_nope, seq.rows[:, None, L:].expand(-1, HEADS, -1)], -1)
    v = torch.einsum("tl,hvl->thv", seq.rows[:, :L], w_uv)
    close(mla.full(torch.cat([seq.q_nope, seq.q_rope], -1), k, v, SCALE), seq.expected)


@pytest.mark.parametrize("num_new", [1, 3, 8, 19])
def test_paged_prefill_equals_the_definition(num_new: int, make_sequence: Callable, weights: tuple[Tensor, Tensor],
                                             close: Close) -> None:  # fmt: skip
    w_uk, w_uv = weights
    seq = make_sequence(19)
    cache = torch.full((9, PAGE, L + ROPE), float("nan"), dtype=torch.float64)
    pages = [7, 2, 5]
    fill(cache, pages, seq.rows)
    q = mla.absorb_query(seq.q_nope[-num_new:], seq.q_rope[-num_new:], w_uk)
    # Page 8 stands for what a table holds past the length.
    o = mla.paged(q, cache, torch.tensor([*pages, 8], dtype=torch.int32), 19, SCALE, latent_rank=L)
    close(mla.expand_output(o, w_uv), seq.expected[-num_new:])


def test_paged_decode_serves_requests_of_many_lengths(make_sequence: Callable, weights: tuple[Tensor, Tensor],
                                                      close: Close) -> None:  # fmt: skip
    w_uk, w_uv = weights
    lengths = [27, PAGE + 1, PAGE, 1]
    sequences = [make_sequence(n) for n in lengths]
    cache = torch.full((20, PAGE, L + ROPE), float("nan"), dtype=torch.float64)
    table = torch.randperm(19, generator=torch.Generator().manual_seed(3))[:16].view(4, 4).to(torch.int32)
    for pages, seq in zip(table.tolist(), sequences, strict=True):
        fill(cache, pages, seq.rows)
    q = mla.absorb_query(
        torch.stack([s.q_nope[-1] for s in sequences]), torch.stack([s.q_rope[-1] for s in sequences]), w_uk
    )
    pages = mla.PageTable(table, torch.tensor(lengths, dtype=torch.int32), tuple(lengths))
    o = mla.paged_decode(q, cache, pages, SCALE, latent_rank=L)
    close(mla.expand_output(o, w_uv), torch.stack([s.expected[-1] for s in sequences]))


def test_a_strided_view_of_one_layer_of_all_pages_will_do(draw: Draw, close: Close) -> None:
    pages = draw(6, 2, PAGE, L + ROPE)
    q, ids = draw(3, HEADS, L + ROPE), torch.tensor([4, 0])
    got = mla.paged(q, pages[:, 1], ids, 11, SCALE, latent_rank=L)
    close(got, mla.paged(q, pages[:, 1].contiguous(), ids, 11, SCALE, latent_rank=L))


def test_no_request_gives_no_row(draw: Draw) -> None:
    nothing = torch.zeros(0, 3, dtype=torch.int32)
    table = mla.PageTable(nothing, nothing[:, 0], ())
    o = mla.paged_decode(draw(0, HEADS, L + ROPE), draw(2, PAGE, L + ROPE), table, 1.0, latent_rank=L)
    assert o.shape == (0, HEADS, L)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [((3, 4), "sort the requests by length"), ((3, 0), "expected numbers >= 1"), ((3,), "1 on the host")],
)
def test_a_table_that_no_operator_could_read_is_refused(lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla.PageTable(torch.zeros(2, 1, dtype=torch.int64), torch.tensor([3, 4]), lengths)
