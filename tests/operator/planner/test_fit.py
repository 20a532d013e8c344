"""The fitted factor: what it goes through, what it must not see, where a setup without its own takes one from."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest
from kimi_operator.api.base import parse
from kimi_operator.api.calibration import CalibrationSpec
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner.fit import (
    MOST_FACTOR,
    Nearness,
    Sample,
    Use,
    calibrate,
    least_possible_s,
    predict_ms,
    refit,
    residuals,
)
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.predict import roofline_s, roofline_terms
from kimi_operator.planner.roofline import ASSUMED, Attention, DecodeLoad, PrefillLoad, Setup
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.measurements import (
    built_in_measurements,
    calibration_for,
    check_layout,
    read_measurements,
    worker_engine,
)
from msgspec.structs import replace

K3 = architecture("kimi-k3")
BUILT_IN = built_in_measurements()
PUBLISHED = BUILT_IN.samples
SETUP = Setup(K3, BUILT_IN.chip(built_in_profiles()["mi300x"]), GroupShape(2, 8, 2), BUILT_IN.engines["vllm-int4"])

BEFORE = calibrate(SETUP, DecodeLoad, PUBLISHED)


def sample(setup: Setup, concurrency: int, factor: float, use: Use = Use.FITTED) -> Sample:
    load = DecodeLoad(concurrency, 2000)
    name = f"{setup.chip.name} {setup.engine.name} {concurrency}"
    return Sample(name, setup, load, factor * roofline_s(setup, load), use, "made for a test")


def on(chip: str, isa: str = "gfx942", engine: str = "vllm-int4") -> Setup:
    """Another chip for each name: what tells chips apart is what they are made of."""
    faster = SETUP.chip.hbm_bytes_per_second * (1 + ord(chip) / 1000)
    other = replace(SETUP.chip, name=chip, isa=isa, hbm_bytes_per_second=faster)
    return replace(SETUP, chip=other, engine=replace(SETUP.engine, name=engine))


def test_the_factor_of_one_point_goes_through_it() -> None:
    measured = [sample(SETUP, 8, 1.7)]
    calibration = calibrate(SETUP, DecodeLoad, measured)
    assert calibration.factor() == pytest.approx(1.7)
    predicted = predict_ms(SETUP, measured[0].load, calibration)
    assert predicted.value == pytest.approx(measured[0].measured_s * 1e3)


@pytest.mark.parametrize("seed", range(5))
def test_the_factor_has_the_least_squares_of_all_relative_errors(seed: int) -> None:
    rng = random.Random(seed)
    measured = [sample(SETUP, rng.randint(1, 500), rng.uniform(1, 3)) for _ in range(5)]
    ratios = [s.measured_s / roofline_s(s.setup, s.load) for s in measured]

    def squares(factor: float) -> float:
        return sum(math.log(factor / ratio) ** 2 for ratio in ratios)

    grid = [1 + i / 10_000 for i in range(20_000)]
    assert calibrate(SETUP, DecodeLoad, measured).factor() == pytest.approx(min(grid, key=squares), abs=1e-4)


def test_held_out_points_move_the_band_and_never_the_factor() -> None:
    fitted = sample(SETUP, 8, 1.7)
    close, far = (sample(SETUP, 64, factor, Use.HELD_OUT) for factor in (1.75, 2.4))
    narrow, wide = (calibrate(SETUP, DecodeLoad, [fitted, held]) for held in (close, far))
    assert narrow.factor() == wide.factor() == calibrate(SETUP, DecodeLoad, [fitted]).factor()
    assert narrow.error == pytest.approx(math.log(1.75 / 1.7))
    assert wide.error == pytest.approx(math.log(2.4 / 1.7))


def test_nothing_is_fitted_to_the_other_phase() -> None:
    prompt = PrefillLoad(1000)
    prefill = Sample("prompt", SETUP, prompt, 9 * roofline_s(SETUP, prompt), Use.FITTED, "")
    both = [sample(SETUP, 8, 1.7), prefill]
    assert calibrate(SETUP, DecodeLoad, both).factor() == pytest.approx(1.7)
    assert calibrate(SETUP, PrefillLoad, both).factor() == pytest.approx(9)


def test_a_setup_takes_the_nearest_factor_there_is() -> None:
    own, isa, chip, other = (
        sample(on("a"), 8, 1.1),
        sample(on("b"), 8, 1.3),
        sample(on("a", engine="sglang"), 8, 1.5),
        sample(on("c", isa="gfx950", engine="sglang"), 8, 1.9),
    )
    everything = [other, chip, isa, own]
    factors = []
    while everything:
        factors.append(round(calibrate(on("a"), DecodeLoad, everything).factor(), 6))
        everything.pop()
    assert factors == [1.1, 1.3, 1.5, 1.9]
    with pytest.raises(ValueError, match="no fitted point"):
        calibrate(on("a"), DecodeLoad, [])


@pytest.mark.parametrize("phase", [DecodeLoad, PrefillLoad])
@pytest.mark.parametrize("chip", ["mi300x", "mi325x", "mi355x"])
def test_a_copy_of_a_profile_predicts_as_its_original(phase: type[DecodeLoad | PrefillLoad], chip: str) -> None:
    profile = built_in_profiles()[chip]
    copied = profile.model_copy(update={"metadata": profile.metadata.model_copy(update={"name": "mycal"})})
    for engine in (worker_engine(profile), *BUILT_IN.engines.values()):
        found = [
            calibrate(replace(SETUP, chip=BUILT_IN.chip(each), engine=engine), phase, PUBLISHED)
            for each in (profile, copied)
        ]
        assert found[0] == found[1]


def test_a_borrowed_factor_is_as_uncertain_as_chips_differ() -> None:
    fitted = [sample(on("a"), 8, 1.2), sample(on("b", isa="gfx950"), 8, 1.8)]
    assert calibrate(on("a"), DecodeLoad, fitted).error == 0.0
    borrowed = calibrate(on("a", engine="new"), DecodeLoad, fitted)
    assert borrowed.factor() == pytest.approx(1.2), "of the same chip"
    assert borrowed.error == pytest.approx(math.log(1.5)), "what the other chip's factor would have been off"
    assert "borrowed" in borrowed.text


def test_an_error_counts_for_its_own_step_and_for_all_that_are_farther() -> None:
    fitted = [sample(on("a"), 8, 1.2), sample(on("z", isa="gfx950"), 8, 1.2)]
    own = sample(on("a"), 64, 1.3, Use.HELD_OUT)
    same_isa = sample(on("b"), 64, 1.5, Use.HELD_OUT)
    foreign = sample(on("a", engine="new"), 64, 2.0, Use.HELD_OUT)
    everything = [*fitted, own, same_isa, foreign]
    setups = on("a"), on("b"), on("a", engine="new")
    errors = [calibrate(setup, DecodeLoad, everything).error for setup in setups]
    assert errors == pytest.approx([math.log(x / 1.2) for x in (1.3, 1.5, 2.0)])
    # far off close by: what is farther away cannot be surer
    everything[2] = sample(on("a"), 64, 3.0, Use.HELD_OUT)
    errors = [calibrate(setup, DecodeLoad, everything).error for setup in setups]
    assert errors == pytest.approx([math.log(3.0 / 1.2)] * 3)
    nearness = {r.sample.name: r.nearness for r in residuals(everything)}
    assert nearness[own.name] is Nearness.OWN
    assert nearness[same_isa.name] is Nearness.SAME_ISA
    assert nearness[foreign.name] is Nearness.BORROWED


def test_a_held_out_point_has_no_part_in_the_band_it_is_judged_by() -> None:
    everything = [sample(SETUP, 8, 1.7), sample(SETUP, 64, 3.0, Use.HELD_OUT)]
    judged = residuals(everything)[1]
    assert judged.error == pytest.approx(1.7 / 3.0 - 1)
    assert not judged.is_in_band


def test_the_published_factors_of_the_chips() -> None:
    """As data sheets and the rooflines give them; a change of either shows here."""
    by_chip = {}
    for name, engine in (("mi325x", "vllm-int4"), ("mi300x", "vllm-int4"), ("mi355x", "sglang-mxfp4")):
        setup = replace(SETUP, chip=BUILT_IN.chip(built_in_profiles()[name]), engine=BUILT_IN.engines[engine])
        by_chip[name] = round(calibrate(setup, DecodeLoad, PUBLISHED).factor(), 2)
    assert by_chip == {"mi325x": 1.72, "mi300x": 1.72, "mi355x": 1.32}


# Refit


def test_a_refit_takes_the_measured_factor_and_shows_both_errors() -> None:
    measured = [sample(SETUP, c, 2.5, Use.HELD_OUT) for c in (1, 8, 64)]
    change = refit(measured, BEFORE, PUBLISHED)
    assert change.before.factor() == pytest.approx(1.718, abs=0.001)
    assert change.after.factor() == pytest.approx(2.5)
    assert change.errors_before == pytest.approx([1.718149 / 2.5 - 1] * 3, abs=1e-4)
    assert change.errors_after == pytest.approx([0, 0, 0], abs=1e-12)
    assert change.errors_left_out == pytest.approx([0, 0, 0], abs=1e-12)


def test_leave_one_out_predicts_each_point_from_the_others_alone() -> None:
    factors = [2.0, 2.4, 3.0]
    measured = [sample(SETUP, c, f) for c, f in zip((1, 8, 64), factors, strict=True)]
    change = refit(measured, BEFORE, PUBLISHED)
    expected = []
    for index, factor in enumerate(factors):
        one, other = factors[:index] + factors[index + 1 :]
        expected.append(math.sqrt(one * other) / factor - 1)
    assert change.errors_left_out == pytest.approx(expected)
    assert change.after.error == pytest.approx(max(abs(math.log1p(error)) for error in expected))


def test_as_many_points_as_a_file_may_have_are_fitted_at_once() -> None:
    """Each left out once: a roofline for every pair of them took minutes."""
    begin_s = time.process_time()
    change = refit([sample(SETUP, c, 2.0 + c % 2) for c in range(1, 1001)], BEFORE, PUBLISHED)
    assert time.process_time() - begin_s < 5
    assert change.after.factor() == pytest.approx(math.sqrt(6))
    assert len(change.errors_left_out) == 1000


@pytest.mark.parametrize("phase", [DecodeLoad, PrefillLoad])
def test_few_points_are_trusted_no_further_than_one_published_point_tells_of_another(
    phase: type[DecodeLoad | PrefillLoad],
) -> None:
    """Of the same chip and engine: a measured factor is not borrowed, but it is of the loads that were measured."""
    published = [s for s in PUBLISHED if isinstance(s.load, phase)]
    pairs = [
        s.measured_s / roofline_s(s.setup, s.load) / (other.measured_s / roofline_s(other.setup, other.load))
        for s, other in itertools.permutations(published, 2)
        if (s.setup.chip, s.setup.engine) == (other.setup.chip, other.setup.engine)
    ]
    load = DecodeLoad(1, 2000) if phase is DecodeLoad else PrefillLoad(20_000)
    one = Sample("one", SETUP, load, 2.5 * roofline_s(SETUP, load), Use.FITTED, "")
    change = refit([one], BEFORE, PUBLISHED)
    assert math.exp(change.after.error) == pytest.approx(max(pairs))
    assert change.errors_left_out == ()


def test_of_two_points_the_wider_error_counts() -> None:
    for factors, at_least in (((2.5, 2.5), 1.375), ((1.0, 2.0), 2.0)):
        measured = [sample(SETUP, c, f) for c, f in zip((1, 8), factors, strict=True)]
        assert math.exp(refit(measured, BEFORE, PUBLISHED).after.error) == pytest.approx(at_least, abs=0.001)


def test_no_band_narrows_though_steps_grew_otherwise_than_predicted() -> None:
    """Of one engine on one chip 64 at once took a quarter less than 4 at once foretold: it speaks of every factor."""
    far = next(s for s in PUBLISHED if s.name == "mi355x_1p1d_tpot_conc64")
    near = next(s for s in PUBLISHED if s.name == "mi355x_1p1d_tpot_conc4")
    after = refit([near], BEFORE, PUBLISHED).after
    assert predict_ms(far.setup, far.load, after).low <= far.measured_s * 1e3
    assert far.name in after.text


def test_a_time_that_no_memory_could_reach_is_refused() -> None:
    honest = sample(SETUP, 8, 1.0)
    impossible = replace(honest, measured_s=least_possible_s(honest) * 0.99)
    with pytest.raises(ValueError, match=r"is less than .* which bytes and FLOPs take at the peak of mi300x"):
        refit([impossible], BEFORE, PUBLISHED)
    assert least_possible_s(honest) < honest.measured_s


@pytest.mark.parametrize(
    ("load", "parts"),
    [(DecodeLoad(8, 4096), ("weights", "cache")), (PrefillLoad(50_000), ("matrix products", "attention"))],
)
def test_the_least_time_counts_every_part_that_no_engine_avoids(
    load: DecodeLoad | PrefillLoad, parts: tuple[str, str]
) -> None:
    """A part with another name would else be left out in silence."""
    perfect = replace(ASSUMED, hbm_share=1.0, gemm_share=1.0, attention_share=1.0)
    cheapest = replace(SETUP, engine=replace(SETUP.engine, attention=Attention.EXPANDED))
    seconds = {term.label: term.seconds for term in roofline_terms(cheapest, load, perfect)}
    least = least_possible_s(Sample("", SETUP, load, 1.0, Use.FITTED, ""))
    assert least == pytest.approx(sum(seconds[part] for part in parts))


@pytest.mark.parametrize(("factor", "is_taken"), [(90, True), (110, False), (1.0 * 1000, False)])
def test_a_factor_that_no_engine_has_is_refused(factor: float, is_taken: bool) -> None:
    slow = sample(SETUP, 8, factor)
    if is_taken:
        assert refit([slow], BEFORE, PUBLISHED).after.factor() == pytest.approx(factor)
        return
    with pytest.raises(ValueError, match=rf" ms is {factor:,.0f} times what bytes, FLOPs and messages take; known"):
        refit([slow], BEFORE, PUBLISHED)
    tiny = replace(SETUP, architecture=architecture("kimi-k3-tiny"))
    assert refit([sample(tiny, 8, factor)], BEFORE, PUBLISHED).after.factor() == pytest.approx(factor)


def test_known_engines_are_far_from_the_most_of_a_factor() -> None:
    factors = [s.measured_s / roofline_s(s.setup, s.load) for s in PUBLISHED]
    assert max(factors) < MOST_FACTOR / 50
    # a slip of a thousand of the quickest is far beyond it
    assert 1000 * min(factors) > 9 * MOST_FACTOR


# The file


def document() -> dict[str, object]:
    point = {
        "name": "one",
        "chip": "mi300x",
        "engine": "e",
        "layout": {"nodes": 2, "gpusPerNode": 8, "tensorParallel": 2},
        "concurrency": 1,
        "contextTokens": 10,
        "tpotMs": 80.0,
        "use": "fitted",
        "source": "s",
    }
    return {
        "links": {},
        "engines": {"e": {"experts": "int4", "kvItemsize": 1, "resident": "asStored", "source": "s"}},
        "decode": [point],
        "prefill": [],
    }


def test_a_good_file_is_read() -> None:
    found = read_measurements(document(), K3, built_in_profiles(), "file")
    assert [s.name for s in found.samples] == ["one"]
    assert found.samples[0].setup.chip.link_bytes_per_second is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("chip", "mi999x", "file:one.chip: got 'mi999x', expected one of"),
        ("engine", "f", r"file:one.engine: got 'f', expected one of \['e'\]"),
        ("tpotMs", -1.0, "file.decode.0.tpotMs: got -1.0, expected greater than 0"),
        ("tpotMs", "fast", "file.decode.0.tpotMs: got 'fast'"),
        ("concurrency", 0, "file.decode.0.concurrency: got 0"),
        ("use", "maybe", "file.decode.0.use: got 'maybe', expected 'fitted' or 'heldOut'"),
        ("colour", "red", "file.decode.0.colour: got 'red', expected no such field"),
        ("layout", {"nodes": 1, "gpusPerNode": 5, "tensorParallel": 5}, "file:one.layout: got 1 x 5 GPUs"),
    ],
)
def test_each_wrong_field_is_named(key: str, value: object, message: str) -> None:
    wrong = document()
    decode = wrong["decode"]
    assert isinstance(decode, list)
    decode[0][key] = value
    with pytest.raises(InvalidSpec, match=message):
        read_measurements(wrong, K3, built_in_profiles(), "file")


def test_a_profile_without_bandwidth_is_refused() -> None:
    profile = built_in_profiles()["mi300x"]
    gpu = profile.spec.gpu.model_copy(update={"hbm_bytes_per_second": None})
    bare = profile.model_copy(update={"spec": profile.spec.model_copy(update={"gpu": gpu})})
    with pytest.raises(InvalidSpec, match=r"spec\.gpu\.hbmBytesPerSecond: got nothing"):
        BUILT_IN.chip(bare)


def test_a_layout_that_splits_unevenly_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"here\.layout: got 3 x 8 GPUs"):
        check_layout(K3, GroupShape(3, 8, 2), "here")


@pytest.mark.parametrize("phase", [DecodeLoad, PrefillLoad])
def test_a_profiles_calibration_is_for_its_engine_and_phase_alone(phase: type[DecodeLoad | PrefillLoad]) -> None:
    worker = replace(SETUP, engine=worker_engine(built_in_profiles()["mi300x"]))
    both = {"decodeFactor": 2.0, "decodeBandPercent": 9, "prefillFactor": 3.0, "prefillBandPercent": 8}
    own = parse(CalibrationSpec, {"measuredOn": "here", **both})
    factor = {DecodeLoad: 2.0, PrefillLoad: 3.0}[phase]
    assert calibration_for(worker, phase, own).factor() == factor
    nearest = calibrate(worker, phase, PUBLISHED).factor()
    decode_only, no_band = (
        parse(CalibrationSpec, {"measuredOn": "here", **part})
        for part in (dict(itertools.islice(both.items(), 2)), {"decodeFactor": 2.0, "prefillFactor": 3.0})
    )
    assert calibration_for(worker, phase, no_band).factor() == nearest
    assert calibration_for(worker, phase, decode_only).factor() == (2.0 if phase is DecodeLoad else nearest)
    assert calibration_for(SETUP, phase, own).factor() == calibrate(SETUP, phase, PUBLISHED).factor()


def test_every_built_in_chip_with_bandwidth_can_be_predicted() -> None:
    for name, profile in built_in_profiles().items():
        setup = replace(SETUP, chip=BUILT_IN.chip(profile), engine=worker_engine(profile))
        band = predict_ms(setup, DecodeLoad(8, 2000), calibration_for(setup, DecodeLoad, None))
        assert 0 < band.low < band.value < band.high, name
        assert "borrowed" in band.calibrated_on, "the bundled worker was measured nowhere"


# What is said of held-out points


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((), "band: no held-out point,"),
        ((2.2,), "band: 1 held-out point (0 of vllm-int4 on mi300x), measured 10.0% above what was predicted,"),
        ((2.2, 2.5), "band: 2 held-out points, measured 10.0% to 25.0% above what was predicted (farthest: 1 of"),
        ((1.8, 1.0), "band: 2 held-out points, measured 10.0% to 50.0% below what was predicted (farthest: 1 of"),
        (
            (1.8, 2.5),
            "band: 2 held-out points, measured from 10.0% below to 25.0% above what was predicted (farthest: 1 of",
        ),
    ],
)
def test_a_calibration_says_to_which_side_held_out_points_fell(factors: tuple[float, ...], said: str) -> None:
    held = [replace(sample(SETUP, 64, factor, Use.HELD_OUT), name=str(i)) for i, factor in enumerate(factors)]
    assert said in calibrate(SETUP, DecodeLoad, [sample(SETUP, 8, 2.0), *held]).text


def test_a_band_that_another_chip_sets_is_named_by_it() -> None:
    """Points of a chip's own factor count for all chips; who reads 8 % sees that it was another chip and engine."""
    fitted = [sample(on("a"), 8, 1.2), sample(on("z", isa="gfx950", engine="sglang"), 8, 1.2)]
    held = [sample(on("a"), 64, 1.21, Use.HELD_OUT), sample(on("z", "gfx950", "sglang"), 64, 1.3, Use.HELD_OUT)]
    text = calibrate(on("a"), DecodeLoad, fitted + held).text
    assert "(farthest: z sglang 64 of sglang on z)" in text


def test_fitted_points_are_never_counted_among_the_held_out_ones() -> None:
    """A borrowed factor is judged by both; each kind stands with its number and its own farthest point."""
    fitted = [sample(on("a"), 8, 1.0), sample(on("z", isa="gfx950"), 8, 1.8)]
    held = [sample(on("a"), 64, 1.1, Use.HELD_OUT), sample(on("z", isa="gfx950"), 64, 1.71, Use.HELD_OUT)]
    text = calibrate(on("a", engine="new"), DecodeLoad, fitted + held).text
    assert (
        "band: 2 held-out points, measured from 5.0% below to 10.0% above what was predicted "
        "(farthest: a vllm-int4 64 of vllm-int4 on a); 2 fitted points, each predicted with its chip left out, "
        "measured from 44.4% below to 80.0% above what was predicted (farthest: "
    ) in text
    assert "fitted points" not in calibrate(on("a"), DecodeLoad, fitted + held).text.partition("band:")[2]


def test_published_points_are_counted_as_the_check_counts_them() -> None:
    worker = replace(SETUP, engine=worker_engine(built_in_profiles()["mi300x"]))
    for phase in (DecodeLoad, PrefillLoad):
        points = [s for s in PUBLISHED if isinstance(s.load, phase)]
        held = [s.name for s in points if s.use is Use.HELD_OUT]
        said_held, said_fitted = calibrate(worker, phase, PUBLISHED).text.partition("band: ")[2].split("; ")
        assert said_held.startswith(f"{len(held)} held-out points, ")
        assert said_fitted.startswith(f"{len(points) - len(held)} fitted points, each predicted with its chip left out")
        assert any(f"farthest: {name} of" in said_held for name in held)
        assert not any(f"farthest: {name} of" in said_fitted for name in held)


def test_a_refit_says_what_its_band_is() -> None:
    texts = [refit([sample(SETUP, c, 2.5) for c in (1, 8, 64)[:n]], BEFORE, PUBLISHED).after.text for n in (1, 2, 3)]
    bands = [text.partition("band: ")[2] for text in texts]
    few = "fewer than 3, so also 12 published points, each predicted by the worst other of its chip and engine alone, "
    assert bands[0].startswith(f"{few}measured from 27.3% below to 37.5% above what was predicted (farthest: ")
    assert bands[1].startswith(f"each of them predicted with itself left out, {few}measured")
    assert bands[2] == "each of them predicted with itself left out"
