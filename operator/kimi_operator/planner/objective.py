"""What predictions say about a layout: step and prefill times for the solver, throughput to rank the search by."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from statistics import fmean
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.deployment import Role
from kimi_operator.errors import Problem
from kimi_operator.planner.case import Solution, Timing
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.predict import (
    PAGES,
    PREFILL,
    SLOTS,
    Calibration,
    Capacity,
    Curve,
    CurvePoint,
    Prediction,
    PrefillSide,
    Request,
    Side,
    curve_of,
    decode_step_ms,
    least_clients,
    prefill_ms,
    roofline_s,
)
from kimi_operator.planner.reservation import RESERVATION, raised
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad, Setup, token_pairs
from kimi_operator.planner.space import Layout
from kimi_operator.planner.targets import TTFT, Judged, Unserved, Verdict
from kimi_operator.planner.units import binding, ceil_div
from kimi_operator.planner.workload import Workload

UNEVEN = 1.5
"""Times the mean that prompts which wait for prefill take at most: lanes of a group keep step with the slowest."""
_GROUPS = 2
_Side = TypeVar("_Side", bound=Side)


def mean_request(workload: Workload) -> Request:
    """The request that predictions are made for."""
    prompt, output = workload.mean_lengths
    computed, reused = workload.computed_and_reused(workload.prompt.mean)
    pairs = fmean(token_pairs(*workload.computed_and_reused(point)) for point in workload.prompt.points)
    is_alike = len(workload.output.points) == 1
    held = None if is_alike else workload.mean_context
    return Request(prompt, output, reused, pairs / token_pairs(computed, reused), held)


class Forecast(Struct, frozen=True, dict=True):
    """Predicted times of one workload on any layout of one chip and engine.

    Values rank, bands do not: those of all layouts come from the same factors, so they do not change an order.
    """

    workload: Workload
    setup: Callable[[GroupShape], Setup]
    decode: Calibration
    prefill: Calibration
    chunk_tokens: int
    """Most prompt tokens of one step."""
    reservation_s: float | None = None
    """As of Timing."""

    @cached_property
    def _points(self) -> dict[tuple[Layout, int, int | None, int], CurvePoint]:
        return {}

    @cached_property
    def _seconds(self) -> dict[tuple[Setup, DecodeLoad | PrefillLoad], float]:
        return {}

    @cached_property
    def _arrivals(self) -> dict[tuple[GroupShape, int], Prediction]:
        return {}

    @cached_property
    def request(self) -> Request:
        """The one that predictions are made for."""
        return mean_request(self.workload)

    def timing(self, shape: GroupShape, groups: int) -> Timing:
        """Times of each of so many groups. Raises ValueError when it needs a figure that nobody stated of the chip.

        A prompt is computed beside those of other lanes, as many as the workload keeps busy.
        """
        setup, clients = self.setup(shape), self.workload.concurrency
        is_prefill_known = setup.chip.bf16_flops is not None
        busy_lanes = self.busy_lanes(setup, groups) if is_prefill_known else 1
        most = None if clients is None else ceil_div(clients, groups)

        def step(seqs: int, tokens: int) -> DecodeLoad:
            running = seqs * shape.lanes
            return DecodeLoad(running if most is None else min(running, most), tokens)

        def prompt(new: int, cached: int) -> PrefillLoad:
            return PrefillLoad(new, cached, self.chunk_tokens, busy_lanes)

        return Timing(
            decode_step_s=lambda seqs, tokens: self._time_s(setup, step(seqs, tokens)),
            prefill_s=lambda new, cached: self._time_s(setup, prompt(new, cached)),
            decode_band_s=lambda seqs, tokens: _band_s(decode_step_ms(setup, step(seqs, tokens), self.decode)),
            prefill_band_s=lambda new, cached: _band_s(prefill_ms(setup, prompt(new, cached), self.prefill)),
            arriving_ttft=lambda: self.arriving_ttft(shape, groups),
            is_prefill_known=is_prefill_known,
            reservation_s=self.reservation_s,
        )

    def arriving_ttft(self, shape: GroupShape, groups: int) -> Prediction | None:
        """Mean TTFT of prompts that come at a rate, each at any time; None where no rate is stated.

        At the fast end none may wait.
        """
        if self.workload.requests_per_second is None:
            return None
        key = (shape, groups)
        if key not in self._arrivals:
            self._arrivals[key] = self._arriving_ttft(
                self.prefill_side(shape, groups), self.workload.requests_per_second
            )
        return self._arrivals[key]

    def _arriving_ttft(self, prefill: PrefillSide, rate: Fraction) -> Prediction:
        # No other load draws arrivals.
        from kimi_operator.planner.arrivals import mean_ttft_s  # noqa: PLC0415
        from kimi_operator.planner.service import NO_DECODE, Chunk, paced, predicted_service  # noqa: PLC0415

        work, busy_lanes = self.workload, self.busy_lanes(prefill.setup, prefill.groups)
        prompt = prefill_ms(prefill.setup, self.request.prefill(self.chunk_tokens, busy_lanes), self.prefill)
        chunk = Chunk(self.chunk_tokens, self.chunk_tokens)
        # more groups spread prompts no better, and take longer to draw
        some = replace(prefill, groups=min(prefill.groups, _GROUPS))
        service = predicted_service(self.decode_side(prefill.setup.shape, 1), some, NO_DECODE, chunk, 0.0)
        prompts = [work.computed_and_reused(tokens) for tokens in work.prompt.points]

        def ttft_ms(prompt_ms: float) -> float:
            each = paced(service, prompt_ms / prompt.value, 1.0)
            return max(prompt_ms, 1e3 * mean_ttft_s(each, prompts, float(rate) * some.groups / prefill.groups))

        return Prediction(ttft_ms(prompt.value), prompt.low, ttft_ms(prompt.high), "ms", prompt.calibrated_on)

    def busy_lanes(self, setup: Setup, groups: int) -> int:
        """Lanes of a prefill group that compute a mean prompt at once: all where nobody stated a load."""
        work, lanes = self.workload, setup.shape.lanes
        if work.requests_per_second is None:
            return lanes if work.running is None else min(lanes, ceil_div(work.running, groups))
        load = self.request.prefill(self.chunk_tokens)
        rate = float(work.requests_per_second) / groups
        enough = (n for n in range(1, lanes) if n >= rate * self._time_s(setup, replace(load, busy_lanes=n)))
        return next(enough, lanes)

    def decode_side(self, shape: GroupShape, groups: int) -> Side:
        """So many decode groups, for a curve."""
        return Side(self.setup(shape), self.decode, groups)

    def prefill_side(self, shape: GroupShape, groups: int) -> PrefillSide:
        """So many prefill groups, for a curve."""
        return PrefillSide(self.setup(shape), self.prefill, groups, chunk_tokens=self.chunk_tokens)

    def waiting_ttft(self, shape: GroupShape, groups: int, point: CurvePoint) -> Prediction | None:
        """Mean TTFT where prompts wait for a lane of so many prefill groups or for memory of decode, else None.

        Clients that wait for their answers keep these to their number, and what of their time is not decode is TTFT
        (Little's law). With a rate nothing limits how many wait: one that cannot be served is a miss.
        """
        if self.workload.requests_per_second is not None or not point.waits:
            return None
        if point.binds == PREFILL:
            return self._ttft_of_prefill(shape, groups, point, point.concurrency)
        return self._ttft_of_memory(shape, groups, point)

    def _ttft_of_memory(self, shape: GroupShape, groups: int, point: CurvePoint) -> Prediction:
        """The time of a prompt, after those that wait for memory before it have been served."""
        busy_lanes = self.prefill_side(shape, groups).busy_lanes(point.held)
        prompt = prefill_ms(self.setup(shape), self.request.prefill(self.chunk_tokens, busy_lanes), self.prefill)
        rate, tokens = point.tokens_per_second, (point.concurrency - point.held) * self.request.output_tokens
        ends = ((prompt.value, rate.value), (prompt.low, rate.high), (prompt.high, rate.low))
        value, low, high = (prompt_ms + tokens / served * 1e3 for prompt_ms, served in ends)
        return Prediction(value, low, high, "ms", rate.calibrated_on)

    def _ttft_of_prefill(self, shape: GroupShape, groups: int, point: CurvePoint, clients: int) -> Prediction:
        """The mean time from when so many of them are counted to the first token, where prefill binds."""
        prompt = prefill_ms(self.setup(shape), self.all_busy(shape), self.prefill)
        tpot, output_tokens = point.tpot, self.request.output_tokens

        def ttft_ms(prompt_ms: float, tpot_ms: float) -> float:
            return clients * prompt_ms / (groups * shape.lanes) - output_tokens * tpot_ms

        # What decode takes less is waited for prefill. At the fast end none may wait: a prompt takes its own time.
        ends = ((prompt.value, tpot.value), (prompt.low, tpot.high), (prompt.high, tpot.low))
        value, low, high = (max(prompt_ms, ttft_ms(prompt_ms, tpot_ms)) for prompt_ms, tpot_ms in ends)
        return Prediction(value, low, high, "ms", prompt.calibrated_on)

    def queued(self, shape: GroupShape, groups: int, point: CurvePoint) -> tuple[Verdict, ...]:
        """What is held against the wait of prompts, or a rate that memory does not serve; else nothing."""
        if self.workload.requests_per_second is not None:
            return (*self._unserved(point), *self._kept_at_a_rate(shape, groups))
        ttft = self.waiting_ttft(shape, groups, point)
        if ttft is None:
            return ()
        found, work, is_prefill_short = [], self.workload, point.binds == PREFILL
        if work.ttft_s is not None:
            add = f"add groups to {Role.PREFILL if is_prefill_short else Role.DECODE}"
            remedy = f"{add}, or lower the load"
            if work.concurrency is None:
                remedy = f"state the load, which is taken to fill decode, or {add}"
            what = f"on average, as {point.waits}"
            found.append(Judged(TTFT, work.ttft_s, ttft.value / 1e3, _band_s(ttft), what, remedy))
        # a load that nobody stated fails nobody's requests
        if is_prefill_short and work.concurrency is not None and self.reservation_s is not None:
            found.append(self._kept(self._ttft_of_prefill(shape, groups, point, point.held), point))
        return tuple(found)

    def _unserved(self, point: CurvePoint) -> tuple[Verdict, ...]:
        """A rate whose requests find no memory, as others hold it while prompts are computed: solutions count none."""
        if point.binds not in (PAGES, SLOTS):
            return ()
        served = point.tokens_per_second.value / self.request.output_tokens
        expected = f"at most {served:.3g}, where {binding(point.binds)}, held by {point.held:,} in prefill and decode"
        # a lower rate would have maxNumSeqs, and so the slots, cut for it
        remedy = "raise maxNumSeqs of decode" if point.binds == SLOTS else "add groups to decode, or lower it"
        rate = f"{float(self.workload.requests_per_second or 0):g}"
        return (Unserved((Problem("workload.requestsPerSecond", rate, expected, remedy),)),)

    def _kept_at_a_rate(self, shape: GroupShape, groups: int) -> tuple[Judged, ...]:
        """How long decode keeps room, beside waits at a rate; nothing where it is a hundred times that of a prompt."""
        alone = self.request.prefill(self.chunk_tokens)
        # waits are drawn prompt by prompt, which is slow, and none that is fed waits for so many
        if self.reservation_s is None or 100 * self._time_s(self.setup(shape), alone) < self.reservation_s:
            return ()
        ttft = self.arriving_ttft(shape, groups)
        assert ttft is not None, "a rate is stated"
        high_s = UNEVEN * ttft.high / 1e3
        remedy = raised("it", high_s, "add groups to prefill, or lower the rate")
        what = "on average, as prompts wait for prefill: decode gives up before"
        return (Judged(RESERVATION, self.reservation_s, ttft.value / 1e3, (ttft.low / 1e3, high_s), what, remedy),)

    def _kept(self, ttft: Prediction, point: CurvePoint) -> Judged:
        """How long decode keeps room, beside the wait for prefill."""
        assert self.reservation_s is not None
        what = f"on average, as {point.concurrency:,} at once wait for prefill, which binds: decode gives up before"
        low_s, longest_s = ttft.low / 1e3, UNEVEN * ttft.high / 1e3
        remedy = raised("it", longest_s, "add groups to prefill, or lower the load")
        return Judged(RESERVATION, self.reservation_s, ttft.value / 1e3, (low_s, longest_s), what, remedy)

    def queued_on(self, layout: Layout, decode: Solution) -> tuple[Verdict, ...]:
        """The same of a layout, at the load that its throughput is of."""
        work, point = self.workload, self._point(layout, decode)
        if work.requests_per_second is not None:
            return (*self._unserved(point), *self._kept_at_a_rate(layout.prefill, layout.prefill_groups))
        is_kept = work.concurrency is not None and self.reservation_s is not None
        if not (is_kept or work.ttft_s is not None) or not point.waits:
            return ()
        return self.queued(layout.prefill, layout.prefill_groups, self.point(layout, decode))

    def point(self, layout: Layout, decode: Solution) -> CurvePoint:
        """The load that a layout is ranked by, with bands."""
        decodes = self.decode_side(layout.decode, layout.decode_groups)
        return self._curve_point(decode, decodes, self.prefill_side(layout.prefill, layout.prefill_groups))

    def throughput(self, layout: Layout, decode: Solution) -> float:
        """Output tokens a second of as many requests as are asked for, else as decode has places: as a plan's curve.

        What prefill's lanes hold does not matter: each takes a prompt at a time.
        """
        return self._point(layout, decode).tokens_per_second.value

    def all_busy(self, shape: GroupShape) -> PrefillLoad:
        """A mean prompt beside those of all other lanes."""
        return self.request.prefill(self.chunk_tokens, shape.lanes)

    def _point(self, layout: Layout, decode: Solution) -> CurvePoint:
        key = (layout, decode.max_num_seqs, decode.num_slots, decode.held)
        if key not in self._points:
            decodes = _without_band(self.decode_side(layout.decode, layout.decode_groups))
            prefills = _without_band(self.prefill_side(layout.prefill, layout.prefill_groups))
            self._points[key] = self._curve_point(decode, decodes, prefills)
        return self._points[key]

    def _curve_point(self, decode: Solution, decodes: Side, prefills: PrefillSide) -> CurvePoint:
        request = self.request
        # The solver counted what memory holds, so each of those is as good as a page of a whole request.
        page_tokens = request.prompt_tokens + request.output_tokens
        of_lane = Capacity(decode.max_num_seqs, decode.held, page_tokens, decode.num_slots)
        curve = curve_of(decodes, of_lane, request, prefills)
        return self.arriving(curve(self.clients(curve)))

    def arriving(self, point: CurvePoint) -> CurvePoint:
        """The point that so many clients reach, with no more output than a stated rate brings: clients are whole."""
        rate, tokens = self.workload.requests_per_second, point.tokens_per_second
        if rate is None:
            return point
        needed = float(rate) * self.request.output_tokens
        low, value, high = (min(each, needed) for each in (tokens.low, tokens.value, tokens.high))
        brought = replace(tokens, value=value, low=low, high=high)
        return replace(point, tokens_per_second=brought, binds=point.binds if value < needed else "rate")

    def clients(self, curve: Curve) -> int:
        """Requests under way, in prefill or in decode: those that are stated, that a rate brings, or that decode runs.

        Where it brings more than is served, more of them than have memory: the others wait for what binds.
        """
        rate = self.workload.requests_per_second
        if rate is None:
            return self.workload.concurrency or curve.running
        needed = float(rate) * self.request.output_tokens
        most = max(self.workload.running or 1, curve.held + 1)
        return least_clients(needed, most, lambda clients: curve(clients).tokens_per_second.value)

    def _time_s(self, setup: Setup, load: DecodeLoad | PrefillLoad) -> float:
        key = (setup, load)
        if key not in self._seconds:
            calibration = self.decode if isinstance(load, DecodeLoad) else self.prefill
            self._seconds[key] = calibration.factor() * roofline_s(setup, load)
        return self._seconds[key]


def _band_s(time_ms: Prediction) -> tuple[float, float]:
    return time_ms.low / 1e3, time_ms.high / 1e3


def _without_band(side: _Side) -> _Side:
    """The same side, whose factor is not fitted anew over what is assumed: a ranking needs the value alone."""
    stated = replace(side.calibration, anchors=(), stated_factor=side.calibration.factor(), elsewhere=None)
    return replace(side, calibration=stated)
