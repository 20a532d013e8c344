"""Sampling: right distributions, repeatable, blind to the company in the batch."""

import math
from collections import Counter

import pytest
import torch
from kimi_worker.engine.sampling import Draw, sample, uniform
from kimi_worker.protocol.engine import Sampling
from torch import Tensor

GREEDY = Sampling(max_tokens=1, temperature=0.0)
LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
SHARES = torch.softmax(LOGITS[0].double(), 0).tolist()


def random_logits(num: int, vocab: int = 50) -> Tensor:
    return 3 * torch.randn(num, vocab, generator=torch.Generator().manual_seed(num))


def chosen(logits: Tensor, draws: list[Draw]) -> list[int]:
    found = sample(logits, draws)
    assert all(token is not None for token in found)
    return [token.token_id for token in found if token is not None]


def counts(sampling: Sampling, num: int = 4000) -> Counter[int]:
    draws = [Draw(sampling, position, seed=7) for position in range(num)]
    return Counter(chosen(LOGITS.expand(num, -1), draws))


def test_nothing_to_draw() -> None:
    assert sample(torch.empty(0, 9), []) == []


def test_temperature_zero_takes_the_largest() -> None:
    logits = random_logits(6)
    assert chosen(logits, [Draw(GREEDY, 0, 0)] * 6) == logits.argmax(-1).tolist()


def test_shares_follow_the_distribution() -> None:
    found = counts(Sampling(max_tokens=1))
    for token, share in enumerate(SHARES):
        # five standard deviations
        assert abs(found[token] - 4000 * share) < 5 * math.sqrt(4000 * share * (1 - share))


def test_temperature_sharpens() -> None:
    found = counts(Sampling(max_tokens=1, temperature=0.25))
    want = torch.softmax(LOGITS[0].double() / 0.25, 0).tolist()
    for token, share in enumerate(want):
        assert abs(found[token] - 4000 * share) < 5 * math.sqrt(4000 * share * (1 - share)) + 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-308, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(counts(Sampling(max_tokens=1, temperature=temperature), num=50)) == {1}
    logits = random_logits(6) * 1e6
    assert (
        chosen(logits, [Draw(Sampling(max_tokens=1, temperature=temperature), 0, 0)] * 6) == logits.argmax(-1).tolist()
    )


def test_the_largest_is_drawn_the_more_the_lower_the_temperature() -> None:
    """With one random number a position, a choice that was the largest stays so at every lower temperature."""
    temperatures = [4.0, 1.0, 0.5, 0.1, 1e-3, 1e-30, 1e-300, 5e-324]
    shares = [counts(Sampling(max_tokens=1, temperature=t), num=400)[1] for t in temperatures]
    assert shares == sorted(shares)
    assert shares[0] < 200
    assert shares[-1] == 400


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {1}), (SHARES[1] - 1e-3, {1}), (SHARES[1] + 1e-3, {1, 2}), (0.95, {0, 1, 2})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    found = counts(Sampling(max_tokens=1, top_p=top_p))
    assert set(found) == kept
    total = sum(SHARES[token] for token in kept)
    for token in kept:
        share = SHARES[token] / total
        assert abs(found[token] - 4000 * share) <= 5 * math.sqrt(4000 * share * (1 - share))


def test_a_seed_repeats_in_any_company() -> None:
    logits = random_logits(8)
    sampling = Sampling(max_tokens=1, temperature=0.9, top_p=0.9)
    draws = [Draw(sampling if row % 3 else GREEDY, position=20 + row, seed=row // 2) for row in range(8)]
    alone = [chosen(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]
    assert chosen(logits, draws) == alone
    order = [5, 0, 7, 2]
    assert chosen(logits[order], [draws[row] for row in order]) == [alone[row] for row in order]


def test_seed_and_position_both_count() -> None:
    numbers = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert uniform(3, 4) == uniform(3, 4)


def test_logprobs_are_of_the_plain_distribution() -> None:
    logits = random_logits(3)
    want = torch.log_softmax(logits, -1)
    sampling = Sampling(max_tokens=1, temperature=0.5, top_p=0.5, logprobs=4)
    found = sample(logits, [Draw(sampling, 1, 2), Draw(GREEDY, 1, 2), Draw(Sampling(max_tokens=1, logprobs=0), 1, 2)])
    first, second, third = found
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.logprob == pytest.approx(float(want[0, first.token_id]))
    values, ids = want[0].topk(4)
    assert [entry.token_id for entry in first.top] == ids.tolist()
    assert [entry.logprob for entry in first.top] == pytest.approx(values.tolist())
    assert second.logprob is None
    assert second.top == []
    assert third.logprob == pytest.approx(float(want[2, third.token_id]))
    assert third.top == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_fail_only_their_request(bad: float) -> None:
    logits = random_logits(3)
    logits[1, 4] = bad
    sampling = Sampling(max_tokens=1, logprobs=2)
    found = sample(logits, [Draw(sampling, 0, row) for row in range(3)])
    assert found[1] is None
    assert found[0] == sample(logits[:1], [Draw(sampling, 0, 0)])[0]
    assert found[2] is not None
