"""Fitting the one factor a chip and engine, with held-out points kept apart, and what their errors say about others.

How a prediction finds its factor, nearest first:
  own        fitted points of this chip and this engine
  same isa   of this engine on another chip of the same instruction set
  borrowed   the closest there is: this chip with another engine, else its instruction set, else all
Each step has its own held-out points, so its error is measured and not guessed: those of the step itself and of all
nearer ones, and for `borrowed` also each fitted point, predicted with its chip left out. Texts tell the two apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.planner.predict import (
    Anchor,
    Calibration,
    Prediction,
    decode_step_ms,
    prefill_ms,
    roofline_s,
    roofline_terms,
)
from kimi_operator.planner.roofline import ASSUMED, Attention, DecodeLoad, Decoding, Graphs, PrefillLoad, Setup
from kimi_operator.planner.units import counted

ENOUGH_POINTS = 3
"""From so many measured points on, their own leave-one-out error counts instead of that of published ones."""
MOST_FACTOR = 100
"""Known engines take 1.0 to 1.8 times the roofline. An engine without kernels may take ten times as long; milliseconds
that were given for seconds, or microseconds for milliseconds, make a thousand of one."""


class Use(StrEnum):
    """What a measured point is for."""

    FITTED = "fitted"
    HELD_OUT = "heldOut"


class Nearness(StrEnum):
    """Where a factor comes from, nearest first."""

    OWN = "own"
    SAME_ISA = "same isa"
    BORROWED = "borrowed"


class Sample(Struct, frozen=True):
    """One measured time of a decode step or of a prefill."""

    name: str
    setup: Setup
    load: DecodeLoad | PrefillLoad
    measured_s: float
    use: Use
    source: str
    reason: str = ""
    """What would explain that predictions miss it, or meet it by chance."""

    @property
    def anchor(self) -> Anchor:
        """The sample as a factor's input."""
        return Anchor(self.setup, self.load, self.measured_s)


class Residual(Struct, frozen=True):
    """A sample beside what was predicted for it, with a band that the sample itself had no part in (if held out)."""

    sample: Sample
    nearness: Nearness
    predicted: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.value / (self.sample.measured_s * 1e3) - 1

    @property
    def is_in_band(self) -> bool:
        """Whether what was measured lies in the band."""
        return self.predicted.low <= self.sample.measured_s * 1e3 <= self.predicted.high


class Change(Struct, frozen=True):
    """What a measured run does to the factor. Errors are predicted over measured less one, in the samples' order."""

    before: Calibration
    after: Calibration
    errors_before: tuple[float, ...]
    errors_after: tuple[float, ...]
    errors_left_out: tuple[float, ...]
    """Each sample predicted by the factor of the others; empty with fewer than two."""


def calibrate(setup: Setup, phase: type[DecodeLoad | PrefillLoad], samples: Iterable[Sample]) -> Calibration:
    """The nearest factor for a setup, with the held-out error of its kind. Raises ValueError without fitted points."""
    mine = tuple(sample for sample in samples if isinstance(sample.load, phase))
    nearness, chosen = _nearest(setup, [sample for sample in mine if sample.use is Use.FITTED])
    held, without_chip = _held_out_errors(nearness, mine), _errors_without_chip(nearness, mine)
    names = ", ".join([f"{len(chosen)} point{'s' if len(chosen) > 1 else ''}", *map(_name, chosen)])
    where = {
        Nearness.OWN: "",
        Nearness.SAME_ISA: f", borrowed from another {setup.chip.isa} chip",
        Nearness.BORROWED: f", borrowed: {_missing(setup, mine)}",
    }[nearness]
    beyond = "" if nearness is Nearness.OWN else _beyond(setup, phase)
    where += f"; {beyond}" if beyond else ""
    fitted_on = f"factor {_factor(chosen):.3f} fitted on {names}"
    band = f"{_errors_text(held, without_chip)}, and refits over what is assumed"
    return Calibration(
        anchors=tuple(sample.anchor for sample in chosen),
        error=_worst(error for _, error in held + without_chip),
        text=f"{fitted_on}{where}; band: {band}",
        fitted_on=fitted_on,
        beyond=beyond,
    )


_LAUNCHES = (
    "which is counted as captured graphs and may take longer: some 140 a layer and 20 for each expert that a rank runs,"
    " which at 2.8 us each (Infera) are 42 ms a step of one request on 16 GPUs and 234 ms of 64"
)
"""Of Kimi-K3 on the bundled worker: (93 x 140 + 92 x 20 x experts hit / 16) x 2.8 us, in part while the GPU works."""


def _beyond(setup: Setup, phase: type[DecodeLoad | PrefillLoad]) -> str:
    """What an engine does that none of the measured ones does."""
    name = setup.engine.name
    if phase is DecodeLoad and setup.graphs is Graphs.NONE:
        return f"{name} launches its kernels one by one, {_LAUNCHES}"
    if phase is PrefillLoad and setup.engine.attention is Attention.LATENT:
        return f"{name} attends in float32, as no measured engine does"
    return ""


def stated(factor: float, band_percent: float, measured_on: str) -> Calibration:
    """A calibration as a hardware profile states it."""
    text = f"factor {factor:.3f} of the profile: {measured_on}"
    return Calibration((), math.log1p(band_percent / 100), text, factor, fitted_on=text)


def residuals(samples: Sequence[Sample]) -> tuple[Residual, ...]:
    """Every sample with its prediction: fitted points by their own factor, held-out ones as any other setup."""
    return tuple(_residual(sample, samples) for sample in samples)


def refit(measured: Sequence[Sample], before: Calibration, published: Sequence[Sample]) -> Change:
    """Fit the factor anew on measured samples of one setup and phase, and compare with the calibration before.

    Raises ValueError when a time is shorter than reading the bytes at peak bandwidth takes, which no factor explains,
    or so long that the factor would be one of no engine.
    """
    for sample in measured:
        _check_possible(sample)
    _check_factor(measured, published)
    phase = type(measured[0].load)
    anchors = tuple(sample.anchor for sample in measured)
    left_out = _errors_left_out([math.log(_factor([sample])) for sample in measured])
    worst = max((abs(math.log1p(error)) for error in left_out), default=0.0)
    of_published = _errors_by_one_other([sample for sample in published if isinstance(sample.load, phase)])
    is_enough = len(measured) >= ENOUGH_POINTS
    error = worst if is_enough else max(worst, _worst(error for _, error in of_published))
    factor, points = _factor(measured), counted(len(measured), "measured point")
    bands = ["each of them predicted with itself left out"] if left_out else []
    if not is_enough:
        how = "predicted by the worst other of its chip and engine alone, "
        said = _spread_text(of_published, "published point", how) if of_published else "no published point"
        bands.append(f"fewer than {ENOUGH_POINTS}, so also {said}")
    fitted_on = f"factor {factor:.3f} fitted on {points}"
    after = Calibration(anchors, error, f"{fitted_on}; band: {', '.join(bands)}", fitted_on=fitted_on)
    return Change(
        before=before,
        after=after,
        errors_before=tuple(_error(sample, before.factor()) for sample in measured),
        errors_after=tuple(_error(sample, factor) for sample in measured),
        errors_left_out=left_out,
    )


def _errors_left_out(logs: Sequence[float]) -> tuple[float, ...]:
    """Each point predicted by the factor of the others, from the logarithm of each one's own; empty with one alone."""
    total, others = sum(logs), len(logs) - 1
    return tuple(math.expm1((total - own) / others - own) for own in logs if others)


def least_possible_s(sample: Sample) -> float:
    """Only the bytes that every step reads, and a prompt's FLOPs, at the peak of the data sheet.

    Of the experts nothing is counted in decode: real tokens may hit fewer than uniform routing does. Attention is
    counted in its cheapest form, without the expansion, and so are experts: an engine may have learnt it.
    """
    cheapest = replace(sample.setup.engine, attention=Attention.EXPANDED, decoding=Decoding.IN_REGISTERS)
    setup = replace(sample.setup, engine=cheapest)
    terms = roofline_terms(setup, sample.load, _PERFECT)
    return sum(term.seconds for term in terms if term.label in _UNAVOIDABLE)


def predict_ms(setup: Setup, load: DecodeLoad | PrefillLoad, calibration: Calibration) -> Prediction:
    """Either phase."""
    if isinstance(load, DecodeLoad):
        return decode_step_ms(setup, load, calibration)
    return prefill_ms(setup, load, calibration)


_PERFECT = replace(ASSUMED, hbm_share=1.0, gemm_share=1.0, attention_share=1.0)
_UNAVOIDABLE = {"weights", "cache", "matrix products", "attention"}


def _check_possible(sample: Sample) -> None:
    least = least_possible_s(sample)
    if sample.measured_s < least:
        raise ValueError(
            f"{sample.name}: {sample.measured_s * 1e3:.4g} ms is less than {least * 1e3:.4g} ms, which bytes and FLOPs "
            f"take at the peak of {sample.setup.chip.name}"
        )


def _check_factor(measured: Sequence[Sample], published: Sequence[Sample]) -> None:
    """Nothing is known of a model that nobody published times of: the steps of a tiny one are all launches."""
    slowest = max(measured, key=lambda sample: _factor([sample]))
    is_known = any(other.setup.architecture.name == slowest.setup.architecture.name for other in published)
    if is_known and _factor(measured) > MOST_FACTOR:
        raise ValueError(
            f"{slowest.name}: {slowest.measured_s * 1e3:,.0f} ms is {_factor([slowest]):,.0f} times what bytes, FLOPs "
            "and messages take; known engines take 1 to 2 times"
        )


def _residual(sample: Sample, samples: Sequence[Sample]) -> Residual:
    phase = type(sample.load)
    nearness, _ = _nearest(sample.setup, _fitted(phase, samples))
    others = [other for other in samples if other is not sample or other.use is Use.FITTED]
    calibration = calibrate(sample.setup, phase, others)
    return Residual(sample, nearness, predict_ms(sample.setup, sample.load, calibration))


def _fitted(phase: type[DecodeLoad | PrefillLoad], samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.use is Use.FITTED and isinstance(sample.load, phase)]


def _nearest(setup: Setup, fitted: Sequence[Sample]) -> tuple[Nearness, list[Sample]]:
    """The fitted samples that a setup's factor comes from. Raises ValueError when there are none."""
    chip, isa, engine = _hardware(setup), setup.chip.isa, setup.engine.name
    steps: tuple[tuple[Nearness, Callable[[Setup], bool]], ...] = (
        (Nearness.OWN, lambda s: (_hardware(s), s.engine.name) == (chip, engine)),
        (Nearness.SAME_ISA, lambda s: (s.chip.isa, s.engine.name) == (isa, engine)),
        (Nearness.BORROWED, lambda s: _hardware(s) == chip),
        (Nearness.BORROWED, lambda s: s.chip.isa == isa),
        (Nearness.BORROWED, lambda _: True),
    )
    for nearness, belongs in steps:
        if chosen := [sample for sample in fitted if belongs(sample.setup)]:
            return nearness, chosen
    raise ValueError("no fitted point of this phase; measure one and mark it fitted")


def _hardware(setup: Setup) -> tuple[str, float, float | None]:
    """What makes a chip the same as another, whatever its profile is called: a copy of a profile predicts alike."""
    chip = setup.chip
    return chip.isa, chip.hbm_bytes_per_second, chip.bf16_flops


_Errors: TypeAlias = list[tuple[Sample, float]]
"""Points, each with its error: predicted over measured, less one."""


def _held_out_errors(nearness: Nearness, samples: Sequence[Sample]) -> _Errors:
    """The held-out points of this step and of nearer ones."""
    order = list(Nearness)
    fitted = [sample for sample in samples if sample.use is Use.FITTED]
    errors: _Errors = []
    for sample in samples:
        step, chosen = _nearest(sample.setup, fitted)
        if sample.use is Use.HELD_OUT and order.index(step) <= order.index(nearness):
            errors.append((sample, _error(sample, _factor(chosen))))
    return errors


def _errors_without_chip(nearness: Nearness, samples: Sequence[Sample]) -> _Errors:
    """For a borrowed factor: the fitted points, each predicted by those of other chips alone."""
    if nearness is not Nearness.BORROWED:
        return []
    fitted = [sample for sample in samples if sample.use is Use.FITTED]
    errors: _Errors = []
    for sample in fitted:
        if others := [other for other in fitted if _hardware(other.setup) != _hardware(sample.setup)]:
            errors.append((sample, _error(sample, _factor(others))))
    return errors


def _errors_by_one_other(samples: Sequence[Sample]) -> _Errors:
    """Every point, predicted by that other one of its chip and engine that misses it most.

    So far the factor of a single measured point may be off at another load of the same chip and engine.
    """
    errors: _Errors = []
    for sample in samples:
        others = (s for s in samples if s is not sample and _factor_is_of(s.setup) == _factor_is_of(sample.setup))
        by_one = [_error(sample, _factor([other])) for other in others]
        if by_one:
            errors.append((sample, max(by_one, key=lambda error: abs(math.log1p(error)))))
    return errors


def _factor_is_of(setup: Setup) -> tuple[object, ...]:
    """What a factor is of."""
    return (*_hardware(setup), setup.engine.name)


def _worst(errors: Iterable[float]) -> float:
    """The band that they make: the largest |log error|."""
    return max((abs(math.log1p(error)) for error in errors), default=0.0)


def _missing(setup: Setup, samples: Iterable[Sample]) -> str:
    of = f"{setup.engine.name} on {setup.chip.isa}"
    if any((s.setup.engine.name, s.setup.chip.isa) == (setup.engine.name, setup.chip.isa) for s in samples):
        return f"all of {of} is held out"
    return f"nothing of {of} was measured"


def _errors_text(held: _Errors, without_chip: _Errors) -> str:
    """How measured times lie about their predictions, of held-out points and of fitted ones apart."""
    texts = [_spread_text(held, "held-out point", "") if held else "no held-out point"]
    if without_chip:
        texts.append(_spread_text(without_chip, "fitted point", "predicted with its chip left out, "))
    return "; ".join(texts)


def _spread_text(errors: _Errors, what: str, how: str) -> str:
    """To which side measured times lie, how far, and which of the points is the farthest."""
    over = [1 / (1 + error) - 1 for _, error in errors]
    least, most = min(over), max(over)
    far, _ = max(errors, key=lambda each: abs(math.log1p(each[1])))
    which = f"{far.name} of {far.setup.engine.name} on {far.setup.chip.name}"
    if len(errors) == 1:
        side = "above" if most > 0 else "below"
        return f"1 {what} ({which}), {how}measured {abs(most):.1%} {side} what was predicted"
    points = f"{len(errors)} {what}s, {'each ' if how else ''}{how}measured"
    if least > 0 or most < 0:
        side, ends = ("above", (least, most)) if least > 0 else ("below", (-most, -least))
        return f"{points} {ends[0]:.1%} to {ends[1]:.1%} {side} what was predicted (farthest: {which})"
    return f"{points} from {-least:.1%} below to {most:.1%} above what was predicted (farthest: {which})"


def _factor(samples: Sequence[Sample]) -> float:
    return statistics.geometric_mean([s.measured_s / roofline_s(s.setup, s.load) for s in samples])


def _error(sample: Sample, factor: float) -> float:
    return factor * roofline_s(sample.setup, sample.load) / sample.measured_s - 1


def _name(sample: Sample) -> str:
    return f"{sample.name} ({sample.measured_s * 1e3:,.2f} ms of {sample.setup.engine.name})"
