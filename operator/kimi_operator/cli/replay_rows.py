"""What every report of a replay shows: its lines and the cells of its tables, as texts. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_operator.api.deployment import Role
from kimi_operator.cli.figures import number, with_band
from kimi_operator.cli.outlook import shape_of
from kimi_operator.cli.replayed import Outcome
from kimi_operator.cli.sessions import AskedSessions
from kimi_operator.planner.demand import reuse_warnings
from kimi_operator.planner.predict import Prediction
from kimi_operator.planner.pressure import Summary
from kimi_operator.planner.reservation import RESERVATION, raised
from kimi_operator.planner.retention import Retention
from kimi_operator.planner.service import Service
from kimi_operator.planner.units import bytes_text, counted
from kimi_operator.profiles.support import rates_warning

TTFT = (lambda s: s.ttft_p50_s, lambda s: s.ttft_p95_s)
TPOT = (lambda s: s.tpot_p50_s, lambda s: s.tpot_p95_s)
NOTHING_SERVED = "no turn is served"
OVER_TIME = ("from s", "compute tok/s", "asked tok/s", "prefill", "held", "pages, peak", "wait", "binds")
BY_TURN = ("turn", "served", "prompt", "computed", "TTFT p50", "TTFT p95", "TPOT p50")
BY_TURN_TITLE = "by turn, mean tokens"


def title(outcome: Outcome) -> str:
    """Model, chip and layout."""
    plan = outcome.plan
    layout = "; ".join(f"{role} {_layout(outcome, role)}" for role in Role)
    return f"{plan.architecture} on {plan.profile}: {counted(plan.gpus, 'GPU')}, {layout}"


def opening(outcome: Outcome) -> Iterator[str]:
    """What was replayed, what of it was assumed, and what the figures are."""
    asked = outcome.asked
    yield from asked.text
    if asked.manifest.taken:
        yield f"from spec.workload: {', '.join(asked.manifest.taken)}"
    if asked.manifest.unused:
        yield f"not used of spec.workload: {', '.join(asked.manifest.unused)}"
    if asked.assumed:
        yield f"assumed, since not stated: {', '.join(asked.assumed)}"
    yield "predicted, not measured; in brackets: the whole replay with all times at the low and at the high end"


def summary_rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """The whole replay, label by label; a label that is empty goes on with the one before."""
    value, service = outcome.value.summary, outcome.service
    yield "binds", f"{value.binds}{_waits(value)}"
    yield "TTFT", _percentiles(*(outcome.banded(of, "ms") for of in TTFT))
    yield "TPOT", _percentiles(*(outcome.banded(of, "ms") for of in TPOT))
    for met in outcome.targets:
        bounds = f"{met.low:.0%} to {met.high:.0%}"
        target = f"{met.target_s * 1e3:g} ms" if met.target_s < 1 else f"{met.target_s:g} s"
        yield f"{met.name} target", f"{target}, met by {met.share:.0%} of turns ({bounds})"
    lasted = f"{_banded(outcome.banded(lambda s: s.duration_s, 's'))} for {counted(value.turns, 'turn')}"
    rates = [number(each / value.duration_s) for each in (value.turns, value.output_tokens)]
    yield (
        "duration",
        f"{lasted}, {rates[0]} a second; answers {counted(value.output_tokens, 'token')}, {rates[1]} a second",
    )
    computed = f"computes {value.computed_tokens:,} of {value.prompt_tokens:,} prompt tokens"
    lockstep = f"{value.prefill_lockstep:.0%} of that behind the slowest lane of a group"
    yield "prefill", f"{value.prefill_busy:.0%} busy, {lockstep}; {computed}"
    again = _share(value.recomputed_tokens, value.computed_tokens)
    yield "recomputed", f"{counted(value.recomputed_tokens, 'token')} that an earlier turn had: {again} of the computed"
    lanes, pages = lanes_of(service), lanes_of(service) * service.lane.num_pages
    held = f"{value.held_peak:,} of {lanes * service.lane.num_slots:,} state slots held at once"
    used = f"{value.pages_peak:,} of {pages:,} KV pages ({_share(value.pages_peak, pages)})"
    yield "decode, at most", f"{used}, {held}, on {counted(lanes, 'lane')}"
    yield from zip(("prefix cache", ""), _cache(outcome.cache, outcome.asked), strict=True)


def over_time_title(outcome: Outcome) -> str:
    """Over the table of `over_time`."""
    return f"over time, a row for each {outcome.row_s:,g} s"


def over_time(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """Cells below OVER_TIME."""
    pages = lanes_of(outcome.service) * outcome.service.lane.num_pages
    for row in outcome.rows:
        yield (
            f"{row.start_s:,.0f}", f"{row.computed_per_s:,.0f}", f"{row.prompt_per_s:,.0f}", f"{row.prefill_busy:.0%}",
            f"{row.held:.1f}", f"{row.pages_peak:,} ({_share(row.pages_peak, pages)})", f"{row.waiting_peak}",
            row.binds or "-",
        )  # fmt: skip


def by_turn(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """Cells below BY_TURN."""
    for each in outcome.turns:
        row = each.row
        yield (
            f"{row.first}" if row.first == row.last else f"{row.first}-{row.last}",
            f"{row.served:,}",
            f"{row.prompt_tokens:,.0f}",
            f"{row.computed_tokens:,.0f}",
            *map(_banded, (each.ttft_p50, each.ttft_p95, each.tpot_p50)),
        )


def warnings(outcome: Outcome) -> Iterator[str]:
    """The plan's warnings, and what the sessions asked for that they do not get."""
    stated = outcome.planned.deployment.spec.workload
    # the plan's is of the manifest's reuse, which a flag may have replaced
    of_plan = set() if stated is None else set(reuse_warnings(stated.reuse))
    yield from (warning for warning in outcome.plan.warnings if warning not in of_plan)
    if unsure := rates_warning(outcome.planned.profile):
        yield unsure
    value, cache, reuse = outcome.value.summary, outcome.cache, outcome.asked.reuse
    limits = outcome.service.lane
    if value.cut_sessions:
        yield (
            f"{value.cut_sessions:,} of {len(outcome.asked.sessions):,} sessions end early: their next turn would be "
            f"longer than {limits.max_context:,} tokens, the longest request"
        )
    if value.refused_turns:
        yield (
            f"{_of_turns(value.refused_turns, value.turns, 'would be refused (429)')}: their lane has "
            f"{counted(limits.max_queued, 'request')} waiting already (limits.maxQueued); add nodes, or begin fewer "
            "sessions at once"
        )
    if value.expired_turns:
        yield _expired(outcome, value)
    elif outcome.slow.summary.expired_turns:
        yield f"not sure: at the slow end of the band {_expired(outcome, outcome.slow.summary)}"
    yield from reuse_warnings(reuse)
    if reuse > cache.reuse and cache.returning_turns:
        yield (
            f"reuse of {reuse:.1%} cannot be had: prefill's own pages keep {cache.reuse:.1%} of earlier contexts; "
            "lower --reuse, or cache prompts elsewhere"
        )


def _expired(outcome: Outcome, summary: Summary) -> str:
    """Turns whose prefill ends too late, and what helps: more nodes do nothing for a prompt that is too long alone."""
    turns, limit_s = outcome.slow.replayed.turns, outcome.service.lane.reservation_s
    longest_s = max(turn.first_s - turn.admitted_s for turn in turns)
    faster = "add nodes of prefill, or begin fewer sessions at once"
    if max(turn.first_s - turn.prefill_s for turn in turns) > limit_s:
        faster = "use a larger tensorParallel, or shorten prompts"
    failing = _of_turns(summary.expired_turns, summary.turns, "would fail")
    late = f"prefill ends later than {limit_s:,g} s after decode made room ({RESERVATION})"
    return f"{failing}: {late}; {raised('it', longest_s, faster)}"


def _of_turns(some: int, turns: int, what: str) -> str:
    """So many turns that a worker would not serve."""
    return f"{some:,} of {counted(turns, 'turn')} {what}, and {'is' if some == 1 else 'are'} counted as served"


def notes(outcome: Outcome) -> Iterator[str]:
    """What the figures stand on, and what is not in them."""
    yield "reuse is as stated, the same for each turn; answers stay in the context"
    yield (
        "a turn waits for pages of its prompt and whole answer; a worker takes them as the answer grows, and preempts: "
        "not in here"
    )
    yield (
        "binds: what turns wait for most; a wait for memory counts as what those that have memory wait for, one for a "
        "step's end as none"
    )
    yield (
        "a turn goes to the decode lane with most room and the prefill lane with fewest tokens; lanes of a group step "
        "together"
    )
    if outcome.handoff is not None:
        yield f"the handoff is not in TTFT: {with_band(outcome.handoff)} for the longest prompt"
    state = bytes_text(outcome.plan.prefill.slot_bytes)
    yield (
        f"prefix cache: one pool of all lanes, so an upper bound; each prompt with its KDA state, {state} a rank; none "
        "shared between sessions"
    )
    yield f"decode calibrated on {outcome.decode_on}"
    yield f"prefill calibrated on {outcome.prefill_on}"


def lanes_of(service: Service) -> int:
    """Decode lanes of all groups."""
    return service.lanes * service.groups


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:.0%}"


def _percentiles(p50: Prediction | None, p95: Prediction | None) -> str:
    return f"{_banded(p50)} at the median, {_banded(p95)} at p95"


def _banded(prediction: Prediction | None) -> str:
    return "none" if prediction is None else with_band(prediction)


def _waits(summary: Summary) -> str:
    """The longest of each kind; empty when no request waited for a limit."""
    if not any(summary.waited_s.values()):
        return ""
    memory, lane, place = summary.memory_wait_s, summary.lane_wait_s, summary.running_wait_s
    return f"; longest wait {memory:,.1f} s for memory, {lane:,.1f} s for prefill, {place:,.1f} s for the batch"


def _layout(outcome: Outcome, role: Role) -> str:
    shape, groups = shape_of(outcome.planned, role), outcome.planned.deployment.spec.role(role).groups
    return f"{groups} x {shape.in_nodes}"


def _cache(cache: Retention, asked: AskedSessions) -> tuple[str, str]:
    share = _share(cache.wanted_pages, cache.num_pages)
    return (
        f"would want {cache.wanted_pages:,} of prefill's {cache.num_pages:,} pages ({share}) for prompts that return",
        f"{cache.evicted_turns:,} of {cache.returning_turns:,} returns would find theirs evicted; "
        f"reuse up to {cache.reuse:.0%}, replayed with {asked.reuse:.0%}",
    )
