"""A replay turn by turn: how times grow with the context of a session. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct

from kimi_operator.planner.pressure import times
from kimi_operator.planner.served import Served
from kimi_operator.planner.units import ceil_div


class TurnRow(Struct, frozen=True):
    """The turns of all sessions from number `first` to `last`, which count from 1. Times in seconds, as in Summary."""

    first: int
    last: int
    served: int
    prompt_tokens: float
    """Mean, and so the next."""
    computed_tokens: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None


def by_turn(turns: Sequence[Served], num_turns: int, max_rows: int) -> tuple[TurnRow, ...]:
    """Rows of equally many turns each, up to number `num_turns`; none for turns that nobody was served."""
    each = max(1, ceil_div(num_turns, max_rows))
    rows: list[list[Served]] = [[] for _ in range(0, num_turns, each)]
    for turn in turns:
        rows[turn.turn // each].append(turn)
    return tuple(
        _row(found, index * each + 1, min((index + 1) * each, num_turns)) for index, found in enumerate(rows) if found
    )


def _row(turns: Sequence[Served], first: int, last: int) -> TurnRow:
    return TurnRow(
        first=first,
        last=last,
        served=len(turns),
        prompt_tokens=statistics.fmean(turn.prompt_tokens for turn in turns),
        computed_tokens=statistics.fmean(turn.computed_tokens for turn in turns),
        **times(turns),
    )
