"""Figures of a plan with formula, values and source: predicted times and rates. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_operator.cli.figures import Amount, Figure, banded, factor_of, number, with_band
from kimi_operator.cli.outlook import Outlook, Speed
from kimi_operator.planner.objective import Forecast
from kimi_operator.planner.predict import (
    HANDOFF_SHARES,
    PREFILL,
    Calibration,
    CurvePoint,
    Prediction,
    Request,
    decode_step_ms,
    prefill_ms,
    roofline_s,
)
from kimi_operator.planner.roofline import DecodeLoad
from kimi_operator.planner.targets import ARRIVING
from kimi_operator.planner.units import binding, ceil_div, counted
from kimi_operator.profiles.forecast import decode_forecast

NOT_PREDICTED = "not predicted"
_STEP, _PROMPT = "factor x sum of the step's terms", "factor x sum of the prompt's terms"
_HANDOFF = "bytes of a request / (bandwidth of its network card x geometric mean of the shares that writes achieved)"
_BOUND = (
    "the least of requests that have memory / (TPOT + prefill of a prompt beside the others / tokens of an answer), of "
    "full lanes / TPOT, and of "
    "what prefill feeds: its lanes x tokens of an answer / time of a prompt while all of them compute; no more than a "
    "stated rate brings"
)
_BEND = "the point of the curve that is farthest above the straight line from its first to its last, both scaled to 1"


def time_figures(outlook: Outlook) -> Iterator[Figure]:
    """Of a step, a prompt, a handoff and the throughput, and of the factors that they rest on."""
    reason = outlook.no_speed or "the workload does not fit"
    yield from _decode(outlook, reason)
    if outlook.speed is None:
        for key, formula in (("prefill", _PROMPT), ("ttft", _PROMPT), ("throughput", _BOUND), ("knee", _BEND)):
            yield Figure(key, NOT_PREDICTED, formula, "-", reason)
        return
    yield from _prefill(outlook, outlook.speed)
    yield from _throughput(outlook, outlook.speed)


def _decode(outlook: Outlook, reason: str) -> Iterator[Figure]:
    """What bandwidth alone predicts, the handoff included."""
    either = outlook.speed or outlook.decode_speed
    if either is None or either.handoff is None:
        missing = "nobody stated fabric.nicBytesPerSecond" if either else reason
        yield Figure("handoff", NOT_PREDICTED, _HANDOFF, "-", missing)
    else:
        values = _handoff_values(outlook, either.request)
        yield banded("handoff", either.handoff, _HANDOFF, values)
    if either is None:
        yield Figure("tpot", NOT_PREDICTED, _STEP, "-", reason)
    else:
        yield _predicted("tpot", either.tpot, _STEP)
        yield _predicted("tpotAlone", either.tpot_alone, f"{_STEP}, one request")
        yield _calibration("calibration.decode", either.tpot, _decode_calibration(outlook))


def _decode_calibration(outlook: Outlook) -> Calibration:
    if outlook.forecast is not None:
        return outlook.forecast.decode
    planned = outlook.planned
    return decode_forecast(planned.architecture, planned.profile, outlook.plan.kv_cache_dtype)[1]


def _prefill(outlook: Outlook, speed: Speed) -> Iterator[Figure]:
    yield _predicted("prefill", speed.prefill, f"{_PROMPT}, alone in its group")
    busy = f"{_PROMPT}, beside those of the lanes that this load keeps busy: {speed.busy_lanes}"
    yield _predicted("prefillBusy", speed.prefill_busy, busy)
    yield _ttft(outlook, speed)
    yield _calibration("calibration.prefill", speed.prefill, _forecast(outlook).prefill)


def _throughput(outlook: Outlook, speed: Speed) -> Iterator[Figure]:
    at, rate = speed.at, speed.at.tokens_per_second
    values = f"{_bounds(outlook, speed)}: {binding(at.binds)} at {at.concurrency:,} at once"
    yield banded("throughput", rate, _BOUND, values)
    running = f"decode has room for {speed.capacity:,}, TPOT is for {at.running:,} in decode"
    if at.binds == PREFILL and at.running < at.concurrency:
        mean = f"{number(rate.value)} tokens/s x {number(at.tpot.value)} ms = {number(speed.mean_running)}"
        running += f", the whole number nearest to their mean; {mean}"
    stated = "stated, else as many as decode runs at once"
    yield Figure("concurrency", f"{at.concurrency:,}", stated, running, "the workload")
    rate_there = f"{with_band(speed.knee.tokens_per_second)}; {binding(speed.knee.binds)}"
    values = f"{_above(speed.curve, speed.knee)}; {rate_there}; decode has room for {speed.capacity:,}"
    yield Figure("knee", f"{speed.knee.concurrency:,} at once", _BEND, values, rate.calibrated_on)


def _ttft(outlook: Outlook, speed: Speed) -> Figure:
    if speed.grows:
        formula = "more comes than is served: each request waits longer than the one before"
        return Figure("ttft", growing(speed), formula, _bounds(outlook, speed), speed.ttft.calibrated_on)
    if speed.arriving_ttft is not None:
        formula = f"prefillBusy + waits {ARRIVING}: mean of a replay of prefill alone at this rate"
        waits = speed.ttft.value - speed.prefill_busy.value
        values = f"{number(speed.prefill_busy.value)} ms + {number(waits)} ms"
    elif speed.waiting_ttft is None:
        formula, values = "as prefillBusy, no wait for a lane counted", f"{number(speed.prefill_busy.value)} ms"
    elif speed.at.binds != PREFILL:
        formula = "prefillBusy + requests that wait for memory x tokens of an answer / output tokens/s"
        waiting = f"({speed.at.concurrency:,} - {speed.at.held:,}) x {speed.request.output_tokens:,}"
        rate = number(speed.at.tokens_per_second.value)
        values = f"{number(speed.prefill_busy.value)} ms + {waiting} / {rate} tokens/s"
    else:
        formula = "at once x time of a prompt beside all lanes / lanes of prefill - tokens of an answer x TPOT"
        prompts = f"{speed.at.concurrency:,} x {_prompt_beside_all(outlook)} ms / {outlook.prefill.lanes}"
        values = f"{prompts} - {speed.request.output_tokens:,} x {number(speed.tpot.value)} ms"
    return banded("ttft", speed.ttft, formula, values)


def growing(speed: Speed) -> str:
    """What becomes of the wait at a rate that is more than what is served."""
    assert speed.comes is not None, "without a rate no queue grows for ever"
    served = max(point.tokens_per_second.value for point in speed.curve)
    return f"grows without end: {number(speed.comes)} output tokens/s come, {number(served)} are served at most"


def _prompt_beside_all(outlook: Outlook) -> str:
    """Milliseconds of a mean prompt while all lanes of its group compute one."""
    forecast, shape = _forecast(outlook), outlook.prefill.shape
    return number(prefill_ms(forecast.setup(shape), forecast.all_busy(shape), forecast.prefill).value)


def _forecast(outlook: Outlook) -> Forecast:
    assert outlook.forecast is not None, "times of prefill come from it"
    return outlook.forecast


def _handoff_values(outlook: Outlook, request: Request) -> str:
    plan, fabric, gpus = outlook.plan.prefill, outlook.planned.profile.spec.fabric, outlook.prefill.shape.gpus_per_node
    row = plan.page_bytes // plan.page_size_tokens
    amount = f"{counted(request.prompt_tokens, 'token')} x {row:,} B + slot of {plan.slot_bytes:,} B"
    card, cards = f"{(fabric.nic_bytes_per_second or 0) / 1e9:g} GB/s", fabric.nics_per_node or gpus
    each = f"{card} x {cards} / {gpus}" if cards < gpus else card
    return f"({amount}) / ({each} x sqrt({' x '.join(f'{share:g}' for share in HANDOFF_SHARES)}))"


def _bounds(outlook: Outlook, speed: Speed) -> str:
    """What clients, lanes and prefill each allow at the load of the plan; the last two without waiting."""
    forecast, at, outputs = _forecast(outlook), speed.at, speed.request.output_tokens
    decode = forecast.decode_side(outlook.decode.shape, outlook.decode.groups)
    running = min(at.concurrency, speed.capacity)
    load = DecodeLoad(ceil_div(running, decode.groups), speed.request.mean_context)
    token = number(decode_step_ms(decode.setup, load, decode.calibration).value)
    prefill = forecast.prefill_side(outlook.prefill.shape, outlook.prefill.groups)
    beside = speed.request.prefill(forecast.chunk_tokens, prefill.busy_lanes(at.held))
    prompt = number(prefill_ms(prefill.setup, beside, prefill.calibration).value)
    clients = f"clients {at.concurrency:,}"
    if at.held < at.concurrency:
        clients = f"memory holds {at.held:,} of {at.concurrency:,} clients"
    bounds = [f"{clients} / ({token} ms + {prompt} ms / {outputs:,})"]
    if running < at.concurrency:
        bounds.append(f"lanes {running:,} / {token} ms")
    bounds.append(f"prefill {outlook.prefill.lanes:,} lanes x {outputs:,} / {_prompt_beside_all(outlook)} ms")
    if outlook.workload.requests_per_second is not None:
        bounds.append(f"rate {float(outlook.workload.requests_per_second):g} x {outputs:,}")
    return f"min({', '.join(bounds)})"


def _above(curve: tuple[CurvePoint, ...], point: CurvePoint) -> str:
    """By how much a point is above the straight line."""
    first, width = curve[0].concurrency, curve[-1].concurrency - curve[0].concurrency or 1
    rates = [each.tokens_per_second.value for each in curve]
    height, rate = max(rates) - rates[0] or 1.0, point.tokens_per_second.value
    share = (rate - rates[0]) / height - (point.concurrency - first) / width
    x = f"({point.concurrency:,} - {first:,}) / {width:,}"
    y = f"({number(rate)} - {number(rates[0])}) / {number(height)}"
    return f"{y} - {x} = {share:.3f}, the most of {counted(len(curve), 'point')}"


def _calibration(key: str, prediction: Prediction, calibration: Calibration) -> Figure:
    """The factor between a prediction and its terms."""
    text, points = f"factor {factor_of(prediction):.3f}", calibration.anchors
    source, exact = prediction.calibrated_on, Amount(factor_of(prediction))
    if not points:
        return Figure(key, text, "stated by the profile's calibration", f"{calibration.factor():.3f}", source, exact)
    ratios = (f"{number(p.measured_s * 1e3)} ms / {number(roofline_s(p.setup, p.load) * 1e3)} ms" for p in points)
    values = " x ".join(ratios)
    if len(points) > 1:
        values = f"({values}) ^ (1 / {len(points)})"
    formula = "measured / computed time of the points that were fitted, their geometric mean"
    return Figure(key, text, formula, values, source, exact)


def _predicted(key: str, prediction: Prediction, formula: str) -> Figure:
    terms = " + ".join(f"{term.label} {number(term.seconds * 1e3)} ms" for term in prediction.terms)
    hows = "; ".join(f"{term.label}: {term.how}" for term in prediction.terms)
    values = f"{factor_of(prediction):.3f} x ({terms}); {hows}"
    return banded(key, prediction, formula, values)
