"""A replay of sessions on a planned deployment, at predicted times and at both ends of their bands. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.cli.manifests import Planned
from kimi_operator.cli.outlook import shape_of
from kimi_operator.cli.sessions import AskedSessions
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Plan
from kimi_operator.planner.predict import Prediction, Side, decode_step_ms, handoff_ms, prefill_ms
from kimi_operator.planner.pressure import Row, Summary, share_within, summarise, table, tpots_s, ttfts_s
from kimi_operator.planner.replay import replay
from kimi_operator.planner.retention import Retention, retention
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad
from kimi_operator.planner.served import Replayed, Served
from kimi_operator.planner.service import Chunk, Lane, Service, paced, predicted_service
from kimi_operator.planner.turns import TurnRow, by_turn
from kimi_operator.planner.units import ceil_div
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles.forecast import forecast_of

_ROW_SECONDS = (1, 2, 5, 10, 15, 20, 30, 60, 120, 180, 240, 300, 600, 900, 1200, 1800, 2400, 3600)


class Run(Struct, frozen=True):
    """One replay and what it comes to."""

    replayed: Replayed
    summary: Summary
    turns: tuple[TurnRow, ...]


class BandedRow(Struct, frozen=True):
    """Times of some turns with their bands; None as in the row."""

    row: TurnRow
    ttft_p50: Prediction | None
    ttft_p95: Prediction | None
    tpot_p50: Prediction | None
    tpot_p95: Prediction | None


class Met(Struct, frozen=True):
    """Share of turns that meet a target, and the least and most of the three runs."""

    name: str
    """TTFT or TPOT."""
    target_s: float
    share: float
    low: float
    high: float


class Outcome(Struct, frozen=True):
    """Everything that is said about a replay."""

    planned: Planned
    plan: Plan
    asked: AskedSessions
    service: Service
    value: Run
    fast: Run
    """With every time at the low end of its band; `slow` at the high end."""
    slow: Run
    decode_on: str
    """What the times of decode are calibrated on."""
    prefill_on: str
    row_s: float
    rows: tuple[Row, ...]
    turns: tuple[BandedRow, ...]
    cache: Retention
    """Prefill's own pool as a prefix cache, at the times of `value`."""
    handoff: Prediction | None
    """Of the longest prompt; None where nobody stated the bandwidth of the card, or nothing was served."""

    def banded(self, of: Callable[[Summary], float | None], unit: str) -> Prediction | None:
        """A time of the summary, in ms or s, with its band; None where it has none."""
        return _banded([of(run.summary) for run in self.runs], unit)

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        """At predicted times, at the low and at the high end."""
        return self.value, self.fast, self.slow

    @property
    def targets(self) -> tuple[Met, ...]:
        """The manifest's targets, where it states some and turns have such a time."""
        manifest = self.asked.manifest
        found = []
        for name, target_s, times in (("TTFT", manifest.ttft_s, ttfts_s), ("TPOT", manifest.tpot_s, tpots_s)):
            if target_s is None:
                continue
            shares = [share_within(times(run.replayed.turns), target_s) for run in self.runs]
            known = [share for share in shares if share is not None]
            if known:
                found.append(Met(name, target_s, known[0], min(known), max(known)))
        return tuple(found)


def replay_on(
    planned: Planned, asked: AskedSessions, max_rows: int, ended: Callable[[], None] = lambda: None
) -> Outcome:
    """Replay; `ended` is called as each of `num_turns` turns ends.

    Raises InvalidSpec when the chip's figures do not suffice for predictions, or no session can begin.
    """
    plan = planned.plan
    assert isinstance(plan, Plan), "what does not fit replays nothing"
    _check_first(asked, plan.decode.max_model_len)
    sides = sides_of(planned)
    decode, prefill = sides[Role.DECODE], sides[Role.PREFILL]
    chunk_tokens = planned.profile.spec.limits.prefill_batched_tokens
    chunk = Chunk(chunk_tokens, plan.prefill.max_num_seqs)
    service = predicted_service(decode, prefill, _lane(planned, plan), chunk, asked.reuse)
    value = _run(asked, service, max_rows, ended)
    of_prefill, of_decode = paces(value.replayed.turns, service, sides, chunk_tokens)
    fast = _run(asked, paced(service, of_prefill.low, of_decode.low), max_rows, ended)
    slow = _run(asked, paced(service, of_prefill.high, of_decode.high), max_rows, ended)
    row_s = _row_s(value.summary.duration_s, max_rows)
    pool = plan.prefill.num_pages * service.all_prefill_lanes
    state_pages = ceil_div(plan.prefill.slot_bytes, plan.prefill.page_bytes)
    return Outcome(
        planned=planned,
        plan=plan,
        asked=asked,
        service=service,
        value=value,
        fast=fast,
        slow=slow,
        decode_on=decode.calibration.text,
        prefill_on=prefill.calibration.text,
        row_s=row_s,
        rows=table(value.replayed, service, row_s),
        turns=tuple(_banded_rows(zip(value.turns, fast.turns, slow.turns, strict=True))),
        cache=retention(value.replayed.turns, pool, plan.prefill.page_size_tokens, state_pages),
        handoff=_handoff(value.replayed.turns, prefill),
    )


def num_turns(asked: AskedSessions) -> int:
    """Turns of all three runs, if no session ends early."""
    return 3 * sum(len(session.turns) for session in asked.sessions)


def _lane(planned: Planned, plan: Plan) -> Lane:
    spec = planned.profile.spec
    return Lane(
        num_pages=plan.decode.num_pages,
        page_size_tokens=plan.decode.page_size_tokens,
        num_slots=plan.decode.num_state_slots,
        max_running=plan.decode.max_num_seqs,
        max_context=plan.decode.max_model_len,
        max_queued=spec.limits.max_queued,
        reservation_s=spec.timeouts.reservation_seconds,
    )


def _check_first(asked: AskedSessions, max_context: int) -> None:
    """Raises InvalidSpec when some session cannot even begin: its prompt and a token are longer than maxModelLen."""
    longest = asked.longest_first
    if asked.first_field is not None and longest >= max_context:
        expected = f"less than {max_context:,} tokens, the deployment's longest request"
        raise InvalidSpec(
            (Problem(asked.first_field, f"{longest:,}", expected, "shorten it, or plan a larger maxModelLen"),)
        )


def sides_of(planned: Planned) -> dict[Role, Side]:
    """Both roles with their calibrations. Raises InvalidSpec as `forecast_of`."""
    plan = planned.plan
    assert isinstance(plan, Plan)
    # The workload of a forecast matters only to searches.
    forecast = forecast_of(planned.architecture, planned.profile, plan.kv_cache_dtype, Workload(fixed(1), fixed(1)))

    def side(role: Role) -> Side:
        calibration = forecast.decode if role is Role.DECODE else forecast.prefill
        setup = forecast.setup(shape_of(planned, role))
        return Side(setup, calibration, planned.deployment.spec.role(role).groups)

    return {role: side(role) for role in Role}


def _run(asked: AskedSessions, service: Service, max_rows: int, ended: Callable[[], None]) -> Run:
    replayed = replay(asked.sessions, service, ended)
    return Run(replayed, summarise(replayed, service), by_turn(replayed.turns, asked.num_turns, max_rows))


class Pace(Struct, frozen=True):
    """How many times as long a phase may take, at both ends of its band."""

    low: float
    high: float


def paces(turns: tuple[Served, ...], service: Service, sides: dict[Role, Side], chunk_tokens: int) -> tuple[Pace, Pace]:
    """Of prefill and decode: the widest bands among the turns with the least and the most work, alone and crowded.

    Between alone and crowded they may be wider than at either, where experts take the largest part.
    """
    if not turns:
        return Pace(1.0, 1.0), Pace(1.0, 1.0)
    decode, prefill = sides[Role.DECODE], sides[Role.PREFILL]
    works = [(turn.computed_tokens, turn.prompt_tokens - turn.computed_tokens) for turn in turns]
    # the last is twice the mean number of tokens that one attends to
    parts = (itemgetter(0), itemgetter(1), lambda work: work[0] + 2 * work[1])
    ends = {pick(works, key=part) for pick in (min, max) for part in parts}
    prompts = [PrefillLoad(*work, chunk_tokens, lanes) for work in ends for lanes in _crowds(prefill.setup.shape.lanes)]
    contexts = [pick(turn.prompt_tokens for turn in turns) for pick in (min, max)]
    crowd = ceil_div(len({turn.session for turn in turns}), decode.groups)
    most = min(crowd, service.lane.max_running * service.lanes)
    steps = [DecodeLoad(decoding, context) for context in contexts for decoding in _crowds(most)]
    return (
        _widest(prefill_ms(prefill.setup, load, prefill.calibration) for load in prompts),
        _widest(decode_step_ms(decode.setup, load, decode.calibration) for load in steps),
    )


def _crowds(most: int) -> Iterator[int]:
    """Of one, of all, and each twice as many as the one before."""
    yield from (2**i for i in range((most - 1).bit_length()))
    yield most


def _widest(predictions: Iterable[Prediction]) -> Pace:
    ratios = [(p.low / p.value, p.high / p.value) for p in predictions]
    return Pace(min(low for low, _ in ratios), max(high for _, high in ratios))


def _row_s(duration_s: float, max_rows: int) -> float:
    """Length of a row, so that there are `max_rows` at most: a round number of seconds, or of hours."""
    least = max(duration_s / max_rows, 1.0)
    return next((seconds for seconds in _ROW_SECONDS if seconds >= least), 3600 * math.ceil(least / 3600))


def _banded_rows(runs: Iterable[tuple[TurnRow, TurnRow, TurnRow]]) -> Iterable[BandedRow]:
    for rows in runs:
        yield BandedRow(
            row=rows[0],
            ttft_p50=_banded([row.ttft_p50_s for row in rows], "ms"),
            ttft_p95=_banded([row.ttft_p95_s for row in rows], "ms"),
            tpot_p50=_banded([row.tpot_p50_s for row in rows], "ms"),
            tpot_p95=_banded([row.tpot_p95_s for row in rows], "ms"),
        )


def _banded(seconds: Iterable[float | None], unit: str) -> Prediction | None:
    """The first of the runs with the least and the most of all; the same turns have a time in each of them."""
    scale = 1e3 if unit == "ms" else 1.0
    found = [scale * each for each in seconds if each is not None]
    return Prediction(found[0], min(found), max(found), unit, "") if found else None


def _handoff(turns: tuple[Served, ...], prefill: Side) -> Prediction | None:
    try:
        return handoff_ms(prefill.setup, max(turn.prompt_tokens for turn in turns)) if turns else None
    except ValueError:
        return None
