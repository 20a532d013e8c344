"""The view of `kimictl replay`: one screen of text, or a document for scripts, from the same outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_operator.api.base import dump
from kimi_operator.api.deployment import Role
from kimi_operator.cli.asking import asked_for, make_plan
from kimi_operator.cli.document import dumped, refusal_document
from kimi_operator.cli.figures import with_band
from kimi_operator.cli.files import STANDARD_INPUT
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags, refuse
from kimi_operator.cli.outlook import shape_of
from kimi_operator.cli.progress import Progress
from kimi_operator.cli.replayed import BandedRow, Outcome, num_begun, replay_on
from kimi_operator.cli.session_flags import SessionFlags, TableFlags
from kimi_operator.cli.sessions import AskedSessions, asked_sessions
from kimi_operator.cli.text import refusal_text
from kimi_operator.planner import Infeasible
from kimi_operator.planner.predict import Prediction
from kimi_operator.planner.pressure import Row, Summary
from kimi_operator.planner.retention import Retention
from kimi_operator.planner.service import Service
from kimi_operator.planner.units import bytes_text
from kimi_operator.profiles.support import rates_warning

DEFAULT_ROWS = 10
MOST_ROWS = 200
LABEL_WIDTH = 16
_TTFT = (lambda s: s.ttft_p50_s, lambda s: s.ttft_p95_s)
_TPOT = (lambda s: s.tpot_p50_s, lambda s: s.tpot_p95_s)
Flags = tuple[DeploymentFlags, SessionFlags, TableFlags]


def answer(files: list[Path], flags: Flags, output: str) -> tuple[str, int]:
    """What a command line is answered with, and the exit status: 1 when something does not fit.

    Raises InvalidSpec for bad input.
    """
    deployment, of_sessions, tables = flags
    rows = DEFAULT_ROWS if tables.rows is None else tables.rows
    if not 1 <= rows <= MOST_ROWS:
        raise refuse("--rows", f"{rows:,}", f"from 1 to {MOST_ROWS}", "correct it")
    if STANDARD_INPUT in files and of_sessions.trace == STANDARD_INPUT:
        raise refuse("--file", "- beside --trace -", "one of them to be standard input", "name a file for the other")
    sessions = asked_sessions(of_sessions)
    if not files and not deployment.given:
        raise refuse("--file", "nothing", "a manifest, or flags such as --chip mi300x", "name one with -f")
    asked = asked_for(files, deployment, WorkloadFlags())
    planned = make_plan(asked)
    if isinstance(planned.plan, Infeasible):
        problems = asked.problems(planned.plan.problems)
        is_text = output == "text"
        return _lines(refusal_text(problems)) if is_text else dumped(refusal_document(problems), output), 1
    progress = Progress("prompts replayed, at predicted, short and long times", num_begun(sessions))
    outcome = replay_on(planned, sessions, rows, progress)
    text = _lines(replay_text(outcome)) if output == "text" else dumped(replay_document(outcome), output)
    found = outcome.value.summary
    return text, 1 if found.cut_sessions or found.refused_turns or found.expired_turns else 0


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def replay_text(outcome: Outcome) -> Iterator[str]:
    """For a terminal: what binds, then load over time and times by turn, then what is not in the figures."""
    yield from _head(outcome)
    if not outcome.value.summary.turns:
        yield "no turn is served"
        return
    yield from _summary(outcome)
    yield ""
    yield f"over time, a row for each {outcome.row_s:,g} s"
    yield from _table(outcome.rows, outcome.service)
    yield ""
    yield from _turns_text(outcome.turns)
    yield ""
    yield from notes(outcome)


def _head(outcome: Outcome) -> Iterator[str]:
    plan = outcome.plan
    layout = "; ".join(f"{role} {_layout(outcome, role)}" for role in Role)
    yield f"{plan.architecture} on {plan.profile}: {plan.gpus} GPUs, {layout}"
    yield outcome.asked.text
    if outcome.asked.assumed:
        yield f"assumed, since not stated: {', '.join(outcome.asked.assumed)}"
    yield "predicted, not measured; in brackets: the whole replay with all times at the low and at the high end"
    yield from (f"warning: {warning}" for warning in warnings(outcome))


def _summary(outcome: Outcome) -> Iterator[str]:
    value, service = outcome.value.summary, outcome.service
    yield _row("binds", f"{value.binds}{_waits(value)}")
    yield _row("TTFT", _percentiles(*(outcome.banded(of, "ms") for of in _TTFT)))
    yield _row("TPOT", _percentiles(*(outcome.banded(of, "ms") for of in _TPOT)))
    yield _row("duration", f"{_banded(outcome.banded(lambda s: s.duration_s, 's'))} for {value.turns:,} turns")
    computed = f"computes {value.computed_tokens:,} of {value.prompt_tokens:,} prompt tokens"
    yield _row("prefill", f"{value.prefill_busy:.0%} busy; {computed}")
    again = _share(value.recomputed_tokens, value.computed_tokens)
    yield _row("recomputed", f"{value.recomputed_tokens:,} tokens that an earlier turn had: {again} of the computed")
    lanes, pages = _lanes(service), _lanes(service) * service.lane.num_pages
    held = f"{value.held_peak:,} of {lanes * service.lane.num_slots:,} state slots held at once"
    used = f"{value.pages_peak:,} of {pages:,} KV pages ({_share(value.pages_peak, pages)})"
    yield _row("decode, at most", f"{used}, {held}, on {lanes:,} lanes")
    yield from (_row(*cells) for cells in zip(("prefix cache", ""), _cache(outcome.cache, outcome.asked), strict=True))


def _lanes(service: Service) -> int:
    return service.lanes * service.groups


def _row(label: str, value: str) -> str:
    return f"  {label:<{LABEL_WIDTH}} {value}"


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
    return f"{groups} x {shape.nodes} nodes TP{shape.tensor_parallel} DP{shape.lanes} EP{shape.ranks}"


def _cache(cache: Retention, asked: AskedSessions) -> tuple[str, str]:
    share = _share(cache.wanted_pages, cache.num_pages)
    return (
        f"would want {cache.wanted_pages:,} of prefill's {cache.num_pages:,} pages ({share}) for prompts that return",
        f"{cache.evicted_turns:,} of {cache.returning_turns:,} returns would find theirs evicted; "
        f"reuse up to {cache.reuse:.0%}, replayed with {asked.reuse:.0%}",
    )


def warnings(outcome: Outcome) -> Iterator[str]:
    """The plan's warnings, and what the sessions asked for that they do not get."""
    yield from outcome.plan.warnings
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
            f"{value.refused_turns:,} of {value.turns:,} turns would be refused (429): {limits.max_queued:,} requests "
            "wait in their lane already (limits.maxQueued); add nodes, or begin fewer sessions at once"
        )
    if value.expired_turns:
        yield (
            f"{value.expired_turns:,} of {value.turns:,} turns would fail: prefill ends later than "
            f"{limits.reservation_s:,g} s after decode made room (timeouts.reservationSeconds); add nodes of prefill, "
            "or raise it"
        )
    if reuse > cache.reuse and cache.returning_turns:
        yield (
            f"reuse of {reuse:.1%} cannot be had: prefill's own pages keep {cache.reuse:.1%} of earlier contexts; "
            "lower --reuse, or cache prompts elsewhere"
        )


def notes(outcome: Outcome) -> Iterator[str]:
    """What the figures stand on, and what is not in them."""
    yield "reuse is as stated, the same for each turn; the bundled worker keeps no prefix cache, so it has 0 %"
    yield (
        "a turn waits for pages of its prompt and whole answer; a worker takes them as the answer grows, "
        "and preempts: not in here"
    )
    yield "binds: what turns wait for most; a wait for memory counts as what those that have memory wait for"
    yield "turns go to the decode lane with most room; lanes of a group step together; prompts take free lanes in order"
    if outcome.handoff is not None:
        yield f"the handoff is not in TTFT: {with_band(outcome.handoff)} for the longest prompt"
    state = bytes_text(outcome.plan.prefill.slot_bytes)
    yield f"each prompt of the prefix cache counts with its KDA state, {state} a rank; none is shared between sessions"
    yield f"decode calibrated on {outcome.decode_on}"
    yield f"prefill calibrated on {outcome.prefill_on}"


_COLUMNS = {
    "from s": 8,
    "compute tok/s": 13,
    "asked tok/s": 11,
    "prefill": 8,
    "held": 6,
    "pages, peak": 18,
    "wait": 5,
    "binds": 13,
}


def _table(rows: tuple[Row, ...], service: Service) -> Iterator[str]:
    yield " ".join(f"{head:>{width}}" for head, width in _COLUMNS.items())
    for row in rows:
        pages = f"{row.pages_peak:,} ({_share(row.pages_peak, _lanes(service) * service.lane.num_pages)})"
        yield (
            f"{row.start_s:>8,.0f} {row.computed_per_s:>13,.0f} {row.prompt_per_s:>11,.0f} {row.prefill_busy:>8.0%} "
            f"{row.held:>6.1f} {pages:>18} {row.waiting_peak:>5} {row.binds or '-':>13}"
        )


_TURN_COLUMNS = {"turn": 9, "served": 6, "prompt": 9, "computed": 9, "TTFT p50": 28, "TTFT p95": 28, "TPOT p50": 28}


def _turns_text(rows: tuple[BandedRow, ...]) -> Iterator[str]:
    yield "by turn, mean tokens"
    yield " ".join(f"{head:>{width}}" for head, width in _TURN_COLUMNS.items())
    for each in rows:
        row = each.row
        cells = (
            f"{row.first}" if row.first == row.last else f"{row.first}-{row.last}",
            f"{row.served:,}",
            f"{row.prompt_tokens:,.0f}",
            f"{row.computed_tokens:,.0f}",
            *map(_banded, (each.ttft_p50, each.ttft_p95, each.tpot_p50)),
        )
        yield " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _TURN_COLUMNS.values(), strict=True))


def replay_document(outcome: Outcome) -> dict[str, Any]:
    """For scripts: the figures of the text, unrounded. Times in the unit of their name, or with it beside them."""
    asked, service = outcome.asked, outcome.service
    lanes = _lanes(service)
    return {
        "feasible": True,
        "predicted": True,
        "measured": False,
        "deployment": dump(outcome.planned.deployment),
        "profile": outcome.plan.profile,
        "warnings": list(warnings(outcome)),
        "sessions": {
            "source": asked.source,
            "count": len(asked.sessions),
            "reuse": asked.reuse,
            "assumed": list(asked.assumed),
            **({"seed": asked.seed, **dataclasses.asdict(asked.agents)} if asked.agents else {}),
        },
        "service": {
            "lanes": lanes,
            "num_pages": lanes * service.lane.num_pages,
            "num_slots": lanes * service.lane.num_slots,
            "max_running": lanes * service.lane.max_running,
            "prefill_lanes": service.prefill_lanes,
            "lane": dataclasses.asdict(service.lane),
        },
        "summary": dataclasses.asdict(outcome.value.summary),
        "summary_low": dataclasses.asdict(outcome.fast.summary),
        "summary_high": dataclasses.asdict(outcome.slow.summary),
        **(_times(outcome) if outcome.value.summary.turns else dict.fromkeys(("ttft", "tpot", "duration"))),
        "row_s": outcome.row_s,
        "over_time": [dataclasses.asdict(row) for row in outcome.rows],
        "by_turn": [_turn_document(each) for each in outcome.turns],
        "prefix_cache": {**dataclasses.asdict(outcome.cache), "reuse": outcome.cache.reuse},
        "handoff": _plain(outcome.handoff),
        "calibrated_on": {"decode": outcome.decode_on, "prefill": outcome.prefill_on},
        "notes": list(notes(outcome)),
    }


def _times(outcome: Outcome) -> dict[str, Any]:
    return {
        "ttft": {name: _plain(outcome.banded(of, "ms")) for name, of in zip(("p50", "p95"), _TTFT, strict=True)},
        "tpot": {name: _plain(outcome.banded(of, "ms")) for name, of in zip(("p50", "p95"), _TPOT, strict=True)},
        "duration": _plain(outcome.banded(lambda s: s.duration_s, "s")),
    }


def _turn_document(each: BandedRow) -> dict[str, Any]:
    row = each.row
    return {
        "first": row.first,
        "last": row.last,
        "served": row.served,
        "prompt_tokens": row.prompt_tokens,
        "computed_tokens": row.computed_tokens,
        "ttft_p50": _plain(each.ttft_p50),
        "ttft_p95": _plain(each.ttft_p95),
        "tpot_p50": _plain(each.tpot_p50),
        "tpot_p95": _plain(each.tpot_p95),
    }


def _plain(prediction: Prediction | None) -> dict[str, Any] | None:
    if prediction is None:
        return None
    return {"value": prediction.value, "low": prediction.low, "high": prediction.high, "unit": prediction.unit}
