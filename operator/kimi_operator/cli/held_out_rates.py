"""Measured throughput beside the curve: none of it is fitted, and the rows that it misses are shown like all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from kimi_operator.cli.held_out import columns
from kimi_operator.planner.fit import calibrate
from kimi_operator.planner.predict import Capacity, Prediction, PrefillSide, Side, throughput_curve
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad
from kimi_operator.profiles.measurements import Measurements, RateSample

UNLIMITED_PAGES = 10**9
"""The runs' pools were not recorded; at these lengths they did not bind."""


class RateResidual(Struct, frozen=True):
    """A measured throughput beside what the curve says."""

    sample: RateSample
    predicted: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.value / self.sample.tokens_per_second - 1

    @property
    def is_in_band(self) -> bool:
        """Whether what was measured lies in the band."""
        return self.predicted.low <= self.sample.tokens_per_second <= self.predicted.high


def rate_residuals(measured: Measurements) -> tuple[RateResidual, ...]:
    """Every measured throughput with its prediction."""
    return tuple(RateResidual(rate, _predicted(rate, measured)) for rate in measured.rates)


def _predicted(rate: RateSample, measured: Measurements) -> Prediction:
    decode, prefill = (calibrate(rate.setup, phase, measured.samples) for phase in (DecodeLoad, PrefillLoad))
    room = Capacity(max_num_seqs=rate.concurrency, num_pages=UNLIMITED_PAGES, page_size_tokens=1)
    sides = Side(rate.setup, decode), PrefillSide(rate.setup, prefill, chunk_tokens=rate.chunk_tokens)
    (point,) = throughput_curve(sides[0], room, rate.request, [rate.concurrency], sides[1])
    return point.tokens_per_second


def rate_cells(rate: RateResidual) -> tuple[str, ...]:
    """One row, as the rows of times; tokens a second."""
    predicted = rate.predicted
    return (
        rate.sample.name,
        "held out",
        f"{rate.sample.tokens_per_second:,.2f}",
        f"{predicted.value:,.0f}",
        f"{100 * rate.error:+.1f} %",
        f"{predicted.low:,.0f} to {predicted.high:,.0f}",
        "yes" if rate.is_in_band else "NO",
    )


def rate_summary(rates: Sequence[RateResidual]) -> str:
    """How far predictions are off, and which bands do not hold."""
    errors = [rate.error for rate in rates]
    outside = [rate.sample.name for rate in rates if not rate.is_in_band]
    return (
        f"throughput: {len(rates)} held out, {100 * min(errors):+.1f} % to {100 * max(errors):+.1f} % off; "
        f"{len(rates) - len(outside)} in their bands" + (f", not {', '.join(outside)}" if outside else "")
    )


def rates_text(rates: Sequence[RateResidual]) -> Iterator[str]:
    """For a terminal."""
    yield "throughput, tokens/s"
    for rate in rates:
        name, *others = rate_cells(rate)
        yield columns((f"  {name}", *others))
        if rate.sample.reason:
            yield f"    why: {rate.sample.reason}"
    yield rate_summary(rates)


def rate_document(rate: RateResidual) -> dict[str, Any]:
    """One row for scripts; tokens a second."""
    sample, predicted = rate.sample, rate.predicted
    return {
        "name": sample.name,
        "chip": sample.setup.chip.name,
        "engine": sample.setup.engine.name,
        "concurrency": sample.concurrency,
        "measured": sample.tokens_per_second,
        "predicted": predicted.value,
        "error": rate.error,
        "low": predicted.low,
        "high": predicted.high,
        "in_band": rate.is_in_band,
        "calibrated_on": predicted.calibrated_on,
        "source": sample.source,
        "reason": sample.reason,
    }
