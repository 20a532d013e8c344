"""Targets of a workload beside predicted times: which are missed, and which are met or missed within the band."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.errors import Problem
from kimi_operator.planner.case import Case, Solution, Timing
from kimi_operator.planner.reservation import RESERVATION, raised
from kimi_operator.planner.units import counted, most, seconds_text

TPOT, TTFT = "workload.targets.tpotSeconds", "workload.targets.ttftSeconds"
TARGETS = (TPOT, TTFT, RESERVATION)
"""What a faster layout meets. The last one is a limit of the workers, beyond which requests fail."""
WIDEST_BAND = 10
"""Times its value that the most of a band lies below."""


ARRIVING = "as prompts come at any time, wait for a step's end and keep step with others"
"""What a mean time to the first token counts at a rate."""


class Judged(Struct, frozen=True):
    """A target and the predicted time that it is held against, in seconds."""

    field: str
    target_s: float
    time_s: float
    band_s: tuple[float, float] | None
    what: str
    remedy: str

    @property
    def misses(self) -> tuple[Problem, ...]:
        """The target, where the time is longer."""
        if self.time_s <= self.target_s:
            return ()
        unsure = f"; {self._band}: not sure" if self._is_unsure else ""
        expected = f"at least {seconds_text(self.time_s)}, {self.what}{unsure}"
        return (Problem(self.field, f"{self.target_s:,g} s", expected, self.remedy),)

    @property
    def doubts(self) -> tuple[Problem, ...]:
        """The target, where the time is shorter by less than the prediction's band."""
        if self.time_s > self.target_s or not self._is_unsure:
            return ()
        expected = f"more to be sure: {seconds_text(self.time_s)} is predicted, and it lies {self._band}"
        return (Problem(self.field, f"{self.target_s:,g} s", expected, "measure it"),)

    @property
    def _is_unsure(self) -> bool:
        return self.band_s is not None and self.band_s[0] <= self.target_s <= self.band_s[1]

    @property
    def _band(self) -> str:
        assert self.band_s is not None, "what has no band is not unsure"
        return f"within the band of {seconds_text(*self.band_s)}"


class Unserved(Struct, frozen=True):
    """A load that is not served in full."""

    misses: tuple[Problem, ...]
    doubts: tuple[Problem, ...] = ()


Verdict = Judged | Unserved
"""On a layout as a whole, beside those on its roles."""


def told(solutions: Iterable[Solution], waits: Iterable[Verdict]) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """What a layout misses; and what it meets within the band alone, unless it is missed for another reason."""
    roles = tuple(solutions)
    told_of = {miss.field for each in roles for miss in each.misses}
    # a load that a role misses need not be told twice
    others = (each for each in waits if isinstance(each, Judged) or told_of.isdisjoint(m.field for m in each.misses))
    verdicts: tuple[Solution | Verdict, ...] = (*roles, *others)
    misses = tuple(miss for each in verdicts for miss in each.misses)
    fields = {miss.field for miss in misses}
    return misses, tuple(doubt for each in verdicts for doubt in each.doubts if doubt.field not in fields)


def judged(case: Case, seqs: int) -> Iterator[Judged]:
    """Targets, and how long decode keeps room, with so many running requests of a lane."""
    if case.timing is None:
        return
    if case.role is Role.DECODE and case.workload.tpot_s is not None:
        yield _tpot(case, case.timing, case.workload.tpot_s, seqs)
    if case.role is Role.PREFILL and case.workload.ttft_s is not None:
        yield _ttft(case, case.timing, case.workload.ttft_s)
    limit_s = case.timing.reservation_s
    if case.role is Role.PREFILL and limit_s is not None:
        load = case.workload.computed_and_reused(case.requests.longest)
        # bands take most of the time, and none is so wide
        if WIDEST_BAND * case.timing.prefill_s(*load) > limit_s:
            yield _kept(case, case.timing, limit_s)


def _tpot(case: Case, timing: Timing, target_s: float, seqs: int) -> Judged:
    context = min(case.workload.mean_context, case.max_positions)
    meets = partial(_meets, timing, context, target_s)
    running = seqs if meets(1) else 1
    load = running, context
    band_s = None if timing.decode_band_s is None else timing.decode_band_s(*load)
    what = f"a step of {counted(running, 'request')} a lane, each of {counted(context, 'token')}"
    fewer = f"lower spec.decode.maxNumSeqs to {most(meets, 1, running - 1)}, or " if running > 1 else ""
    return Judged(TPOT, target_s, timing.decode_step_s(*load), band_s, what, f"{fewer}raise it")


def _meets(timing: Timing, context: int, target_s: float, running: int) -> bool:
    return timing.decode_step_s(running, context) <= target_s


def _ttft(case: Case, timing: Timing, target_s: float) -> Judged:
    """The longest prompt's, or with a rate the mean if waits make that longer."""
    time_s, band_s, what = _longest_prompt(case, timing)
    # a longest prompt that is late without waits is late with them
    arriving = timing.arriving_ttft() if time_s <= target_s else None
    if arriving is None or arriving.value <= time_s * 1e3:
        return Judged(TTFT, target_s, time_s, band_s, what, "raise it or shorten prompts")
    seconds = arriving.scaled(1e-3, "s")
    what = f"on average, {ARRIVING}"
    return Judged(TTFT, target_s, seconds.value, (seconds.low, seconds.high), what, "raise it, or lower the rate")


def _kept(case: Case, timing: Timing, limit_s: float) -> Judged:
    """Decode's room for the longest prompt, beside which a request fails."""
    time_s, band_s, what = _longest_prompt(case, timing)

    def prefill_s(tokens: int) -> float:
        return timing.prefill_s(*case.workload.computed_and_reused(tokens))

    in_time = most(lambda tokens: prefill_s(tokens) <= limit_s, 1, case.requests.longest) if time_s > limit_s else 0
    shorter = f"shorten prompts to {counted(in_time, 'token')}" if in_time else "shorten prompts"
    remedy = raised("it", max(time_s, *(band_s or ())), shorter)
    return Judged(RESERVATION, limit_s, time_s, band_s, f"{what}: decode gives up requests before that", remedy)


def _longest_prompt(case: Case, timing: Timing) -> tuple[float, tuple[float, float] | None, str]:
    """Its time, the band of it, and whose it is."""
    load = computed, reused = case.workload.computed_and_reused(case.requests.longest)
    band_s = None if timing.prefill_band_s is None else timing.prefill_band_s(*load)
    longest = ", the longest prompt of the workload" if len(case.workload.prompt.points) > 1 else ""
    tail = ": 99 of 100 are no longer" if case.workload.prompt.has_tail else ""
    what = f"which {counted(computed, 'prompt token')} and {reused:,} reused take{longest}{tail}"
    return timing.prefill_s(*load), band_s, what
