"""Bytes, FLOPs, seconds and money are never mixed: predictions in other units are the same, in those units.

Factors are powers of two, so that floats scale exactly and a limit is met in both units or in neither.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_operator.api.calibration import CalibrationSpec
from kimi_operator.api.deployment import Role
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.cost import Cost, cost_of
from kimi_operator.cli.look_ahead import look_ahead
from kimi_operator.cli.manifests import Planned, read_and_plan
from kimi_operator.cli.outlook import Outlook
from kimi_operator.errors import Problem
from kimi_operator.planner.budget import Budget, PagePool
from kimi_operator.planner.case import Case, Limit
from kimi_operator.planner.fit import Residual, Sample, residuals
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.objective import Forecast
from kimi_operator.planner.predict import (
    Anchor,
    Calibration,
    Capacity,
    Prediction,
    PrefillSide,
    Request,
    Side,
    decode_step_ms,
    handoff_ms,
    prefill_ms,
    roofline_s,
    throughput_curve,
)
from kimi_operator.planner.roofline import (
    DecodeLoad,
    Graphs,
    PrefillLoad,
    Resident,
    Setup,
    Split,
    Term,
    decode_terms,
    handoff_bytes,
    prefill_terms,
)
from kimi_operator.planner.search import Layout
from kimi_operator.planner.solve import MOST_SEQS, solve
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles.forecast import plan_on
from msgspec.structs import replace
from other_units import (
    numbers,
    profile_in_bytes,
    profile_in_seconds,
    setup_in_bytes,
    setup_in_seconds,
    shorter_seconds,
    smaller_bytes,
)
from published_setups import BUILT_IN, DECODE, EP16, K3, MI300X, MI325X, TP8

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
POWERS = st.integers(1, 12).map(lambda power: 2**power)
SETUPS = st.builds(
    Setup,
    st.just(K3),
    st.sampled_from([MI300X, MI325X, replace(MI300X, link_bytes_per_second=None, nic_bytes_per_second=None)]),
    st.sampled_from([EP16, TP8, GroupShape(4, 8, 1)]),
    st.sampled_from([replace(engine, resident=each) for engine in BUILT_IN.engines.values() for each in Resident]),
    st.sampled_from(list(Split)),
    st.sampled_from(list(Graphs)),
)
DECODES = st.builds(DecodeLoad, st.integers(1, 1000), st.integers(1, 100_000))
PREFILLS = st.builds(
    PrefillLoad, st.integers(1, 100_000), st.integers(0, 50_000), st.sampled_from([512, 2048]), st.integers(1, 8)
)


def seconds(terms: tuple[Term, ...]) -> dict[str, float]:
    return {term.label: term.seconds for term in terms}


def times(value: dict[str, float], factor: float) -> dict[str, float]:
    return {label: each * factor for label, each in value.items()}


# rooflines


@settings(max_examples=30)
@given(setup=SETUPS, decode=DECODES, prefill=PREFILLS, k=POWERS)
def test_smaller_bytes_take_the_same_time_at_as_many_more_a_second(
    setup: Setup, decode: DecodeLoad, prefill: PrefillLoad, k: int
) -> None:
    one, other = seconds(decode_terms(setup, decode)), seconds(prefill_terms(setup, prefill))
    sent = handoff_bytes(setup, decode.context_tokens)
    with smaller_bytes(k):
        setup_k = setup_in_bytes(setup, k)
        assert seconds(decode_terms(setup_k, decode)) == one
        assert seconds(prefill_terms(setup_k, prefill)) == other
        assert handoff_bytes(setup_k, decode.context_tokens) == sent * k


@settings(max_examples=30)
@given(setup=SETUPS, decode=DECODES, prefill=PREFILLS, k=POWERS)
def test_shorter_seconds_make_every_term_as_many_more(
    setup: Setup, decode: DecodeLoad, prefill: PrefillLoad, k: int
) -> None:
    one, other = seconds(decode_terms(setup, decode)), seconds(prefill_terms(setup, prefill))
    sent = handoff_bytes(setup, decode.context_tokens)
    with shorter_seconds(k):
        setup_k = setup_in_seconds(setup, k)
        assert seconds(decode_terms(setup_k, decode)) == times(one, k)
        assert seconds(prefill_terms(setup_k, prefill)) == times(other, k)
        assert handoff_bytes(setup_k, decode.context_tokens) == sent


@settings(max_examples=30)
@given(setup=SETUPS, decode=DECODES, prefill=PREFILLS, k=POWERS)
def test_flops_shorten_only_what_computes(setup: Setup, decode: DecodeLoad, prefill: PrefillLoad, k: int) -> None:
    """With memory out of the way: twice the FLOP/s halves products and attention, and nothing else."""
    free = replace(setup, chip=replace(setup.chip, hbm_bytes_per_second=1e30))
    assert free.chip.bf16_flops is not None
    fast = replace(free, chip=replace(free.chip, bf16_flops=free.chip.bf16_flops * k))
    computed = {"matrix products", "attention", "expansion"}
    slow_s = seconds(prefill_terms(free, prefill))
    assert seconds(prefill_terms(fast, prefill)) == {
        label: each / (k if label in computed else 1) for label, each in slow_s.items()
    }
    assert seconds(decode_terms(fast, decode)) == seconds(decode_terms(free, decode))


@settings(max_examples=30)
@given(setup=SETUPS, decode=DECODES)
def test_gigabytes_and_terabytes_a_second_beside_a_term_give_its_seconds(setup: Setup, decode: DecodeLoad) -> None:
    for term in decode_terms(setup, decode):
        if found := re.match(r"([\d.]+) GB at ([\d.e+]+) TB/s", term.how):
            amount, rate = (float(text) for text in found.groups())
            assert term.seconds == pytest.approx(amount * 1e9 / (rate * 1e12), rel=0.01, abs=0.01e9 / (rate * 1e12))
        elif found := re.match(r"(\d+) of (\d+) us", term.how):
            count, micro = (int(text) for text in found.groups())
            assert term.seconds == pytest.approx(count * micro * 1e-6, rel=0.05)


# predictions


ANCHORS = tuple(
    Anchor(DECODE, load, measured_s)
    for load, measured_s in ((DecodeLoad(64, 2112), 0.03125), (DecodeLoad(128, 2112), 0.0390625))
)
CALIBRATION = Calibration(ANCHORS, math.log(1.2), "of a test")
PREFILL_CALIBRATION = Calibration((Anchor(DECODE, PrefillLoad(50_000), 16.0),), math.log(1.3), "of a test")


def calibration_in_bytes(calibration: Calibration, k: int) -> Calibration:
    return replace(
        calibration, anchors=tuple(replace(a, setup=setup_in_bytes(a.setup, k)) for a in calibration.anchors)
    )


def calibration_in_seconds(calibration: Calibration, k: int) -> Calibration:
    anchors = (Anchor(setup_in_seconds(a.setup, k), a.load, a.measured_s * k) for a in calibration.anchors)
    return replace(calibration, anchors=tuple(anchors))


def band(prediction: Prediction) -> tuple[float, float, float]:
    return prediction.low, prediction.value, prediction.high


def near(values: tuple[float, ...], factor: float = 1.0) -> object:
    return pytest.approx(tuple(value * factor for value in values), rel=1e-9)


def everything_predicted(setup: Setup, decode: Calibration, prefill: Calibration) -> tuple[dict, dict]:
    """Times in ms, and rates in tokens a second, each with its band."""
    request, held = Request(20_000, 500, 4000), Capacity(32, 10_000, 64)
    curve = throughput_curve(
        Side(setup, decode, 2), held, request, [1, 40, 5000], PrefillSide(setup, prefill, chunk_tokens=2048)
    )
    timed = {
        "decode": decode_step_ms(setup, DecodeLoad(64, 2112), decode),
        "prefill": prefill_ms(setup, PrefillLoad(9000, 100), prefill),
        "handoff": handoff_ms(setup, 9000),
        **{f"tpot {point.concurrency}": point.tpot for point in curve},
    }
    assert {each.unit for each in timed.values()} == {"ms"}
    assert {point.tokens_per_second.unit for point in curve} == {"tokens/s"}
    rates = {point.concurrency: (point.binds, point.running, band(point.tokens_per_second)) for point in curve}
    return {name: band(each) for name, each in timed.items()}, rates


@pytest.mark.parametrize("k", [2, 1024])
def test_predictions_are_the_same_in_smaller_bytes(k: int) -> None:
    one, rates = everything_predicted(DECODE, CALIBRATION, PREFILL_CALIBRATION)
    with smaller_bytes(k):
        calibrations = (calibration_in_bytes(each, k) for each in (CALIBRATION, PREFILL_CALIBRATION))
        other, rates_k = everything_predicted(setup_in_bytes(DECODE, k), *calibrations)
    assert {name: near(values) for name, values in one.items()} == other
    assert {c: (binds, running, near(rate)) for c, (binds, running, rate) in rates.items()} == rates_k


@pytest.mark.parametrize("k", [2, 1024])
def test_predicted_times_are_k_times_as_many_shorter_seconds_and_rates_as_many_fewer(k: int) -> None:
    one, rates = everything_predicted(DECODE, CALIBRATION, PREFILL_CALIBRATION)
    with shorter_seconds(k):
        calibrations = (calibration_in_seconds(each, k) for each in (CALIBRATION, PREFILL_CALIBRATION))
        other, rates_k = everything_predicted(setup_in_seconds(DECODE, k), *calibrations)
    assert {name: near(values, k) for name, values in one.items()} == other
    assert {c: (binds, running, near(rate, 1 / k)) for c, (binds, running, rate) in rates.items()} == rates_k


@settings(max_examples=20)
@given(setup=SETUPS, decode=DECODES, prefill=PREFILLS, factor=st.floats(0.5, 4.0))
def test_milliseconds_are_a_thousand_a_second(
    setup: Setup, decode: DecodeLoad, prefill: PrefillLoad, factor: float
) -> None:
    """What scales alike in any unit could still be off by a constant: held against bytes over bytes a second."""
    stated = Calibration((), 0.0, "stated for a test", factor)
    assert decode_step_ms(setup, decode, stated).value == pytest.approx(1000 * factor * roofline_s(setup, decode))
    assert prefill_ms(setup, prefill, stated).value == pytest.approx(1000 * factor * roofline_s(setup, prefill))
    if setup.chip.nic_bytes_per_second is not None:
        moved = handoff_ms(setup, decode.context_tokens)
        peak_s = handoff_bytes(setup, decode.context_tokens) / setup.chip.nic_bytes_per_second
        assert peak_s < moved.low / 1000 < moved.value / 1000 < moved.high / 1000 < 2 * peak_s
    (point,) = throughput_curve(Side(setup, stated), Capacity(64, 10**9, 64), Request(100, 100), [1])
    assert point.tokens_per_second.value == pytest.approx(1000 / point.tpot.value)
    (point,) = throughput_curve(
        Side(setup, stated),
        Capacity(64, 10**9, 64),
        Request(900, 100),
        [1],
        PrefillSide(setup, stated, chunk_tokens=2048),
    )
    request_s = roofline_s(setup, PrefillLoad(900)) * factor + 100 * point.tpot.value / 1000
    assert point.tokens_per_second.value == pytest.approx(100 / request_s)


def sample_in_bytes(sample: Sample, k: int) -> Sample:
    return replace(sample, setup=setup_in_bytes(sample.setup, k))


def sample_in_seconds(sample: Sample, k: int) -> Sample:
    return replace(sample, setup=setup_in_seconds(sample.setup, k), measured_s=sample.measured_s * k)


@pytest.mark.parametrize(("units", "convert"), [(smaller_bytes, sample_in_bytes), (shorter_seconds, sample_in_seconds)])
def test_published_points_are_as_far_off_in_any_units(units, convert) -> None:
    samples = BUILT_IN.samples
    before = residuals(samples)
    with units(8):
        after = residuals([convert(sample, 8) for sample in samples])
    for one, other in zip(before, after, strict=True):
        assert (other.nearness, other.is_in_band) == (one.nearness, one.is_in_band)
        assert off(other) == near(off(one))


def off(residual: Residual) -> tuple[float, float, float]:
    """Prediction and band over what was measured."""
    return tuple(each / 1000 / residual.sample.measured_s for each in band(residual.predicted))


# what is solved and ranked by them


def forecast(setup: Setup, work: Workload, decode: Calibration, prefill: Calibration) -> Forecast:
    return Forecast(work, lambda shape: replace(setup, shape=shape), decode, prefill, 2048)


TARGETED = st.builds(
    Workload,
    st.integers(100, 60_000).map(fixed),
    st.integers(1, 4000).map(fixed),
    ttft_s=st.integers(1, 64).map(lambda quarters: quarters / 4),
    tpot_s=st.integers(1, 32).map(lambda parts: parts / 128),
    requests_per_second=st.none() | st.integers(1, 64).map(lambda eighths: Fraction(eighths, 8)),
)


@settings(max_examples=20)
@given(work=TARGETED, role=st.sampled_from(list(Role)), k=st.integers(1, 6).map(lambda power: 2**power))
def test_targets_in_shorter_seconds_are_met_by_the_same_settings(work: Workload, role: Role, k: int) -> None:
    assert work.ttft_s is not None
    assert work.tpot_s is not None
    rate = work.requests_per_second
    work_k = replace(
        work,
        ttft_s=work.ttft_s * k,
        tpot_s=work.tpot_s * k,
        requests_per_second=None if rate is None else rate / k,
    )
    calibrations = CALIBRATION, PREFILL_CALIBRATION
    with shorter_seconds(k):
        calibrations_k = [calibration_in_seconds(each, k) for each in calibrations]
        model_k = forecast(setup_in_seconds(DECODE, k), work_k, *calibrations_k)
        other, throughput_k = solved(model_k, role), rate_of(model_k)
    model = forecast(DECODE, work, *calibrations)
    one = solved(model, role)
    assert throughput_k == pytest.approx(rate_of(model) / k)
    if isinstance(one, Problem) or isinstance(other, Problem):
        assert one == other
        return
    assert numbers(one) == numbers(other)
    assert [(b.limit, b.max_num_seqs) for b in other.bounds] == [(b.limit, b.max_num_seqs) for b in one.bounds]
    assert [miss.field for miss in other.misses] == [miss.field for miss in one.misses]
    assert [doubt.field for doubt in other.doubts] == [doubt.field for doubt in one.doubts]
    # and in seconds, by what is shown in milliseconds
    for bound in one.bounds:
        longest_ms = target_ms(work, bound.limit)
        if longest_ms is None:
            continue
        if bound.max_num_seqs:
            assert time_ms(work, bound.limit, bound.max_num_seqs) <= longest_ms * (1 + 1e-9)
        if bound.max_num_seqs < MOST_SEQS:
            assert time_ms(work, bound.limit, bound.max_num_seqs + 1) > longest_ms * (1 - 1e-9)


def target_ms(work: Workload, limit: Limit) -> float | None:
    target_s = {Limit.TPOT: work.tpot_s, Limit.TTFT: work.ttft_s}.get(limit)
    return None if target_s is None else target_s * 1000


def time_ms(work: Workload, limit: Limit, seqs: int) -> float:
    """A step of so many requests a lane, or so many prompts of a lane in a row beside those that a rate brings."""
    if limit is Limit.TPOT:
        return decode_step_ms(DECODE, DecodeLoad(seqs * EP16.lanes, work.mean_context), CALIBRATION).value
    computed, reused = work.computed_and_reused(work.prompt.mean)

    def prompt_ms(busy: int) -> float:
        return prefill_ms(DECODE, PrefillLoad(computed, reused, busy_lanes=busy), PREFILL_CALIBRATION).value

    rate, lanes = work.requests_per_second, EP16.lanes
    enough = [] if rate is None else [n for n in range(1, lanes) if 1000 * n >= float(rate) * prompt_ms(n)]
    return seqs * prompt_ms(min(enough, default=lanes))


BUDGET = Budget(20 * 2**30, (), PagePool(64, 1_769_472, 218_000_000))


def solved(model: Forecast, role: Role):
    timing = model.timing(EP16, 1)
    return solve(Case(model.workload, role, EP16.lanes, BUDGET, 64, K3.max_positions, timing))


def rate_of(model: Forecast) -> float:
    full = solve(Case(Workload(fixed(1), fixed(1)), Role.DECODE, EP16.lanes, BUDGET, 64, K3.max_positions))
    assert not isinstance(full, Problem)
    return model.throughput(Layout(EP16, 1, EP16, 1), full)


# money


@cache
def planned_example() -> Planned:
    """Kimi-K3 on MI300X, with factors that its profile states."""
    planned = read_and_plan([EXAMPLE])
    own = CalibrationSpec(
        engine="kimi-worker",
        decode_factor=2.0,
        decode_band_percent=20.0,
        prefill_factor=1.5,
        prefill_band_percent=30.0,
        measured_on="for a test",
    )
    spec = planned.profile.spec.model_copy(update={"calibration": own})
    return replace(planned, profile=planned.profile.model_copy(update={"spec": spec}))


def outlook_on(profile: HardwareProfile, work: Workload) -> Outlook:
    planned = planned_example()
    plan = plan_on(planned.architecture, planned.deployment.spec, profile)
    return look_ahead(replace(planned, profile=profile, plan=plan), work)


def prices(cost: Cost) -> tuple[float, ...]:
    shown = (cost.prompt, cost.output, cost.all_in, cost.per_request)
    return tuple(number for price in shown for number in (price.value, price.low, price.high))


WORKS = st.builds(
    Workload, st.integers(500, 20_000).map(fixed), st.integers(10, 2000).map(fixed), concurrency=st.integers(1, 200)
)


@settings(max_examples=5)
@given(work=WORKS, price=st.floats(0.1, 100), k=POWERS)
def test_an_hour_costs_what_its_tokens_cost(work: Workload, price: float, k: int) -> None:
    """All GPUs, paid for an hour, by the prompt and output tokens of 3,600 seconds."""
    outlook = outlook_on(planned_example().profile, work)
    assert outlook.speed is not None
    cost = cost_of(outlook, price)
    outputs = outlook.speed.at.tokens_per_second.value * 3600
    requests = outputs / work.output.longest
    assert cost.hour == pytest.approx(outlook.plan.gpus * price)
    assert outputs / 1e6 * cost.all_in.value == pytest.approx(cost.hour)
    assert requests * cost.per_request.value == pytest.approx(cost.hour)
    tokens = outputs * cost.output.value + requests * work.prompt.longest * cost.prompt.value
    assert tokens / 1e6 == pytest.approx(cost.hour)
    assert prices(cost_of(outlook, price * k)) == near(prices(cost), k)


@pytest.mark.parametrize("k", [2, 1024])
def test_prices_follow_seconds_and_leave_bytes_alone(k: int) -> None:
    work, profile = Workload(fixed(8000), fixed(500), concurrency=100), planned_example().profile
    before = prices(cost_of(outlook_on(profile, work), 2.5))
    with smaller_bytes(k):
        assert prices(cost_of(outlook_on(profile_in_bytes(profile, k), work), 2.5)) == near(before)
    with shorter_seconds(k):
        assert prices(cost_of(outlook_on(profile_in_seconds(profile, k), work), 2.5)) == near(before, k)
