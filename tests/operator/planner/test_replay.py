"""The replay of agentic load against a simulation that scans everything at every step; its sums against sampling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.predict import Capacity, Side
from kimi_operator.planner.pressure import summarise, table, table_text
from kimi_operator.planner.replay import (
    Agents,
    Prompts,
    Replayed,
    Service,
    Session,
    Turn,
    draw,
    predicted_service,
    replay,
)
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad, Setup
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.measurements import built_in_measurements, calibration_for, worker_engine

AGENTS = Agents(
    sessions=12, turns=6, first_prompt_tokens=900, turn_tokens=250, output_tokens=60, think_s=4.0, ramp_s=10.0
)
ROOMY = Service(
    num_pages=10_000,
    page_size_tokens=64,
    max_running=64,
    prefill_lanes=16,
    prefill_s=lambda new, cached, busy: 0.1 + new / 900 * (1 + busy / 20) + cached / 90_000,
    decode_step_s=lambda held, context: 0.02 + held / 1000 + context / 1e6,
    reuse=0.9,
    max_context=100_000,
)
TIGHT = replace(ROOMY, num_pages=90, max_running=5, prefill_lanes=2, max_context=3000)
FEW = replace(ROOMY, max_running=3)


@dataclass
class Slow:
    """A session of the obvious simulation: where it is, and until when."""

    script: Session
    state: str = "away"
    until_s: float = 0.0
    turn: int = 0
    context: int = 0
    asked_s: float = 0.0
    admitted_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def now(self) -> Turn:
        return self.script.turns[self.turn]

    @property
    def whole(self) -> int:
        return self.context + self.now.new_tokens + self.now.output_tokens


def slow_replay(scripts: Sequence[Session], service: Service) -> tuple[list[tuple[float, ...]], int]:
    """Every step: scan for the earliest timed session, move it, then let in and start whoever may."""
    sessions = [Slow(script, until_s=script.start_s) for script in scripts]
    served, cut = [], 0

    def pages(s: Slow) -> int:
        return math.ceil(s.whole / service.page_size_tokens)

    def computed(s: Slow) -> int:
        return s.context + s.now.new_tokens - int(service.reuse * s.context)

    while timed := [s for s in sessions if s.state in ("away", "prefill", "decode")]:
        s = min(timed, key=lambda each: each.until_s)
        now_s = s.until_s
        if s.state == "away":
            if s.turn == len(s.script.turns):
                s.state = "gone"
            elif s.whole > service.max_context or pages(s) > service.num_pages:
                s.state, cut = "gone", cut + 1
            else:
                s.state, s.asked_s = "wants memory", now_s
        elif s.state == "prefill":
            s.state, s.decode_s = "decode", now_s
            held = sum(each.state in ("wants lane", "prefill", "decode") for each in sessions)
            middle = s.context + s.now.new_tokens + s.now.output_tokens // 2
            s.until_s = now_s + s.now.output_tokens * service.decode_step_s(held, middle)
        else:
            times = (s.asked_s, s.admitted_s, s.prefill_s, s.decode_s, now_s)
            served.append((*times, s.context + s.now.new_tokens, computed(s), pages(s)))
            s.context, s.until_s = s.whole, now_s + s.now.think_s
            s.state, s.turn = "away", s.turn + 1
        for waiting in sorted((x for x in sessions if x.state == "wants memory"), key=lambda x: x.asked_s):
            inside = [x for x in sessions if x.state in ("wants lane", "prefill", "decode")]
            if len(inside) == service.max_running or sum(map(pages, [*inside, waiting])) > service.num_pages:
                break
            waiting.state, waiting.admitted_s = "wants lane", now_s
        for waiting in sorted(
            (x for x in sessions if x.state == "wants lane"), key=lambda x: (x.admitted_s, x.asked_s)
        ):
            busy = sum(x.state == "prefill" for x in sessions)
            if busy == service.prefill_lanes:
                break
            waiting.state, waiting.prefill_s = "prefill", now_s
            new = computed(waiting)
            cached = waiting.context + waiting.now.new_tokens - new
            waiting.until_s = now_s + service.prefill_s(new, cached, busy + 1)
    return sorted(served), cut


def as_rows(replayed: Replayed) -> list[tuple[float, ...]]:
    return sorted(
        (t.asked_s, t.admitted_s, t.prefill_s, t.decode_s, t.end_s, t.prompt_tokens, t.computed_tokens, t.pages)
        for t in replayed.turns
    )


@pytest.mark.parametrize("service", [ROOMY, TIGHT, FEW], ids=["roomy", "tight", "few"])
@pytest.mark.parametrize("seed", range(12))
def test_replay_agrees_with_the_simulation_that_scans(seed: int, service: Service) -> None:
    sessions = draw(AGENTS, seed)
    replayed = replay(sessions, service)
    expected, cut = slow_replay(sessions, service)
    assert replayed.cut_sessions == cut
    assert len(replayed.turns) == len(expected)
    for got, want in zip(as_rows(replayed), expected, strict=True):
        assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_ever_overdrawn_and_every_turn_is_served_or_cut(seed: int) -> None:
    sessions = draw(AGENTS, seed)
    replayed = replay(sessions, TIGHT)
    for moment_s in [turn.admitted_s for turn in replayed.turns] + [turn.prefill_s for turn in replayed.turns]:
        holding = [t for t in replayed.turns if t.admitted_s <= moment_s < t.end_s]
        assert sum(t.pages for t in holding) <= TIGHT.num_pages
        assert len(holding) <= TIGHT.max_running
        assert sum(t.prefill_s <= moment_s < t.decode_s for t in replayed.turns) <= TIGHT.prefill_lanes
    for index in range(AGENTS.sessions):
        own = [t for t in replayed.turns if t.session == index]
        assert all(earlier.end_s <= later.asked_s for earlier, later in itertools.pairwise(own))
        assert all(t.asked_s <= t.admitted_s <= t.prefill_s < t.decode_s < t.end_s for t in own)


def test_the_tight_service_cuts_some() -> None:
    """The walks above would prove little if none ran out of context."""
    assert sum(replay(draw(AGENTS, seed), TIGHT).cut_sessions for seed in range(6)) > 0


def test_the_table_agrees_with_sampling_every_moment() -> None:
    replayed = replay(draw(AGENTS, 3), TIGHT)
    rows = table(replayed, TIGHT, row_s=5.0)
    step_s = 0.005
    for row in rows[2:6]:
        moments = [row.start_s + (i + 0.5) * step_s for i in range(round(5.0 / step_s))]
        holding = [[t for t in replayed.turns if t.admitted_s <= at < t.end_s] for at in moments]
        pages = [sum(t.pages for t in now) for now in holding]
        waiting = [sum(t.asked_s <= at < t.prefill_s for t in replayed.turns) for at in moments]
        busy = [sum(t.prefill_s <= at < t.decode_s for t in replayed.turns) for at in moments]
        assert row.held == pytest.approx(sum(map(len, holding)) / len(moments), abs=0.02)
        assert row.prefill_busy == pytest.approx(sum(busy) / len(moments) / TIGHT.prefill_lanes, abs=0.01)
        # sampling can miss a peak that is shorter than its step, never exceed it
        assert max(pages) <= row.pages_peak <= max(pages) + 30
        assert max(waiting) <= row.waiting_peak <= max(waiting) + 1


def test_the_rows_add_up_to_the_whole() -> None:
    replayed = replay(draw(AGENTS, 5), TIGHT)
    rows, summary = table(replayed, TIGHT, row_s=4.0), summarise(replayed, TIGHT)
    assert sum(row.computed_per_s for row in rows) * 4.0 == pytest.approx(summary.computed_tokens)
    assert sum(row.prompt_per_s for row in rows) * 4.0 == pytest.approx(summary.prompt_tokens)
    assert max(row.pages_peak for row in rows) == summary.pages_peak
    held_s = sum(turn.end_s - turn.admitted_s for turn in replayed.turns)
    assert sum(row.held for row in rows) * 4.0 == pytest.approx(held_s)
    busy_s = summary.prefill_busy * summary.duration_s
    assert sum(row.prefill_busy for row in rows) * 4.0 == pytest.approx(busy_s)


def test_reuse_spares_prefill_and_nothing_else() -> None:
    sessions = draw(AGENTS, 1)
    none, most, all_of_it = (replay(sessions, replace(ROOMY, reuse=share)) for share in (0.0, 0.9, 1.0))
    prompts = [sum(t.prompt_tokens for t in run.turns) for run in (none, most, all_of_it)]
    assert len(set(prompts)) == 1
    computed = [sum(t.computed_tokens for t in run.turns) for run in (none, most, all_of_it)]
    assert computed[0] == prompts[0]
    assert computed[2] == sum(turn.new_tokens for session in sessions for turn in session.turns)
    assert computed[0] > computed[1] > computed[2]


def test_context_grows_by_what_was_asked_and_answered() -> None:
    sessions = (Session(0.0, (Turn(100, 10, 1.0), Turn(50, 20, 1.0), Turn(7, 3, 1.0))),)
    turns = replay(sessions, replace(ROOMY, reuse=0.5)).turns
    assert [t.prompt_tokens for t in turns] == [100, 160, 187]
    assert [t.computed_tokens for t in turns] == [100, 160 - 55, 187 - 90]
    assert [t.pages for t in turns] == [2, 3, 3]


@pytest.mark.parametrize(
    ("service", "named"),
    [
        (ROOMY, "nothing"),
        (replace(ROOMY, prefill_lanes=1), "prefill lanes (1 in all)"),
        (replace(ROOMY, max_running=2), "maxNumSeqs (2 in all)"),
        (replace(ROOMY, num_pages=60), "KV pages (60 in all)"),
    ],
)
def test_the_summary_names_what_bound(service: Service, named: str) -> None:
    summary = summarise(replay(draw(AGENTS, 2), service), service)
    assert summary.binds.startswith(named)
    assert summary.ttft_p50_s <= summary.ttft_p95_s


def test_one_seed_gives_the_same_sessions_and_another_others() -> None:
    assert draw(AGENTS, 7) == draw(AGENTS, 7) != draw(AGENTS, 8)


def test_lengths_and_thinking_have_the_means_that_were_asked_for() -> None:
    many = replace(AGENTS, sessions=400, turns=20)
    sessions = draw(many, 0)
    later = [turn for session in sessions for turn in session.turns[1:]]
    assert all(session.turns[0].new_tokens == many.first_prompt_tokens for session in sessions)
    # an exponential's standard error over 7600 draws is 1.1 % of its mean
    assert sum(t.new_tokens for t in later) / len(later) == pytest.approx(many.turn_tokens, rel=0.05)
    assert sum(t.think_s for t in later) / len(later) == pytest.approx(many.think_s, rel=0.05)
    assert [session.start_s for session in sessions[:2]] == [0.0, many.ramp_s / many.sessions]


def test_nothing_served_is_no_error() -> None:
    small = replace(ROOMY, max_context=10)
    replayed = replay(draw(AGENTS, 0), small)
    assert replayed == Replayed((), AGENTS.sessions)
    assert table(replayed, small, 1.0) == ()
    assert summarise(replayed, small).turns == 0


@pytest.mark.parametrize("name", ["sessions", "turns", "first_prompt_tokens", "turn_tokens", "output_tokens"])
def test_less_than_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        draw(replace(AGENTS, **{name: 0}), 0)


@pytest.mark.parametrize("change", [{"num_pages": 0}, {"prefill_lanes": 0}, {"max_running": 0}, {"reuse": 1.5}])
def test_a_service_that_serves_nobody_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|reuse: got 1\.5"):
        replay((), replace(ROOMY, **change))


@pytest.mark.parametrize("row_s", [0.0, 1e-6])
def test_a_table_without_end_is_refused(row_s: float) -> None:
    with pytest.raises(ValueError, match="row_s: got"):
        table(replay(draw(AGENTS, 0), ROOMY), ROOMY, row_s)


def test_negative_thinking_is_refused() -> None:
    with pytest.raises(ValueError, match="think_s: got -1"):
        draw(replace(AGENTS, think_s=-1.0), 0)


def test_the_text_has_a_line_for_each_row_under_one_head() -> None:
    replayed = replay(draw(AGENTS, 4), ROOMY)
    lines = list(table_text(table(replayed, ROOMY, 10.0), ROOMY))
    assert len(lines) == 1 + len(table(replayed, ROOMY, 10.0))
    assert len({len(line) for line in lines}) == 1


K3_AGENTS = Agents(
    sessions=48, turns=12, first_prompt_tokens=12_000, turn_tokens=3000, output_tokens=400, think_s=15.0, ramp_s=120.0
)


def k3_service(reuse: float, num_pages: int = 15_000) -> Service:
    """Two nodes of MI300X a role, with the published factors."""
    profile, found = built_in_profiles()["mi300x"], built_in_measurements()
    setup = Setup(architecture("kimi-k3"), found.chip(profile), GroupShape(2, 8, 2), worker_engine(profile))
    decode, prefill = (Side(setup, calibration_for(setup, phase, None)) for phase in (DecodeLoad, PrefillLoad))
    room = Capacity(max_num_seqs=32, num_pages=num_pages, page_size_tokens=64)
    return predicted_service(decode, prefill, room, Prompts(reuse, max_context=900_000))


def test_memory_that_waits_for_a_lane_is_a_wait_for_lanes() -> None:
    """One lane, a second a prompt, and room for two: by hand, pages are asked for in vain because the lane is slow."""
    slow = replace(
        ROOMY, num_pages=2, prefill_lanes=1, prefill_s=lambda *_: 1.0, decode_step_s=lambda *_: 0.001, max_context=64
    )
    sessions = tuple(Session(0.0, (Turn(50, 10, 0.0),)) for _ in range(4))
    replayed = replay(sessions, slow)
    # two are let in at 0 s; each that ends, at 1.01 s and 2.01 s, lets in another, which waits for the lane until 2 s
    # and 3 s: for memory 1.01 + 2.01 = 3.02 s are waited in all, for the lane 1 + 0.99 + 0.99 = 2.98 s
    assert sum(turn.admitted_s - turn.asked_s for turn in replayed.turns) == pytest.approx(3.02)
    assert sum(turn.prefill_s - turn.admitted_s for turn in replayed.turns) == pytest.approx(2.98)
    # of a page's time 2.98 s of 2.98 + 4 x 1.01 s = 42 % are for the lane: 2.98 + 0.42 x 3.02 > 0.58 x 3.02
    assert summarise(replayed, slow).binds == "prefill lanes (1 in all)"
    # answers of five seconds hold the pages themselves: let in at 0, 0, 6 and 7 s, lane free at once but for one
    decoding = replace(slow, decode_step_s=lambda *_: 0.5)
    assert summarise(replay(sessions, decoding), decoding).binds == "KV pages (2 in all)"


def test_a_predicted_service_serves_as_its_predictions_say() -> None:
    service = k3_service(reuse=0.9)
    assert (service.num_pages, service.max_running, service.prefill_lanes) == (120_000, 256, 8)
    alone = replay((Session(0.0, (Turn(20_000, 100, 0.0),)),), service).turns[0]
    assert alone.decode_s - alone.prefill_s == pytest.approx(service.prefill_s(20_000, 0, 1))
    assert alone.end_s - alone.decode_s == pytest.approx(100 * service.decode_step_s(1, 20_050))
    # published: 20,000 tokens took vLLM 10.5 s, which this worker's attention in float32 makes longer; a token 82 ms
    assert 10.5 < alone.decode_s < 1.5 * 10.5
    assert (alone.end_s - alone.decode_s) / 100 == pytest.approx(0.082, rel=0.25)


def test_agents_without_reuse_swamp_prefill_that_serves_them_well_with_it() -> None:
    sessions = draw(K3_AGENTS, 0)
    runs = {share: summarise(replay(sessions, k3_service(share)), k3_service(share)) for share in (0.0, 0.9)}
    assert runs[0.0].binds == "prefill lanes (8 in all)"
    swamped = k3_service(reuse=0.0)
    assert max(row.prefill_busy for row in table(replay(sessions, swamped), swamped, 60.0)) > 0.95
    assert swamped.prefill_s(20_000, 0, 8) > 1.2 * swamped.prefill_s(20_000, 0, 1), "lanes share the experts' ranks"
    assert runs[0.9].ttft_p95_s < 0.5 * runs[0.0].ttft_p95_s
    assert runs[0.9].computed_tokens < 0.4 * runs[0.0].computed_tokens


def test_a_small_pool_makes_agents_wait_for_pages() -> None:
    service = k3_service(reuse=0.9, num_pages=1000)
    summary = summarise(replay(draw(K3_AGENTS, 0), service), service)
    assert summary.binds == "KV pages (8,000 in all)"
    assert summary.pages_peak > 0.9 * service.num_pages
