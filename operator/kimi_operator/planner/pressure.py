"""What a replay did to the service: load on prefill and pages held over time, waits, and what bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from msgspec import Struct, field

from kimi_operator.planner.served import Cause, Level, Replayed, Served
from kimi_operator.planner.service import Service


class Row(Struct, frozen=True):
    """One stretch of time."""

    start_s: float
    computed_per_s: float
    """Prompt tokens that lanes of prefill computed in this time, a second; those of a prompt spread evenly."""
    prompt_per_s: float
    """Those of turns asked in this time, without any reuse."""
    prefill_busy: float
    """Share of the lanes' time that was used."""
    held: float
    """Requests that hold memory, on average."""
    pages_peak: int
    waiting_peak: int
    """Requests that waited for memory or behind another one at once; not those that wait for the end of a step."""
    binds: str
    """What requests spent most of their waiting on in this time, as in Cause; empty when none waited."""


class Summary(Struct, frozen=True):
    """The whole replay in figures. Times in seconds; percentiles are None where no turn has such a time."""

    turns: int
    cut_sessions: int
    refused_turns: int
    """Those that came when as many waited for their lane's memory as may: a worker answers 429."""
    expired_turns: int
    """Those whose prefill ended later than a worker keeps their memory for it."""
    duration_s: float
    computed_tokens: int
    recomputed_tokens: int
    """Those of the computed that an earlier turn of the session had asked or answered."""
    prompt_tokens: int
    output_tokens: int
    prefill_busy: float
    prefill_lockstep: float
    """Share of that time in which lanes were done and waited for the slowest of their group."""
    pages_peak: int
    held_peak: int
    ttft_p50_s: float | None
    """From asking to the end of prefill, waiting included; the handoff is not in it."""
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    memory_wait_s: float
    """Longest wait for pages and a slot."""
    lane_wait_s: float
    """Longest wait of a turn with memory for its first chunk, the step under way included."""
    running_wait_s: float
    """Longest wait of a computed prompt for its place in the batch, the step under way included."""
    waited_s: dict[str, float]
    """Time that all requests together waited, by Cause."""
    binds: str
    """The largest of them, or that nothing waited."""


def summarise(replayed: Replayed, service: Service) -> Summary:
    """One replay in figures; zeros when no turn was served."""
    turns, lane = replayed.turns, service.lane
    duration_s = _duration_s(turns)
    whole = next(_stretches(replayed, duration_s, duration_s), _Stretch(0.0))
    return Summary(
        turns=len(turns),
        cut_sessions=replayed.cut_sessions,
        refused_turns=sum(turn.ahead >= lane.max_queued for turn in turns),
        expired_turns=sum(turn.first_s - turn.admitted_s > lane.reservation_s for turn in turns),
        duration_s=duration_s,
        computed_tokens=sum(turn.computed_tokens for turn in turns),
        recomputed_tokens=sum(turn.computed_tokens - turn.prompt_tokens + turn.context_tokens for turn in turns),
        prompt_tokens=whole.prompt_tokens,
        output_tokens=sum(turn.output_tokens for turn in turns),
        prefill_busy=_share(whole.busy_s, duration_s * service.all_prefill_lanes),
        prefill_lockstep=_share(replayed.lockstep_s, whole.busy_s),
        pages_peak=whole.pages_peak,
        held_peak=whole.held_peak,
        memory_wait_s=max((turn.admitted_s - turn.asked_s for turn in turns), default=0.0),
        lane_wait_s=max((turn.prefill_s - turn.admitted_s for turn in turns), default=0.0),
        running_wait_s=max((turn.running_s - turn.first_s for turn in turns), default=0.0),
        waited_s={cause.value: seconds for cause, seconds in zip(Cause, whole.waited_s, strict=True)},
        binds=_binds_text(whole.binds, service),
        **times(turns),
    )


def times(turns: Sequence[Served]) -> dict[str, float | None]:
    """Percentiles of TTFT, from asking to the first token, and of TPOT, in seconds."""
    return {
        f"{name}_p{share}_s": percentile(sorted(found), share / 100)
        for name, found in (("ttft", ttfts_s(turns)), ("tpot", tpots_s(turns)))
        for share in (50, 95)
    }


def ttfts_s(turns: Iterable[Served]) -> list[float]:
    """Time to the first token of each turn."""
    return [turn.first_s - turn.asked_s for turn in turns]


def tpots_s(turns: Iterable[Served]) -> list[float]:
    """Mean time between two tokens of each turn that has two: prefill gives the first, the batch the others."""
    return [(turn.end_s - turn.first_s) / (turn.output_tokens - 1) for turn in turns if turn.output_tokens > 1]


def share_within(times_s: Sequence[float], target_s: float) -> float | None:
    """Share of the times that are no longer than the target; None without any."""
    return sum(time_s <= target_s for time_s in times_s) / len(times_s) if times_s else None


def percentile(ascending: Sequence[float], share: float) -> float | None:
    """The least value that at least `share` of them do not exceed; None without any."""
    return ascending[math.ceil(share * len(ascending)) - 1] if ascending else None


def table(replayed: Replayed, service: Service, row_s: float) -> tuple[Row, ...]:
    """Load and pressure over time, a row for each `row_s` seconds; the last one may be shorter."""
    end_s = _duration_s(replayed.turns)
    return tuple(
        Row(
            start_s=each.start_s,
            computed_per_s=each.computed_tokens / (seconds := min(row_s, end_s - each.start_s)),
            prompt_per_s=each.prompt_tokens / seconds,
            prefill_busy=each.busy_s / (seconds * service.all_prefill_lanes),
            held=each.held_s / seconds,
            pages_peak=each.pages_peak,
            waiting_peak=each.waiting_peak,
            binds=each.binds.value if each.binds else "",
        )
        for each in _stretches(replayed, end_s, row_s)
    )


class _Stretch(Struct):
    """Sums and peaks of a stretch of time."""

    start_s: float
    computed_tokens: float = 0.0
    prompt_tokens: int = 0
    busy_s: float = 0.0
    held_s: float = 0.0
    held_peak: int = 0
    pages_peak: int = 0
    waiting_peak: int = 0
    waited_s: list[float] = field(default_factory=lambda: [0.0] * len(Cause))

    @property
    def binds(self) -> Cause | None:
        """What was waited for most; None when nothing was."""
        most, cause = max(zip(self.waited_s, Cause, strict=True), key=lambda pair: pair[0])
        return cause if most > 0 else None


def _stretches(replayed: Replayed, end_s: float, row_s: float) -> Iterator[_Stretch]:
    """The time to `end_s` in rows, from one walk over the turns and one over the levels."""
    found = [_Stretch(i * row_s) for i in range(math.ceil(end_s / row_s) if end_s else 0)]
    for turn in replayed.turns:
        found[min(int(turn.asked_s / row_s), len(found) - 1)].prompt_tokens += turn.prompt_tokens
        per_s = turn.computed_tokens / (turn.first_s - turn.prefill_s)
        for stretch, seconds in _parts(found, row_s, turn.prefill_s, turn.first_s):
            stretch.computed_tokens += per_s * seconds
    for level, following in pairwise(replayed.levels):
        for stretch, seconds in _parts(found, row_s, level.since_s, following.since_s):
            _add(stretch, level, seconds)
    yield from found


def _parts(found: Sequence[_Stretch], row_s: float, from_s: float, to_s: float) -> Iterator[tuple[_Stretch, float]]:
    """Rows that a time lies in, and how much of it."""
    first, last = (min(int(each_s / row_s), len(found) - 1) for each_s in (from_s, to_s))
    for stretch in found[first : last + 1]:
        seconds = min(to_s, stretch.start_s + row_s) - max(from_s, stretch.start_s)
        # what ends where a row begins has lasted no time in it
        if seconds > 0:
            yield stretch, seconds


def _add(stretch: _Stretch, level: Level, seconds: float) -> None:
    stretch.busy_s += level.busy_lanes * seconds
    stretch.held_s += level.held * seconds
    stretch.held_peak = max(stretch.held_peak, level.held)
    stretch.pages_peak = max(stretch.pages_peak, level.pages)
    stretch.waiting_peak = max(stretch.waiting_peak, sum(level.waiting))
    for index, waiting in enumerate(level.waiting):
        stretch.waited_s[index] += waiting * seconds


def _duration_s(turns: Sequence[Served]) -> float:
    return max((turn.end_s for turn in turns), default=0.0)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _binds_text(cause: Cause | None, service: Service) -> str:
    if cause is None:
        return "nothing: no request waited"
    if cause is Cause.PREFILL:
        return f"{cause.value} ({service.all_prefill_lanes:,} in all)"
    lane = service.lane
    sizes = {Cause.RUNNING: lane.max_running, Cause.PAGES: lane.num_pages, Cause.SLOTS: lane.num_slots}
    return f"{cause.value} ({sizes[cause]:,} a lane)"
