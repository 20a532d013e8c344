"""What a replay did to the service: load on prefill and pages held over time, waits, and what bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kimi_operator.planner.replay import Replayed, Served, Service

MAX_ROWS = 1000
PREFILL, RUNNING, PAGES = "prefill lanes", "maxNumSeqs", "KV pages"
"""Limits that requests wait for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One stretch of time."""

    start_s: float
    computed_per_s: float
    """Prompt tokens that turns asked in this time need computed, a second: the load on prefill."""
    prompt_per_s: float
    """The same without any reuse."""
    prefill_busy: float
    """Share of the lanes' time that was used."""
    held: float
    """Requests that hold memory, on average."""
    pages_peak: int
    waiting_peak: int
    """Requests that waited for memory or for a lane at once."""
    binds: str
    """What requests spent most of their waiting on in this time, as in Summary; empty when none waited."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole replay in figures. Times in seconds."""

    turns: int
    cut_sessions: int
    duration_s: float
    computed_tokens: int
    recomputed_tokens: int
    """Those of the computed that an earlier turn of the session had asked or answered."""
    prompt_tokens: int
    output_tokens: int
    prefill_busy: float
    pages_peak: int
    held_peak: int
    ttft_p50_s: float
    """From asking to the end of prefill, waiting included; the handoff is not in it."""
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    memory_wait_s: float
    """Longest wait for pages or a place among the running."""
    lane_wait_s: float
    """Longest wait for a prefill lane."""
    binds: str
    """What made requests wait most, or that nothing did. A wait for memory that waits for a lane is one for lanes."""


def summarise(replayed: Replayed, service: Service) -> Summary:
    """One replay in figures; zeros when no turn was served."""
    turns = replayed.turns
    duration_s = max((turn.end_s for turn in turns), default=0.0)
    ttfts, tpots = sorted(map(ttft_s, turns)), sorted(map(tpot_s, turns))
    memory_wait_s = max((turn.admitted_s - turn.asked_s for turn in turns), default=0.0)
    lane_wait_s = max((turn.prefill_s - turn.admitted_s for turn in turns), default=0.0)
    held_peak = peak([(turn.admitted_s, turn.end_s, 1) for turn in turns])
    name = _binds(turns, service, held_peak, 0.0, math.inf)
    sizes = {PREFILL: service.prefill_lanes, RUNNING: service.max_running, PAGES: service.num_pages}
    busy_s = math.fsum(turn.decode_s - turn.prefill_s for turn in turns)
    return Summary(
        turns=len(turns),
        cut_sessions=replayed.cut_sessions,
        duration_s=duration_s,
        computed_tokens=sum(turn.computed_tokens for turn in turns),
        recomputed_tokens=sum(turn.computed_tokens - turn.prompt_tokens + turn.context_tokens for turn in turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        output_tokens=sum(turn.output_tokens for turn in turns),
        prefill_busy=busy_s / (duration_s * service.prefill_lanes) if duration_s else 0.0,
        pages_peak=peak([(turn.admitted_s, turn.end_s, turn.pages) for turn in turns]),
        held_peak=held_peak,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        tpot_p50_s=percentile(tpots, 0.5),
        tpot_p95_s=percentile(tpots, 0.95),
        memory_wait_s=memory_wait_s,
        lane_wait_s=lane_wait_s,
        binds=f"{name} ({sizes[name]:,} in all)" if name else "nothing: no request waited",
    )


def ttft_s(turn: Served) -> float:
    """From asking to the first token, which prefill gives."""
    return turn.decode_s - turn.asked_s


def tpot_s(turn: Served) -> float:
    """Mean time of a token of the answer."""
    return (turn.end_s - turn.decode_s) / turn.output_tokens


def _binds(turns: Sequence[Served], service: Service, held_peak: int, start_s: float, end_s: float) -> str:
    """The limit that turns waited for most of all in [start, end); empty when none waited.

    Memory whose turn waits for a lane is short because lanes are: such a share of the wait for it is prefill's.
    """
    memory_wait_s = math.fsum(_within(t.asked_s, t.admitted_s, start_s, end_s) for t in turns)
    lane_wait_s = math.fsum(_within(t.admitted_s, t.prefill_s, start_s, end_s) for t in turns)
    if max(memory_wait_s, lane_wait_s) <= 0:
        return ""
    held = math.fsum(t.pages * _within(t.admitted_s, t.end_s, start_s, end_s) for t in turns)
    for_lanes = math.fsum(t.pages * _within(t.admitted_s, t.prefill_s, start_s, end_s) for t in turns)
    share = for_lanes / held if held else 0.0
    if lane_wait_s + share * memory_wait_s >= (1 - share) * memory_wait_s:
        return PREFILL
    return RUNNING if held_peak >= service.max_running else PAGES


def _within(first_s: float, last_s: float, start_s: float, end_s: float) -> float:
    """Seconds that two stretches of time have in common."""
    return max(0.0, min(last_s, end_s) - max(first_s, start_s))


def table(replayed: Replayed, service: Service, row_s: float) -> tuple[Row, ...]:
    """Load and pressure over time, a row for each `row_s` seconds. Raises ValueError for more than 1000 rows."""
    end_s = max((turn.end_s for turn in replayed.turns), default=0.0)
    num_rows = math.ceil(end_s / row_s) if row_s > 0 else MAX_ROWS + 1
    if num_rows > MAX_ROWS:
        raise ValueError(f"row_s: got {row_s:g}, expected at least {end_s / MAX_ROWS:.3g}, for at most {MAX_ROWS} rows")
    return tuple(_row(replayed.turns, service, i * row_s, (i + 1) * row_s) for i in range(num_rows))


_COLUMNS = {
    "from s": 8,
    "compute tok/s": 13,
    "asked tok/s": 11,
    "prefill": 8,
    "held": 6,
    "pages, peak": 18,
    "wait": 5,
    "binds": 13,
}


def table_text(rows: Sequence[Row], service: Service) -> Iterator[str]:
    """The rows for a terminal, one line each under a head."""
    yield " ".join(f"{head:>{width}}" for head, width in _COLUMNS.items())
    for row in rows:
        pages = f"{row.pages_peak:,} ({row.pages_peak / service.num_pages:.0%})"
        yield (
            f"{row.start_s:>8,.0f} {row.computed_per_s:>13,.0f} {row.prompt_per_s:>11,.0f} {row.prefill_busy:>8.0%} "
            f"{row.held:>6.1f} {pages:>18} {row.waiting_peak:>5} {row.binds or '-':>13}"
        )


def _row(turns: Sequence[Served], service: Service, start_s: float, end_s: float) -> Row:
    asked = [turn for turn in turns if start_s <= turn.asked_s < end_s]
    seconds = end_s - start_s
    busy_s = math.fsum(_within(turn.prefill_s, turn.decode_s, start_s, end_s) for turn in turns)
    held_s = math.fsum(_within(turn.admitted_s, turn.end_s, start_s, end_s) for turn in turns)
    held_peak = peak([(turn.admitted_s, turn.end_s, 1) for turn in turns], start_s, end_s)
    return Row(
        start_s=start_s,
        computed_per_s=sum(turn.computed_tokens for turn in asked) / seconds,
        prompt_per_s=sum(turn.prompt_tokens for turn in asked) / seconds,
        prefill_busy=busy_s / (seconds * service.prefill_lanes),
        held=held_s / seconds,
        pages_peak=peak([(turn.admitted_s, turn.end_s, turn.pages) for turn in turns], start_s, end_s),
        waiting_peak=peak([(turn.asked_s, turn.prefill_s, 1) for turn in turns], start_s, end_s),
        binds=_binds(turns, service, held_peak, start_s, end_s),
    )


def peak(intervals: Sequence[tuple[float, float, int]], start_s: float = 0.0, end_s: float = math.inf) -> int:
    """Largest sum of the amounts whose half-open intervals share a moment of [start, end), by a sweep."""
    changes = []
    for first_s, last_s, amount in intervals:
        if first_s < end_s and last_s > start_s:
            changes += [(max(first_s, start_s), amount), (last_s, -amount)]
    level = most = 0
    # negative amounts sort first: what ends at a moment is gone before another begins at it
    for _, amount in sorted(changes):
        level += amount
        most = max(most, level)
    return most


def percentile(ascending: Sequence[float], share: float) -> float:
    """The least value that at least `share` of them do not exceed; 0 without any."""
    return ascending[math.ceil(share * len(ascending)) - 1] if ascending else 0.0
