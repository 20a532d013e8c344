"""How fast prefill feeds decode, and what lets a load run that decode has no room for. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.planner.case import Timing
from kimi_operator.planner.pools import num_slots
from kimi_operator.planner.units import ceil_div, counted
from kimi_operator.planner.workload import Workload

MORE_PREFILL = "add groups to prefill"


class Load(Struct, frozen=True):
    """What decode is asked to run at once, and how fast prefill feeds it, in requests a second."""

    running: int | None
    """Requests at once; None asks for as many as fit."""
    asked_per_s: float | None
    """The rate that comes; None where clients wait for their answers and ask again."""
    feed: Feed | None
    """None where nothing predicts times."""

    def is_fed_less(self, seqs: int) -> bool:
        """Whether prefill feeds no more than decode serves with so many running on each lane."""
        if self.feed is None or (self.asked_per_s is not None and self.asked_per_s <= self.feed.per_s):
            return False
        return self.feed.per_s <= self.feed.lanes * self.feed.lane_per_s(seqs)

    def room(self, seqs: int) -> str:
        """What lets all run where a lane runs no more than `seqs`: lanes, but none that prefill leaves empty."""
        assert self.running is not None, "as many as fit have room"
        if self.is_fed_less(seqs):
            return f"{MORE_PREFILL}, which binds: more lanes of decode serve no more; or lower it"
        if self.feed is not None and self.asked_per_s is None:
            filled = math.ceil(self.feed.per_s / self.feed.lane_per_s(seqs))
            if filled < ceil_div(self.running, seqs):
                return f"use {counted(filled, 'lane')} and {MORE_PREFILL}, which fills no more of them, or lower it"
        return more_lanes(self.running, seqs)


class Feed(Struct, frozen=True):
    """Prefill as a whole beside lanes of decode."""

    per_s: float
    """What prefill computes."""
    lanes: int
    """Of decode."""
    lane_per_s: Callable[[int], float]
    """Running requests of a lane of decode -> what it serves."""


def load_of(work: Workload, lanes: tuple[int, int], timings: tuple[Timing, Timing] | None) -> Load:
    """Of prefill and decode, by their lanes and times; without these nobody knows what prefill feeds."""
    rate = work.requests_per_second
    load = Load(work.running, None if rate is None else float(rate), None)
    if timings is None:
        return load
    prefill, decode = timings
    fed = fed_per_s(work, prefill, lanes[0])
    prompt_s = lanes[0] / fed

    def lane_per_s(seqs: int) -> float:
        answer_s = float(work.output.mean) * decode.decode_step_s(seqs, work.mean_context)
        # a request has its slot before its prompt is computed
        return min(seqs / answer_s, num_slots(seqs) / (prompt_s + answer_s))

    return replace(load, feed=Feed(fed, lanes[1], lane_per_s))


def fed_per_s(work: Workload, timing: Timing, lanes: int) -> float:
    """Requests a second that so many lanes of prefill compute."""
    return lanes / fmean(timing.prefill_s(*work.computed_and_reused(tokens)) for tokens in work.prompt.points)


def more_lanes(running: int, seqs: int) -> str:
    """What lets so many requests run where a lane runs no more than `seqs`, whatever prefill feeds."""
    return f"use {counted(ceil_div(running, seqs), 'lane')}, or lower it"
