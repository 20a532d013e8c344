"""A replay on one screen of text: what binds, load over time, times by turn, and what is not in the figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kimi_operator.cli import replay_rows as rows
from kimi_operator.cli.replayed import Outcome

LABEL_WIDTH = 16
_OVER_TIME_WIDTHS = (8, 13, 11, 8, 6, 18, 5, 13)
_BY_TURN_WIDTHS = (9, 6, 9, 9, 28, 28, 28)


def replay_text(outcome: Outcome) -> Iterator[str]:
    """For a terminal."""
    yield rows.title(outcome)
    yield from rows.opening(outcome)
    yield from (f"warning: {warning}" for warning in rows.warnings(outcome))
    if not outcome.value.summary.turns:
        yield rows.NOTHING_SERVED
        return
    yield from (f"  {label:<{LABEL_WIDTH}} {value}" for label, value in rows.summary_rows(outcome))
    yield ""
    yield rows.over_time_title(outcome)
    yield from (_line(cells, _OVER_TIME_WIDTHS) for cells in (rows.OVER_TIME, *rows.over_time(outcome)))
    yield ""
    yield rows.BY_TURN_TITLE
    yield from (_line(cells, _BY_TURN_WIDTHS) for cells in (rows.BY_TURN, *rows.by_turn(outcome)))
    yield ""
    yield from rows.notes(outcome)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
