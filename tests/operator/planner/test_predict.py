"""Predicted times against published ones, and their bands."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from kimi_operator.planner.fit import Use, calibrate, predict_ms, residuals, stated
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.predict import (
    Anchor,
    Calibration,
    decode_step_ms,
    handoff_ms,
    prefill_ms,
    roofline_s,
)
from kimi_operator.planner.roofline import (
    ASSUMED,
    ASSUMED_RANGES,
    Chip,
    DecodeLoad,
    PrefillLoad,
    Setup,
    Split,
    prefill_terms,
)
from kimi_operator.profiles.figures import published_figures
from kimi_operator.profiles.measurements import calibration_for
from msgspec.structs import replace
from published_setups import BUILT_IN, DECODE, EP16, FACTOR_2, INT4, K3, MI300X, MI325X, TP8

NOTES = {figure.name: figure for figure in published_figures() if figure.section == "throughput"}


# Published figures


def decode_alone(chip: Chip, running: int) -> float:
    setup = replace(DECODE, chip=chip)
    step = decode_step_ms(setup, DecodeLoad(running, 2112), calibrate(setup, DecodeLoad, BUILT_IN.samples))
    return running / step.high * 1e3


def test_notes_are_no_points_and_their_reasons_hold() -> None:
    notes = {note.name: note for note in BUILT_IN.notes}
    assert {name: note.published for name, note in notes.items()} == {n: f.published for n, f in NOTES.items()}
    assert notes.keys().isdisjoint(sample.name for sample in BUILT_IN.samples)
    # "more than three times as much", though the slow end of the band leaves two
    assert decode_alone(MI325X, 512) > 2 * notes["mi325x_512_tok_s"].published
    gain = decode_alone(MI300X, 128) / decode_alone(MI300X, 64)
    assert gain > 1.3 * notes["mi300x_seqs_8_to_32_at_conc128_gain"].published
    assert all(len(note.reason) > 80 for note in notes.values())


def test_held_out_points_lie_in_bands_they_had_no_part_in() -> None:
    held_out = [r for r in residuals(BUILT_IN.samples) if r.sample.use is Use.HELD_OUT]
    outside = {r.sample.name for r in held_out if not r.is_in_band}
    # of each phase the farthest, which sets the band of the others
    assert outside == {"mi325x_20k", "mi355x_1p1d_tpot_conc64"}
    for phase in (DecodeLoad, PrefillLoad):
        of_phase = [r for r in held_out if isinstance(r.sample.load, phase)]
        assert max(of_phase, key=lambda r: abs(math.log1p(r.error))).sample.name in outside
    assert len(held_out) == 21


def test_what_plans_say_of_prompts_holds_every_measured_one() -> None:
    """Bands of plans count all held-out points, so none lies outside; and they say to which side all of them fell."""
    prompts = [r for r in residuals(BUILT_IN.samples) if isinstance(r.sample.load, PrefillLoad)]
    held = [r for r in prompts if r.sample.use is Use.HELD_OUT]
    over = [1 / (1 + r.error) - 1 for r in held]
    farthest = max(held, key=lambda r: abs(math.log1p(r.error))).sample
    for sample in BUILT_IN.samples:
        measured = calibrate(sample.setup, type(sample.load), BUILT_IN.samples)
        band = predict_ms(sample.setup, sample.load, measured)
        assert band.low * (1 - 1e-9) <= sample.measured_s * 1e3 <= band.high * (1 + 1e-9), sample.name
        if isinstance(sample.load, PrefillLoad):
            assert f"{len(held)} held-out points, measured " in band.calibrated_on
            assert f"{max(over):.1%} above what was predicted (farthest: {farthest.name} of " in band.calibrated_on


# Monotone, and bands


def random_setups(seed: int) -> Iterator[tuple[Setup, DecodeLoad]]:
    rng = random.Random(seed)
    for _ in range(20):
        shape = rng.choice([EP16, TP8, GroupShape(4, 8, 2), GroupShape(2, 8, 8)])
        yield replace(DECODE, shape=shape), DecodeLoad(rng.randint(1, 600), rng.randint(1, 900_000))


@pytest.mark.parametrize("seed", range(3))
def test_more_requests_and_longer_contexts_never_take_less_and_more_bandwidth_never_more(seed: int) -> None:
    for setup, load in random_setups(seed):
        now = roofline_s(setup, load)
        assert roofline_s(setup, replace(load, concurrency=load.concurrency + 1)) >= now
        assert roofline_s(setup, replace(load, context_tokens=load.context_tokens + 1)) > now
        faster = replace(setup.chip, hbm_bytes_per_second=setup.chip.hbm_bytes_per_second * 1.1)
        assert roofline_s(replace(setup, chip=faster), load) < now
        prompt = PrefillLoad(load.context_tokens, 100)
        longer = replace(prompt, new_tokens=prompt.new_tokens + 1)
        assert prefill_ms(setup, longer, FACTOR_2).value > prefill_ms(setup, prompt, FACTOR_2).value


def test_chunks_of_any_size_compute_the_same_attention() -> None:
    for chunk in (1, 500, 2048, 10_000):
        terms = {t.label: t.seconds for t in prefill_terms(DECODE, PrefillLoad(6000, 0, chunk))}
        assert terms["attention"] == pytest.approx(
            next(t.seconds for t in prefill_terms(DECODE, PrefillLoad(6000)) if t.label == "attention")
        )


OF_THE_WORKER = ("all_to_all_s", "decoded_from_cache")
DECODE_CONSTANTS = ("hbm_share", "launch_s", "all_reduce_s", "exchange_per_node_s", *OF_THE_WORKER)
PREFILL_CONSTANTS = ("gemm_share", "attention_share", "launch_s", "all_reduce_s", *OF_THE_WORKER)


@pytest.mark.parametrize("engine", ["vllm-int4", "kimi-worker"])
@pytest.mark.parametrize(
    ("phase", "names", "seed"),
    [(DecodeLoad, DECODE_CONSTANTS, seed) for seed in range(4)] + [(PrefillLoad, PREFILL_CONSTANTS, 0)],
)
def test_the_band_holds_every_refit_within_the_assumed_ranges(
    phase: type[DecodeLoad | PrefillLoad], names: tuple[str, ...], seed: int, engine: str
) -> None:
    """The band looks at the corners alone; a time over another is monotone in each constant, so nothing lies beyond.

    Held-out errors are left out: they are wider than the refits of a prompt and would hide them.
    """
    rng = random.Random(seed)
    measured = replace(calibrate(DECODE, phase, BUILT_IN.samples), error=0.0)
    for drawn_setup, drawn in random_setups(seed):
        setup = replace(drawn_setup, engine=BUILT_IN.engines[engine])
        load = drawn if phase is DecodeLoad else PrefillLoad(drawn.context_tokens)
        band = predict_ms(setup, load, measured)
        assert band.low <= band.value <= band.high
        for _ in range(10):
            constants = replace(ASSUMED, **{name: rng.uniform(*ASSUMED_RANGES[name]) for name in names})
            refitted = measured.factor(constants) * roofline_s(setup, load, constants) * 1e3
            assert band.low * (1 - 1e-9) <= refitted <= band.high * (1 + 1e-9)


def test_the_band_is_as_wide_as_held_out_errors_even_at_the_fitted_point() -> None:
    fitted = next(s for s in BUILT_IN.samples if s.name == "fit_mi325x_tp8_conc1")
    band = decode_step_ms(fitted.setup, fitted.load, calibrate(fitted.setup, DecodeLoad, BUILT_IN.samples))
    assert band.value == pytest.approx(29.03)
    assert band.high / band.value == pytest.approx(27.2 / 25.25, rel=0.001), "the worst held-out decode point"
    assert band.value / band.low == pytest.approx(band.high / band.value)


def test_the_band_widens_with_the_distance_from_what_was_measured() -> None:
    measured = calibrate(replace(DECODE, chip=MI325X), DecodeLoad, BUILT_IN.samples)
    near = decode_step_ms(Setup(K3, MI325X, TP8, INT4, Split.BY_COLUMN), DecodeLoad(2, 1088), measured)
    far = decode_step_ms(Setup(K3, MI325X, EP16, INT4), DecodeLoad(2, 1088), measured)
    assert far.high / far.low > 1.4 * near.high / near.low


def test_a_profiles_own_factor_is_used_with_its_own_band() -> None:
    own = decode_step_ms(DECODE, DecodeLoad(8, 1000), stated(2.0, 10, "a measured run"))
    assert own.value == pytest.approx(2000 * roofline_s(DECODE, DecodeLoad(8, 1000)))
    assert (own.value / own.low, own.high / own.value) == (pytest.approx(1.1), pytest.approx(1.1))
    assert "a measured run" in own.calibrated_on
    assert calibration_for(DECODE, DecodeLoad, None).anchors, "without one the nearest measured point is taken"


# Handoff


@pytest.mark.parametrize(("tokens", "low", "high"), [(1024, 5.0, 8.5), (100_000, 33, 57), (900_000, 264, 452)])
def test_handoff_takes_its_bytes_at_measured_bandwidths(tokens: int, low: float, high: float) -> None:
    band = handoff_ms(DECODE, tokens)
    assert band.low == pytest.approx(low, rel=0.02)
    assert band.high == pytest.approx(high, rel=0.02)
    assert band.low < band.value < band.high


def test_what_the_profile_does_not_state_is_named() -> None:
    bare = replace(DECODE, chip=Chip("bare", "gfx942", 5.3e12))
    with pytest.raises(ValueError, match="bare: no bandwidth of the network card"):
        handoff_ms(bare, 100)
    with pytest.raises(ValueError, match="bare: no bf16 FLOP/s"):
        prefill_ms(bare, PrefillLoad(100), FACTOR_2)


def test_an_anchor_pins_the_factor_and_a_statement_is_taken_as_it_is() -> None:
    load = DecodeLoad(4, 1000)
    anchored = Calibration((Anchor(DECODE, load, 3 * roofline_s(DECODE, load)),), 0.0, "")
    assert anchored.factor() == pytest.approx(3.0)
    assert FACTOR_2.factor(replace(ASSUMED, hbm_share=0.6)) == 2.0
