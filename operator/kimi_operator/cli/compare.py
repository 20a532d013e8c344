"""Two answers to one prompt: the same tokens, with the same log-probabilities within a bound? Pure."""

from __future__ import annotations

import math

from msgspec import Struct

from kimi_operator.cli.ask import Answer


class Difference(Struct, frozen=True):
    """How an answer differs from the reference; `reason` is None when it does not."""

    max_logprob: float
    """Largest absolute difference over the tokens that both have; infinite when one is not a number."""
    reason: str | None


def compare(answer: Answer, reference: Answer, bound: float) -> Difference:
    """Compare token ids and log-probabilities token by token."""
    gaps = [abs(left - right) for left, right in zip(answer.logprobs, reference.logprobs, strict=False)]
    # a NaN compares with nothing, so it would hide behind any other value
    largest = max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)
    return Difference(largest, _reason(answer, reference, largest, bound))


def _reason(answer: Answer, reference: Answer, largest: float, bound: float) -> str | None:
    if reference.error:
        return f"the reference failed: {reference.error}"
    if answer.token_ids != reference.token_ids:
        at = _first_difference(answer.token_ids, reference.token_ids)
        return f"token {at} differs: {answer.token_ids[at : at + 1]}, reference {reference.token_ids[at : at + 1]}"
    if not answer.token_ids or len(answer.logprobs) != len(answer.token_ids):
        return f"{len(answer.logprobs)} log-probabilities for {len(answer.token_ids)} tokens"
    return None if largest <= bound else f"a log-probability differs by {largest:.3g}, more than {bound:g}"


def _first_difference(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
