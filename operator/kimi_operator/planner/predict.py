"""How fast: decode step, prefill, handoff, throughput against concurrency. Every figure with its band.

A prediction is `factor x roofline`, where the factor was fitted on measured points (`fit`). Its band is the wider, on
each side, of two things that can be computed:
- the largest error that held-out points showed (as a ratio, both ways), and
- what the prediction becomes when each constant that its phase is varied over takes the least and the most that its
  sources allow, with the factor fitted anew each time. Near the fitted points the refit takes the change back; far
  from them it does not.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.roofline import (
    ASSUMED,
    ASSUMED_RANGES,
    Constants,
    DecodeLoad,
    PrefillLoad,
    Setup,
    Term,
    decode_terms,
    handoff_bytes,
    prefill_terms,
)
from kimi_operator.planner.units import ceil_div, counted

CONCURRENCY, PREFILL = "concurrency", "prefill"
PAGES, SLOTS = "KV pages", "state slots"
"""What binds a throughput, beside maxNumSeqs."""
HANDOFF_SHARES = (0.56, 0.96)
"""Achieved share of a 50 GB/s card in one-sided writes (MoRI-IO): 28 GB/s one unchunked transfer, 48 GB/s batches."""

# In prefill two more would only double the time each. They matter where the bytes of weights bind, below some hundred
# tokens to compute: there the band is too narrow on the fast side (0.78 of the value; 0.68 at 64 tokens).
_VARIED: dict[type[DecodeLoad | PrefillLoad], tuple[tuple[str, ...], ...]] = {
    DecodeLoad: (
        ("hbm_share",),
        ("launch_s",),
        ("all_reduce_s",),
        # an engine has one kind of exchange
        ("exchange_per_node_s", "all_to_all_s"),
        ("decoded_from_cache",),
    ),
    PrefillLoad: (
        ("gemm_share",),
        ("attention_share",),
        ("all_reduce_s", "all_to_all_s"),
        ("launch_s",),
        ("decoded_from_cache",),
    ),
}
"""What takes its least and most: constants of one row together."""


class Prediction(Struct, frozen=True):
    """A figure, the band around it, what it was calibrated on, and the summands that it was scaled from."""

    value: float
    low: float
    high: float
    unit: str
    calibrated_on: str
    terms: tuple[Term, ...] = ()
    fitted_on: str = ""
    """Of `calibrated_on` the factor and its points alone; empty where one factor does not give it."""
    beyond: str = ""
    """As of Calibration."""

    def scaled(self, factor: float, unit: str) -> Prediction:
        """The same in another unit."""
        return replace(self, value=self.value * factor, low=self.low * factor, high=self.high * factor, unit=unit)


class Anchor(Struct, frozen=True):
    """A measured time that a factor is fitted on, in seconds."""

    setup: Setup
    load: DecodeLoad | PrefillLoad
    measured_s: float


class Calibration(Struct, frozen=True):
    """One factor of a chip and engine, and how far it may be off."""

    anchors: tuple[Anchor, ...]
    """What it is fitted on. None: the factor was stated, not fitted here."""
    error: float
    """Largest held-out error, as |log(predicted / measured)|."""
    text: str
    """`fitted_on`, with why and how far it may be off."""
    stated_factor: float = 1.0
    fitted_on: str = ""
    """The factor and the points that gave it."""
    beyond: str = ""
    """What the setup does that no measurement holds, and so no band; part of `text`."""
    shape: GroupShape | None = None
    """The only layout that `error` was measured on; None: it holds for all."""
    elsewhere: Calibration | None = None
    """Whose band, as a share of the value, others have at least."""

    def factor(self, constants: Constants = ASSUMED) -> float:
        """Geometric mean of measured over roofline: the least squares of relative errors."""
        if not self.anchors:
            return self.stated_factor
        return statistics.geometric_mean([a.measured_s / roofline_s(a.setup, a.load, constants) for a in self.anchors])


def roofline_terms(setup: Setup, load: DecodeLoad | PrefillLoad, constants: Constants = ASSUMED) -> tuple[Term, ...]:
    """The summands of either phase."""
    if isinstance(load, DecodeLoad):
        return decode_terms(setup, load, constants)
    return prefill_terms(setup, load, constants)


def roofline_s(setup: Setup, load: DecodeLoad | PrefillLoad, constants: Constants = ASSUMED) -> float:
    """Their sum in seconds."""
    return sum(term.seconds for term in roofline_terms(setup, load, constants))


def decode_step_ms(setup: Setup, load: DecodeLoad, calibration: Calibration) -> Prediction:
    """Time of one decode step, which is the time between two tokens of each running request."""
    return _predict(setup, load, calibration).scaled(1e3, "ms")


def prefill_ms(setup: Setup, load: PrefillLoad, calibration: Calibration) -> Prediction:
    """Time from the first chunk of a prompt to its last; waiting is not in it. Raises ValueError without FLOPs."""
    return _predict(setup, load, calibration).scaled(1e3, "ms")


def handoff_ms(setup: Setup, tokens: int) -> Prediction:
    """Time to write one request from a prefill rank to its decode peer, each rank over its network card.

    The band is the measured bandwidth, from single transfers to batches; the value is their geometric mean.
    Raises ValueError when nobody stated the card's bandwidth.
    """
    nic = setup.chip.nic_bytes_per_second
    if nic is None:
        raise ValueError(f"{setup.chip.name}: no bandwidth of the network card stated; handoff cannot be predicted")
    amount = handoff_bytes(setup, tokens)
    cards = setup.nics_per_rank
    high, low = (amount / (nic * cards * share) * 1e3 for share in HANDOFF_SHARES)
    how = f"{amount:,} B over {'one card' if cards == 1 else f'{cards:.3g} of a card'} of {nic / 1e9:.0f} GB/s"
    value = math.sqrt(low * high)
    source = "MoRI-IO write benchmarks, 28 to 48 GB/s on 400 Gb/s cards; nothing fitted"
    return Prediction(value, low, high, "ms", source, (Term("bytes", value / 1e3, how),))


def _predict(setup: Setup, load: DecodeLoad | PrefillLoad, calibration: Calibration) -> Prediction:
    terms = roofline_terms(setup, load)
    value = calibration.factor() * sum(term.seconds for term in terms)
    spread = [value]
    if calibration.anchors:
        corners = _refits(calibration, _VARIED[type(load)])
        spread += [factor * roofline_s(setup, load, constants) for constants, factor in corners]
    margin, text = math.exp(calibration.error), calibration.text
    if calibration.elsewhere is not None and setup.shape != calibration.shape:
        wide = _predict(setup, load, calibration.elsewhere)
        spread += [value * end / wide.value for end in (wide.low, wide.high)]
        text += f"; nothing measured on {setup.shape}: the band is that of other measurements"
    return Prediction(
        value=value,
        low=min(value / margin, *spread),
        high=max(value * margin, *spread),
        unit="s",
        calibrated_on=text,
        terms=terms,
        fitted_on=calibration.fitted_on,
        beyond=calibration.beyond,
    )


@cache
def _refits(calibration: Calibration, rows: tuple[tuple[str, ...], ...]) -> tuple[tuple[Constants, float], ...]:
    """Every combination of least and most of these constants, with the factor that the anchors then give."""
    corners = (
        replace(
            ASSUMED, **{name: ASSUMED_RANGES[name][end] for row, end in zip(rows, ends, strict=True) for name in row}
        )
        for ends in itertools.product((0, 1), repeat=len(rows))
    )
    return tuple((constants, calibration.factor(constants)) for constants in corners)


class Request(Struct, frozen=True):
    """What a request asks for on average, in tokens. `cached_tokens` of the prompt are reused, not computed."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    pairs_factor: float = 1.0
    """As of PrefillLoad."""
    held_tokens: int | None = None
    """What those hold on average that decode, where lengths vary (Workload.mean_context)."""

    @property
    def mean_context(self) -> int:
        """Tokens held on average while answers grow; halfway where all are alike."""
        return self.held_tokens or self.prompt_tokens + self.output_tokens // 2

    def prefill(self, chunk_tokens: int, busy_lanes: int = 1) -> PrefillLoad:
        """Its prompt, beside those of other lanes."""
        new = max(1, self.prompt_tokens - self.cached_tokens)
        return PrefillLoad(new, self.cached_tokens, chunk_tokens, busy_lanes, self.pairs_factor)


class Capacity(Struct, frozen=True):
    """What a decode lane can hold at once."""

    max_num_seqs: int
    num_pages: int
    page_size_tokens: int
    num_slots: int | None = None
    """State slots of a lane; None: state lies in its pages."""

    def running(self, request: Request) -> tuple[int, str]:
        """Requests of a lane that run at once, and what limits them."""
        by_pages = self._by_pages(request)
        return (by_pages, PAGES) if by_pages < self.max_num_seqs else (self.max_num_seqs, "maxNumSeqs")

    def held(self, request: Request) -> tuple[int, str]:
        """Requests that have memory at once: those that run and those in prefill, which get it first."""
        by_pages = self._by_pages(request)
        if self.num_slots is None or by_pages < self.num_slots:
            return by_pages, PAGES
        return self.num_slots, SLOTS

    def _by_pages(self, request: Request) -> int:
        return self.num_pages // ceil_div(request.prompt_tokens + request.output_tokens, self.page_size_tokens)


class Side(Struct, frozen=True):
    """One role as a whole: `groups` equal groups and how their times are calibrated."""

    setup: Setup
    calibration: Calibration
    groups: int = 1


class PrefillSide(Side, frozen=True, kw_only=True):
    """Prefill as a whole."""

    chunk_tokens: int
    """Most prompt tokens of one step."""

    def busy_lanes(self, concurrency: int) -> int:
        """Lanes of a group that compute prompts at once, when all clients ask at once."""
        return min(self.setup.shape.lanes, ceil_div(concurrency, self.groups))


class CurvePoint(Struct, frozen=True):
    """Throughput when clients keep `concurrency` requests going."""

    concurrency: int
    held: int
    """Requests that have memory of decode at once, in prefill or in decode; the others wait for it."""
    running: int
    """Requests that decode at once, which `tpot` is for; the others wait, where prefill binds for prefill."""
    tpot: Prediction
    tokens_per_second: Prediction
    binds: str

    @property
    def waits(self) -> str:
        """What requests wait for before their first token; empty where none does for long."""
        if self.binds == PREFILL:
            return f"{self.concurrency:,} at once wait for prefill, which binds"
        late = self.concurrency - self.held
        return f"{late:,} of {self.concurrency:,} at once wait for memory of decode" if late else ""


class Curve(Struct, frozen=True):
    """Concurrency -> output tokens a second, by asymptotic bounds of a closed system (operational analysis):

    the least of what requests with memory get through, at the time of a token + its part of the prefill, of what full
    lanes decode, and of what prefill can feed. A prompt has its memory on decode before it is computed. Without
    `prefill` the last one and prefill's part are left out.
    """

    decode: Side
    request: Request
    running: int
    """Requests that all lanes decode at once, and what limits them."""
    running_limit: str
    held: int
    """Requests that have memory of all lanes at once, and what limits them."""
    held_limit: str
    feed: _Feed | None

    def __call__(self, concurrency: int) -> CurvePoint:
        """The point of so many requests that clients keep going."""
        running, feed = min(concurrency, self.running), self.feed
        tpot = _step_ms(self.decode, self.request, running)
        (rate, binds), (low, _), (high, _) = (
            min(self._bounds(concurrency, tpot_ms, side), key=itemgetter(0)) for side, tpot_ms in _sides(tpot)
        )
        if feed is not None and binds == PREFILL and feed.running < running:
            running, tpot = feed.running, _step_ms(self.decode, self.request, feed.running)
        text = tpot.calibrated_on if feed is None else f"decode: {tpot.calibrated_on}; prefill: {feed.text}"
        tokens = Prediction(rate, low, high, "tokens/s", text)
        return CurvePoint(concurrency, min(concurrency, self.held), running, tpot, tokens, binds)

    def _bounds(self, concurrency: int, tpot_ms: float, side: int) -> Iterator[tuple[float, str]]:
        """Each bound on tokens/s with its name; the least one binds."""
        running, held, token_s = min(concurrency, self.running), min(concurrency, self.held), tpot_ms / 1e3
        if running < concurrency:
            yield running / token_s, self.running_limit
        prompt_s = self.feed.seconds(held)[side] if self.feed else 0.0
        yield held / (token_s + prompt_s), CONCURRENCY if held == concurrency else self.held_limit
        if self.feed:
            yield self.feed.tokens_per_second[side], PREFILL


def curve_of(decode: Side, capacity: Capacity, request: Request, prefill: PrefillSide | None = None) -> Curve:
    """The curve of such requests. Raises ValueError where a lane holds none, and as prefill_ms."""
    running, running_limit = capacity.running(request)
    if running < 1:
        needed = request.prompt_tokens + request.output_tokens
        raise ValueError(f"a lane's {capacity.num_pages:,} pages do not hold one request of {counted(needed, 'token')}")
    held, held_limit = capacity.held(request)
    lanes = decode.setup.shape.lanes * decode.groups
    feed = _feed(decode, request, running * lanes, prefill) if prefill else None
    return Curve(decode, request, running * lanes, running_limit, held * lanes, held_limit, feed)


def throughput_curve(
    decode: Side, capacity: Capacity, request: Request, concurrencies: Iterable[int], prefill: PrefillSide | None = None
) -> tuple[CurvePoint, ...]:
    """The points of `curve_of` at some concurrencies."""
    return tuple(map(curve_of(decode, capacity, request, prefill), concurrencies))


def least_clients(needed: float, most: int, tokens_per_second: Callable[[int], float]) -> int:
    """The fewest clients, of at most so many, whose output is what is needed; `most` where none is enough.

    One more of them may get less output, where it is one more in a lane; but what each waits for a token, clients over
    output, never falls. So no fewer than needed x that wait are enough, of any number that is not.
    """
    clients = 1
    while clients < most and (rate := tokens_per_second(clients)) < needed:
        # a float may lie just above the whole number that it stands for
        clients = min(most, max(clients + 1, math.ceil(needed * clients / rate * (1 - 1e-12))))
    return clients


def _step_ms(decode: Side, request: Request, running: int) -> Prediction:
    """Of so many requests over all groups, at the mean context."""
    load = DecodeLoad(ceil_div(running, decode.groups), request.mean_context)
    return decode_step_ms(decode.setup, load, decode.calibration)


class _Feed(Struct, frozen=True):
    """Prefill seen from decode, for value, slow and fast end: seconds an output token, and tokens/s at most."""

    seconds: Callable[[int], tuple[float, float, float]]
    """By the requests under way, whose prompts are computed beside each other."""
    tokens_per_second: tuple[float, float, float]
    running: int
    """Requests that decode at once when prefill feeds at most that (Little's law), to the nearest whole one."""
    text: str


def _feed(decode: Side, request: Request, most: int, prefill: PrefillSide) -> _Feed:
    lanes, outputs, factor = prefill.setup.shape.lanes, request.output_tokens, decode.calibration.factor()

    @cache
    def beside(busy_lanes: int) -> Prediction:
        return prefill_ms(prefill.setup, request.prefill(prefill.chunk_tokens, busy_lanes), prefill.calibration)

    def seconds(under_way: int) -> tuple[float, float, float]:
        value, slow, fast = (ms / 1e3 / outputs for _, ms in _sides(beside(prefill.busy_lanes(under_way))))
        return value, slow, fast

    x, y, z = (lanes * prefill.groups * outputs * 1e3 / ms for _, ms in _sides(beside(lanes)))

    def rate(running: int) -> float:
        load = DecodeLoad(ceil_div(running, decode.groups), request.mean_context)
        return running / (factor * roofline_s(decode.setup, load))

    fewer = least_clients(x, most + 1, rate) - 1
    nearest = min((max(1, fewer), min(fewer + 1, most)), key=lambda running: abs(rate(running) - x))
    return _Feed(seconds, (x, y, z), nearest, beside(lanes).calibrated_on)


def _sides(p: Prediction) -> tuple[tuple[int, float], tuple[int, float], tuple[int, float]]:
    """Value, then the slow and the fast end of a time: they give the rate, its low and its high."""
    return (0, p.value), (1, p.high), (2, p.low)


def knee(points: tuple[CurvePoint, ...]) -> CurvePoint:
    """Where more concurrency stops paying: the point farthest above the straight line from first to last.

    Both axes are scaled to 0..1 (Kneedle, Satopaa et al. 2011, without smoothing: the curve has no noise). A curve
    that never bends has its knee at its end. Raises ValueError without points.
    """
    if not points:
        raise ValueError("a knee needs at least one point")
    first, last = points[0], points[-1]
    width = last.concurrency - first.concurrency or 1
    # one more request in one lane slows all, so the last point need not be the highest
    height = max(point.tokens_per_second.value for point in points) - first.tokens_per_second.value or 1.0

    def above(point: CurvePoint) -> float:
        x = (point.concurrency - first.concurrency) / width
        return (point.tokens_per_second.value - first.tokens_per_second.value) / height - x

    best = max(points, key=above)
    return best if above(best) > 1e-9 else last
