"""From logits to tokens. A request's result does not depend on which other requests are in the batch."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_worker.protocol.engine import SampledToken, Sampling, TokenLogprob


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be chosen.

    position  of the new token in its sequence, prompt included: with the seed it names the random number
    seed      the request's own, or one that the lane drew when it admitted the request
    """

    sampling: Sampling
    position: int
    seed: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[SampledToken | None]:
    """Choose a token for every row.

    logits   [n, vocab]  fp32
    draws    n of them, in row order
    returns  n results; None where the logits are not finite: that request cannot go on

    Log-probabilities are those of the distribution before temperature and top-p.
    """
    if not draws:
        return []
    token_ids = _choose(logits, draws)
    is_finite = torch.isfinite(logits).all(-1).tolist()
    if any(draw.sampling.logprobs is not None for draw in draws):
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
        most_likely = _top(logprobs, draws)
    else:
        chosen, most_likely = [None] * len(draws), [[] for _ in draws]
    results: list[SampledToken | None] = []
    for row, draw in enumerate(draws):
        if not is_finite[row]:
            results.append(None)
        elif draw.sampling.logprobs is None:
            results.append(SampledToken(token_ids[row]))
        else:
            results.append(SampledToken(token_ids[row], chosen[row], most_likely[row]))
    return results


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to a seed and a position."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    # 53 bits fill a double's mantissa.
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    token_ids = logits.argmax(-1).tolist()
    rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0.0]
    if rows:
        drawn = _draw_rows(logits[rows], [draws[row] for row in rows])
        for row, token_id in zip(rows, drawn, strict=True):
            token_ids[row] = token_id
    return token_ids


def _draw_rows(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample every row by inverting its cumulative distribution at the request's own random number."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(-1)

    temperature = column([draw.sampling.temperature for draw in draws])
    top_p = column([draw.sampling.top_p for draw in draws])
    at = column([uniform(draw.seed, draw.position) for draw in draws])
    # fp64, because a cumulative sum over 160k fp32 numbers loses the tail. A stable sort keeps ties in id order.
    wide = torch.nan_to_num(logits.double(), nan=-math.inf)
    # The maximum goes first: divided by a tiny temperature it would be infinite, and then nothing is a share.
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature
    shares, order = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    total = shares.cumsum(-1)
    # Keep tokens until top_p is reached, the one that reaches it included; always at least one.
    kept = torch.where(total - shares < top_p, shares, 0.0)
    kept[:, 0] = shares[:, 0]
    total = kept.cumsum(-1)
    # The first token whose cumulative share exceeds the number; a token with share 0 can never be it.
    index = torch.searchsorted(total, at * total[:, -1:], right=True)
    index = index.clamp_max((kept > 0).sum(-1, keepdim=True) - 1).clamp_min(0)
    return order.gather(-1, index).squeeze(-1).tolist()


def _top(logprobs: Tensor, draws: Sequence[Draw]) -> list[list[TokenLogprob]]:
    wanted = [draw.sampling.logprobs or 0 for draw in draws]
    most = min(max(wanted), logprobs.shape[-1])
    if most == 0:
        return [[] for _ in draws]
    values, ids = logprobs.topk(most, dim=-1)
    return [
        [TokenLogprob(token_id, value) for token_id, value in zip(row_ids[:count], row_values[:count], strict=True)]
        for row_ids, row_values, count in zip(ids.tolist(), values.tolist(), wanted, strict=True)
    ]
