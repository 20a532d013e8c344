"""A replay turn by turn: how times grow with the context of a session. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kimi_operator.planner.pressure import percentile, tpot_s, ttft_s
from kimi_operator.planner.replay import Served
from kimi_operator.planner.units import ceil_div


@dataclass(frozen=True, slots=True)
class TurnRow:
    """The turns of all sessions from number `first` to `last`, which count from 1. Times in seconds."""

    first: int
    last: int
    served: int
    prompt_tokens: float
    """Mean, and so the next."""
    computed_tokens: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float


def by_turn(turns: Sequence[Served], num_turns: int, max_rows: int) -> tuple[TurnRow, ...]:
    """Rows of equally many turns each, up to number `num_turns`; none for turns that nobody was served."""
    each = max(1, ceil_div(num_turns, max_rows))
    return tuple(
        _row(found, first + 1, min(first + each, num_turns))
        for first in range(0, num_turns, each)
        if (found := [turn for turn in turns if first <= turn.turn < first + each])
    )


def _row(turns: Sequence[Served], first: int, last: int) -> TurnRow:
    ttfts, tpots = sorted(map(ttft_s, turns)), sorted(map(tpot_s, turns))
    return TurnRow(
        first=first,
        last=last,
        served=len(turns),
        prompt_tokens=statistics.fmean(turn.prompt_tokens for turn in turns),
        computed_tokens=statistics.fmean(turn.computed_tokens for turn in turns),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        tpot_p50_s=percentile(tpots, 0.5),
        tpot_p95_s=percentile(tpots, 0.95),
    )
