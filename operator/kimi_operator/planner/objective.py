"""What predictions say about a layout: step and prefill times for the solver, throughput to rank the search by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kimi_operator.api.deployment import Role
from kimi_operator.planner.case import Solution, Timing
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.predict import Calibration, PrefillSide, Side, roofline_s
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad, Setup
from kimi_operator.planner.space import Layout
from kimi_operator.planner.units import ceil_div
from kimi_operator.planner.workload import Workload


@dataclass(frozen=True)
class Forecast:
    """Predicted times of one workload on any layout of one chip and engine.

    Values only, no bands: bands of all layouts come from the same factors, so they do not change an order.
    """

    workload: Workload
    setup: Callable[[GroupShape, Role], Setup]
    decode: Calibration
    prefill: Calibration
    chunk_tokens: int
    """Most prompt tokens of one step."""
    _seconds: dict[tuple[Setup, DecodeLoad | PrefillLoad], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def timing(self, shape: GroupShape, role: Role) -> Timing:
        """Times of a group. Raises ValueError when it needs a figure that nobody stated of the chip."""
        setup = self.setup(shape, role)
        return Timing(
            decode_step_s=lambda seqs, tokens: self._time_s(setup, DecodeLoad(seqs * shape.lanes, tokens)),
            prefill_s=lambda new, cached: self._time_s(setup, PrefillLoad(new, cached, self.chunk_tokens)),
        )

    def decode_side(self, shape: GroupShape, groups: int) -> Side:
        """So many decode groups, for a curve."""
        return Side(self.setup(shape, Role.DECODE), self.decode, groups)

    def prefill_side(self, shape: GroupShape, groups: int) -> PrefillSide:
        """So many prefill groups, for a curve."""
        return PrefillSide(self.setup(shape, Role.PREFILL), self.prefill, groups, chunk_tokens=self.chunk_tokens)

    def throughput(self, layout: Layout, prefill: Solution, decode: Solution) -> float:
        """Output tokens a second: the less of what running requests decode and what prefill can feed.

        Prefill's lanes are all busy, each with a prompt at a time; `prefill` does not matter then.
        """
        del prefill
        work, shape = self.workload, layout.prefill
        running = min(decode.running, work.running or decode.running)
        load = DecodeLoad(ceil_div(running, layout.decode_groups), work.mean_context)
        decoded = running / self._time_s(self.setup(layout.decode, Role.DECODE), load)
        computed, reused = work.computed_and_reused(work.prompt.mean)
        busy = PrefillLoad(computed, reused, self.chunk_tokens, busy_lanes=shape.lanes)
        prompts = layout.lanes(Role.PREFILL) / self._time_s(self.setup(shape, Role.PREFILL), busy)
        return min(decoded, prompts * float(work.output.mean))

    def _time_s(self, setup: Setup, load: DecodeLoad | PrefillLoad) -> float:
        key = (setup, load)
        if key not in self._seconds:
            calibration = self.decode if isinstance(load, DecodeLoad) else self.prefill
            self._seconds[key] = calibration.factor() * roofline_s(setup, load)
        return self._seconds[key]
