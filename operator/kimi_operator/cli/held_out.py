"""Measured times beside what is predicted for them: which were fitted, which were held out, and which bands hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.planner.fit import Residual, Sample, Use, calibrate
from kimi_operator.planner.predict import roofline_s
from kimi_operator.planner.roofline import ASSUMED, ASSUMED_RANGES, DecodeLoad, PrefillLoad

HEAD = ("measured time", "use", "measured", "predicted", "error", "band", "in band")
ASSUMPTIONS: dict[type[DecodeLoad | PrefillLoad], tuple[str, ...]] = {
    DecodeLoad: ("hbm_share", "launch_s", "all_reduce_s", "exchange_per_node_s"),
    PrefillLoad: ("gemm_share", "attention_share", "all_reduce_s", "launch_s"),
}
"""Constants that the bands vary too: none of them was measured in these runs."""
CLOSE = 0.1
"""An error, relative to what was measured."""
PHASES: dict[str, type[DecodeLoad | PrefillLoad]] = {"decode": DecodeLoad, "prefill": PrefillLoad}
USES = {Use.FITTED: "fitted", Use.HELD_OUT: "held out"}
WIDTHS = (26, 9, 12, 12, 9, 22, 7)

BANDS = (
    "A fitted time is met by its own factor. A held-out one has no part in its factor nor in its band, which is as "
    "wide as the worst of the other held-out times, or the refits: so the worst of all may lie outside. The bands of "
    "plans count every held-out time; those of a factor borrowed from another chip or engine also count each fitted "
    "time as other chips' factors predict it."
)
PROMPTS = (
    "The times are whole answers of lengths that were not recorded; each token of an answer adds a decode step, which "
    "is in no prediction. Handoff adds under 0.2 %; launches are counted."
)


def cells(residual: Residual) -> tuple[str, ...]:
    """One row, as in `HEAD`; times in ms."""
    sample, predicted = residual.sample, residual.predicted
    return (
        sample.name,
        USES[sample.use],
        _ms(sample.measured_s * 1e3),
        _ms(predicted.value),
        f"{100 * residual.error:+.1f} %",
        f"{_ms(predicted.low)} to {_ms(predicted.high)}",
        "yes" if residual.is_in_band else "NO",
    )


def _ms(value: float) -> str:
    """To the digit that was printed of measured steps."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def summaries(found: Iterable[Residual]) -> Iterator[str]:
    """How far predictions of held-out times are off, to which side, and which bands do not hold."""
    found = tuple(found)
    for name, phase in PHASES.items():
        held = [r for r in found if r.sample.use is Use.HELD_OUT and isinstance(r.sample.load, phase)]
        if held:
            yield _summary(name, held)
            yield _over_ranges(name, phase, [r.sample for r in found])
    yield BANDS
    if prompts := _prompts(found):
        yield prompts


def _summary(name: str, held: Sequence[Residual]) -> str:
    errors = [r.error for r in held]
    side = " (all predicted too short)" if max(errors) < 0 else " (all predicted too long)" if min(errors) > 0 else ""
    outside = [r.sample.name for r in held if not r.is_in_band]
    bands = f"{len(held) - len(outside)} in their bands" + (f", not {', '.join(outside)}" if outside else "")
    return f"{name}: {len(held)} held out, {100 * min(errors):+.1f} % to {100 * max(errors):+.1f} % off{side}; {bands}"


def _over_ranges(name: str, phase: type[DecodeLoad | PrefillLoad], samples: Sequence[Sample]) -> str:
    """How far held-out times would be off had other values been assumed, each with its own fitted factors."""
    names = ASSUMPTIONS[phase]
    held = [s for s in samples if s.use is Use.HELD_OUT and isinstance(s.load, phase)]
    factors = [calibrate(s.setup, phase, [o for o in samples if o is not s]) for s in held]
    combinations = itertools.product(*((a, (a + b) / 2, b) for a, b in (ASSUMED_RANGES[each] for each in names)))
    found = []
    for values in combinations:
        constants = replace(ASSUMED, **dict(zip(names, values, strict=True)))
        found.append(
            [
                factor.factor(constants) * roofline_s(s.setup, s.load, constants) / s.measured_s - 1
                for s, factor in zip(held, factors, strict=True)
            ]
        )
    least, most = min(map(min, found)), max(map(max, found))
    within = sum(max(map(abs, errors)) <= CLOSE for errors in found)
    return (
        f"{name}, over least, middle and most of what is assumed ({', '.join(names)}), with factors refitted: "
        f"these errors reach {100 * least:+.1f} % to {100 * most:+.1f} %; "
        f"all are within {100 * CLOSE:.0f} % in {within} of {len(found)}"
    )


class _Rise(Struct, frozen=True):
    """What 1,000 prompt tokens more took, from the next shorter prompt of the chip to this one."""

    sample: Sample
    tokens: int
    ms: float

    def __str__(self) -> str:
        return f"{self.ms:,.0f} ms to {self.tokens:,}"


def _rises(samples: Iterable[Sample]) -> dict[str, list[_Rise]]:
    """By chip, in order of length."""
    lengths: dict[str, dict[int, Sample]] = {}
    for sample in samples:
        if isinstance(sample.load, PrefillLoad):
            lengths.setdefault(sample.setup.chip.name, {})[sample.load.new_tokens] = sample
    return {
        chip: [
            _Rise(b, n, 1e6 * (b.measured_s - a.measured_s) / (n - m))
            for (m, a), (n, b) in itertools.pairwise(sorted(times.items()))
        ]
        for chip, times in lengths.items()
        if len(times) > 1
    }


def _prompts(found: Sequence[Residual]) -> str:
    """What measured prompts show that no prediction follows; empty without two of one chip."""
    rises = _rises(r.sample for r in found)
    if not rises:
        return ""
    steps = (f"1,000 tokens more took on {chip} {', '.join(map(str, each))}" for chip, each in rises.items())
    texts = [f"Prompts: {'; '.join(steps)}."]
    falls = {chip: [b for a, b in itertools.pairwise(each) if b.ms < a.ms] for chip, each in rises.items()}
    if where := [f"on {chip} to {' and '.join(f'{b.tokens:,}' for b in each)}" for chip, each in falls.items() if each]:
        texts.append(
            "What a token adds only grows with a prompt's length. Where it falls, as "
            f"{' and '.join(where)}, no sum of a fixed part, products and attention meets both neighbours."
        )
    quick = [b for each in falls.values() for b in each if b.sample.use is Use.FITTED]
    texts += [
        f"On {b.sample.setup.chip.name} the time to {b.tokens:,} was fitted: it is quick, and its factor with it."
        for b in quick
    ]
    texts.append(PROMPTS)
    errors = [r.error for r in found if r.sample.use is Use.HELD_OUT and isinstance(r.sample.load, PrefillLoad)]
    if errors and max(errors) < 0:
        texts.append("So expect prompts to take longer than predicted.")
    return " ".join(texts)


def times_text(found: Sequence[Residual]) -> Iterator[str]:
    """For a terminal."""
    yield columns(HEAD)
    for name, phase in PHASES.items():
        yield f"{name}, ms"
        for residual in found:
            if isinstance(residual.sample.load, phase):
                first, *others = cells(residual)
                yield columns((f"  {first}", *others))
                if residual.sample.reason:
                    yield f"    why: {residual.sample.reason}"
    yield from summaries(found)


def columns(row: Sequence[str]) -> str:
    """Name and use to the left, numbers to the right."""
    aligned = (
        f"{cell:{'<' if i < 2 else '>'}{width}}" for i, (cell, width) in enumerate(zip(row, WIDTHS, strict=True))
    )
    return " ".join(aligned).rstrip()


def time_document(residual: Residual) -> dict[str, Any]:
    """One row for scripts; times in ms."""
    sample, predicted = residual.sample, residual.predicted
    return {
        "name": sample.name,
        "phase": next(name for name, phase in PHASES.items() if isinstance(sample.load, phase)),
        "chip": sample.setup.chip.name,
        "engine": sample.setup.engine.name,
        "use": sample.use.value,
        "measured_ms": sample.measured_s * 1e3,
        "predicted_ms": predicted.value,
        "error": residual.error,
        "low_ms": predicted.low,
        "high_ms": predicted.high,
        "in_band": residual.is_in_band,
        "calibrated_on": predicted.calibrated_on,
        "source": sample.source,
        "reason": sample.reason,
    }
