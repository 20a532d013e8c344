"""The replay of agentic load by hand, its sums against sampling, and on a predicted service."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from kimi_operator.planner.agents import Agents, Session, Turn, draw
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.predict import Side, prefill_ms
from kimi_operator.planner.pressure import summarise, table
from kimi_operator.planner.replay import replay
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad, Setup
from kimi_operator.planner.served import Served
from kimi_operator.planner.service import Chunk, Service, predicted_service
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.measurements import built_in_measurements, calibration_for, worker_engine
from msgspec.structs import replace
from replay_services import FLAT, TIGHT, changed

AGENTS = Agents(
    sessions=12, turns=6, first_prompt_tokens=900, turn_tokens=250, output_tokens=60, think_s=4.0, ramp_s=10.0
)


# by hand


def at_once(service: Service, *turns: tuple[int, int]) -> tuple[Served, ...]:
    """One turn of so many tokens asked and answered for each session, all at 0 s."""
    return replay([Session(0.0, (Turn(new, output, 0.0),)) for new, output in turns], service).turns


def test_only_those_that_decode_make_a_step_longer() -> None:
    """One prefill lane: each answer of 5 tokens, 4 steps, is over before the next prompt is computed."""
    turns = at_once(changed(FLAT, prefill_groups=1), *[(50, 5)] * 8)
    assert [t.first_s for t in turns] == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8])
    assert [t.end_s - t.first_s for t in turns] == pytest.approx([0.4] * 8), "eight hold memory, one decodes"


def test_places_of_the_batch_are_taken_after_prefill() -> None:
    """Two slots, one of them to run: both prompts are computed at once, and the second waits for the first's end."""
    turns = at_once(changed(FLAT, lanes=1, num_slots=2, max_running=1), (50, 6), (50, 6), (50, 6))
    assert [t.admitted_s for t in turns] == pytest.approx([0, 0, 1.5])
    assert [t.first_s for t in turns] == pytest.approx([1, 1, 2.5])
    # five steps each of 0.1 s, one after the other; the third is ready when the second has gone
    assert [t.running_s for t in turns] == pytest.approx([1, 1.5, 2.5])
    assert [t.end_s for t in turns] == pytest.approx([1.5, 2, 3])


def test_a_request_fits_a_lane_or_none() -> None:
    """Two lanes of 10 pages. Requests of 6 pages: one a lane, though 20 pages in all would hold three."""
    turns = at_once(changed(FLAT, num_pages=10), *[(6 * 64 - 11, 11)] * 3)
    assert [t.lane for t in turns] == [0, 1, 0]
    # ten steps; while two decode, a step takes 0.2 s
    assert [t.admitted_s for t in turns] == pytest.approx([0, 0, 3])
    cut = replay([Session(0.0, (Turn(11 * 64, 1, 0.0),))], changed(FLAT, num_pages=10))
    assert (cut.turns, cut.cut_sessions) == ((), 1), "it would fit both lanes together"


def test_a_lane_with_more_pages_is_taken_of_those_with_equally_many_requests() -> None:
    turns = at_once(FLAT, (6400, 9), (64, 9), (64, 9), (64, 9))
    assert [t.lane for t in turns] == [0, 1, 1, 0], "the third finds one request and most pages on lane 1"


def test_a_batch_steps_together_at_its_mean_context() -> None:
    """A context of 100 and one of 9,900: for both a step takes what 5,000 take, and what each takes alone is alone."""
    service = changed(FLAT, decode_step_s=lambda decoding, context: context / 1e4)
    short, long = at_once(service, (99, 2), (9899, 2))
    assert short.end_s - short.first_s == long.end_s - long.first_s == pytest.approx(0.5)
    # four steps at contexts of 100, 101, 102 and 103
    (alone,) = at_once(service, (99, 5))
    assert alone.end_s - alone.first_s == pytest.approx(0.0406)


def test_a_request_joins_between_two_steps() -> None:
    """Steps of 0.1 s begin at 1 s. A prompt that is computed at 1.25 s joins at 1.3 s; steps take 0.2 s then."""
    sessions = [Session(0.0, (Turn(50, 11, 0.0),)), Session(0.25, (Turn(50, 3, 0.0),))]
    first, second = replay(sessions, changed(FLAT)).turns
    assert (second.first_s, second.running_s) == pytest.approx((1.25, 1.3))
    assert second.end_s == pytest.approx(1.3 + 2 * 0.2)
    assert first.end_s == pytest.approx(1 + 3 * 0.1 + 2 * 0.2 + 5 * 0.1)


def test_prefill_gives_the_first_token() -> None:
    """An answer of one token takes no step, and has no TPOT; one of six tokens takes five."""
    one, six = at_once(FLAT, (50, 1), (50, 6))
    assert (one.end_s, one.running_s) == (one.first_s, one.first_s)
    assert six.end_s - six.first_s == pytest.approx(0.5)
    summary = summarise(replay([Session(0.0, (Turn(50, 1, 0.0), Turn(5, 1, 0.0)))], FLAT), FLAT)
    assert (summary.tpot_p50_s, summary.tpot_p95_s, summary.ttft_p50_s) == (None, None, 1.0)


@pytest.mark.parametrize(
    ("changes", "waited", "binds"),
    [
        # lane 0 takes what is asked at 0 s; each answer takes 10 steps of 0.1 s for each that decodes
        ({}, {}, "nothing: no request waited"),
        # the second and third wait 1 and 2 s for the lane
        ({"prefill_groups": 1}, {"prefill lanes": 3.0}, "prefill lanes (1 in all)"),
        # one at a time runs: computed at 1 s, the others wait 1 and 2 s
        ({"max_running": 1}, {"maxNumSeqs": 3.0}, "maxNumSeqs (1 a lane)"),
        # two let in decode from 1 s to 3 s, which is the third's wait
        ({"num_slots": 2}, {"state slots": 3.0}, "state slots (2 a lane)"),
        ({"num_pages": 2}, {"KV pages": 3.0}, "KV pages (2 a lane)"),
        # two slots, one to run: the third wants a slot, but from 1 s to 2 s the second has one and waits to run, as the
        # third would: that second counts twice
        ({"num_slots": 2, "max_running": 1}, {"state slots": 1.0, "maxNumSeqs": 2.0}, "maxNumSeqs (1 a lane)"),
        # one lane of prefill, two slots: until 1 s the second waits for the lane, and so in effect does the third;
        # from 1 s to 2 s the lane is busy, nobody waits for it, and slots are what the third is short of
        ({"num_slots": 2, "prefill_groups": 1}, {"prefill lanes": 2.0, "state slots": 1.0}, "prefill lanes (1 in all)"),
    ],
    ids=range(7),
)  # fmt: skip
def test_waiting_is_counted_by_its_cause(changes: dict[str, Any], waited: dict[str, float], binds: str) -> None:
    service = changed(FLAT, lanes=1, **changes)
    summary = summarise(replay([Session(0.0, (Turn(50, 11, 0.0),))] * 3, service), service)
    assert {cause: seconds for cause, seconds in summary.waited_s.items() if seconds} == pytest.approx(waited)
    assert summary.binds == binds


def test_what_a_worker_would_refuse_or_let_fail_is_counted() -> None:
    """A slot, a queue of two, 1.5 s a prompt: the first has the slot, two wait, two would be refused."""
    service = changed(FLAT, lanes=1, num_slots=1, max_running=1, max_queued=2, prefill_step_s=lambda *_: 1.5)
    found = summarise(replay([Session(0.0, (Turn(50, 2, 0.0),))] * 5, service), service)
    assert (found.refused_turns, found.expired_turns) == (2, 0)
    # with a second slot the second prompt waits a lane's 1.5 s with its memory, and takes 1.5 s: 3 s after it took it
    hasty = changed(service, num_slots=2, prefill_groups=1, reservation_s=2.9)
    assert summarise(replay([Session(0.0, (Turn(50, 2, 0.0),))] * 2, hasty), hasty).expired_turns == 1
    patient = changed(hasty, reservation_s=3.1)
    assert summarise(replay([Session(0.0, (Turn(50, 2, 0.0),))] * 2, patient), patient).expired_turns == 0


# sums


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_ever_overdrawn_and_every_turn_is_served_or_cut(seed: int) -> None:
    sessions = draw(AGENTS, seed)
    replayed = replay(sessions, TIGHT)
    for moment_s in (at for turn in replayed.turns for at in (turn.admitted_s, turn.prefill_s, turn.running_s)):
        for lane in range(TIGHT.lanes):
            holding = [t for t in replayed.turns if t.lane == lane and t.admitted_s <= moment_s < t.end_s]
            assert sum(t.pages for t in holding) <= TIGHT.lane.num_pages
            assert len(holding) <= TIGHT.lane.num_slots
            assert sum(t.running_s <= moment_s for t in holding if t.running_s) <= TIGHT.lane.max_running
        computing = Counter(t.prefill_lane for t in replayed.turns if t.prefill_s <= moment_s < t.first_s)
        assert len(computing) <= TIGHT.all_prefill_lanes
        assert max(computing.values(), default=0) <= TIGHT.prefill_running
    for index in range(AGENTS.sessions):
        own = [t for t in replayed.turns if t.session == index]
        assert all(earlier.end_s <= later.asked_s for earlier, later in itertools.pairwise(own))
        assert all(t.asked_s <= t.admitted_s <= t.prefill_s < t.first_s <= t.running_s <= t.end_s for t in own)


def test_the_tight_service_cuts_some() -> None:
    """The walks above would prove little if none ran out of context."""
    assert sum(replay(draw(AGENTS, seed), TIGHT).cut_sessions for seed in range(6)) > 0


def num_waiting(turns: Sequence[Served], moment_s: float) -> int:
    """For memory, or in a lane of prefill behind another prompt; who is first waits for the end of a step at most."""
    found = sum(t.asked_s <= moment_s < t.admitted_s for t in turns)
    queued = Counter(t.prefill_lane for t in turns if t.admitted_s <= moment_s < t.first_s)
    computing = Counter(t.prefill_lane for t in turns if t.prefill_s <= moment_s < t.first_s)
    return found + sum(length - max(1, computing[lane]) for lane, length in queued.items())


def test_the_table_agrees_with_sampling_every_moment() -> None:
    replayed = replay(draw(AGENTS, 3), TIGHT)
    rows = table(replayed, TIGHT, row_s=5.0)
    step_s = 0.005
    for row in rows[2:6]:
        moments = [row.start_s + (i + 0.5) * step_s for i in range(round(5.0 / step_s))]
        holding = [[t for t in replayed.turns if t.admitted_s <= at < t.end_s] for at in moments]
        pages = [sum(t.pages for t in now) for now in holding]
        waiting = [num_waiting(replayed.turns, at) for at in moments]
        busy = [len({t.prefill_lane for t in replayed.turns if t.prefill_s <= at < t.first_s}) for at in moments]
        assert row.held == pytest.approx(sum(map(len, holding)) / len(moments), abs=0.02)
        assert row.prefill_busy == pytest.approx(sum(busy) / len(moments) / TIGHT.all_prefill_lanes, abs=0.01)
        # sampling can miss a peak that is shorter than its step, never exceed it
        assert max(pages) <= row.pages_peak <= max(pages) + 30
        assert max(waiting) <= row.waiting_peak <= max(waiting) + 1


def total(rates: Sequence[float], lengths: Sequence[float]) -> float:
    return sum(rate * seconds for rate, seconds in zip(rates, lengths, strict=True))


def test_the_rows_add_up_to_the_whole() -> None:
    replayed = replay(draw(AGENTS, 5), TIGHT)
    rows, summary = table(replayed, TIGHT, row_s=4.0), summarise(replayed, TIGHT)
    lengths = [min(4.0, summary.duration_s - row.start_s) for row in rows]
    assert total([row.computed_per_s for row in rows], lengths) == pytest.approx(summary.computed_tokens)
    assert total([row.prompt_per_s for row in rows], lengths) == pytest.approx(summary.prompt_tokens)
    assert max(row.pages_peak for row in rows) == summary.pages_peak
    held_s = sum(turn.end_s - turn.admitted_s for turn in replayed.turns)
    assert total([row.held for row in rows], lengths) == pytest.approx(held_s)
    busy_s = summary.prefill_busy * summary.duration_s
    assert total([row.prefill_busy for row in rows], lengths) == pytest.approx(busy_s)


def test_tokens_are_counted_where_they_are_computed() -> None:
    """A prompt of 3 s, asked at 3.5 s, in rows of 2 s; and no row computes without lanes that are busy."""
    service = changed(FLAT, prefill_groups=1, prefill_step_s=lambda *_: 3.0)
    rows = table(replay([Session(3.5, (Turn(300, 1, 0.0),))], service), service, row_s=2.0)
    assert [row.computed_per_s for row in rows] == pytest.approx([0, 25, 100, 100])
    assert [row.prompt_per_s for row in rows] == pytest.approx([0, 150, 0, 0])
    for row in table(replay(draw(AGENTS, 5), TIGHT), TIGHT, row_s=1.0):
        assert (row.computed_per_s > 0) == (row.prefill_busy > 0)


def test_a_last_row_that_is_cut_short_divides_by_its_length() -> None:
    """Two turns of 100 tokens, at 0 s and 10 s, each a second of prefill and one of decode: 12 s in rows of 8 s."""
    sessions = [Session(start_s, (Turn(100, 11, 0.0),)) for start_s in (0.0, 10.0)]
    service = changed(FLAT, prefill_groups=1)
    whole, short = table(replay(sessions, service), service, row_s=8.0)
    assert (whole.computed_per_s, whole.held, whole.prefill_busy) == pytest.approx((100 / 8, 2 / 8, 1 / 8))
    assert (short.computed_per_s, short.held, short.prefill_busy) == pytest.approx((100 / 4, 2 / 4, 1 / 4))


def test_reuse_spares_prefill_and_nothing_else() -> None:
    sessions = draw(AGENTS, 1)
    none, most, all_of_it = (replay(sessions, changed(reuse=share)) for share in (0.0, 0.9, 1.0))
    prompts = [sum(t.prompt_tokens for t in run.turns) for run in (none, most, all_of_it)]
    assert len(set(prompts)) == 1
    computed = [sum(t.computed_tokens for t in run.turns) for run in (none, most, all_of_it)]
    assert computed[0] == prompts[0]
    assert computed[2] == sum(turn.new_tokens for session in sessions for turn in session.turns)
    assert computed[0] > computed[1] > computed[2]


def test_context_grows_by_what_was_asked_and_answered() -> None:
    sessions = (Session(0.0, (Turn(100, 10, 1.0), Turn(50, 20, 1.0), Turn(7, 3, 1.0))),)
    turns = replay(sessions, changed(reuse=0.5)).turns
    assert [t.prompt_tokens for t in turns] == [100, 160, 187]
    assert [t.computed_tokens for t in turns] == [100, 160 - 55, 187 - 90]
    assert [t.pages for t in turns] == [2, 3, 3]


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
    small = changed(max_context=10)
    replayed = replay(draw(AGENTS, 0), small)
    assert (replayed.turns, replayed.cut_sessions) == ((), AGENTS.sessions)
    assert table(replayed, small, 1.0) == ()
    assert summarise(replayed, small).turns == 0


# predicted


K3_AGENTS = Agents(
    sessions=48, turns=12, first_prompt_tokens=12_000, turn_tokens=3000, output_tokens=400, think_s=15.0, ramp_s=120.0
)


def k3_side(phase: type[DecodeLoad | PrefillLoad]) -> Side:
    profile, found = built_in_profiles()["mi300x"], built_in_measurements()
    setup = Setup(architecture("kimi-k3"), found.chip(profile), GroupShape(2, 8, 2), worker_engine(profile))
    return Side(setup, calibration_for(setup, phase, None))


def k3_service(reuse: float, num_pages: int = 15_000) -> Service:
    """Two nodes of MI300X a role, with the published factors."""
    decode, prefill = k3_side(DecodeLoad), k3_side(PrefillLoad)
    lane = changed(num_pages=num_pages, num_slots=40, max_context=900_000).lane
    return predicted_service(decode, prefill, lane, Chunk(2048, 40), reuse)


def test_a_predicted_service_serves_as_its_predictions_say() -> None:
    service = k3_service(reuse=0.9)
    assert (service.lanes, service.groups, service.prefill_lanes, service.prefill_groups) == (8, 1, 8, 1)
    alone = replay((Session(0.0, (Turn(20_000, 100, 0.0),)),), service).turns[0]
    side = k3_side(PrefillLoad)
    predicted = prefill_ms(side.setup, PrefillLoad(20_000, 0, 2048, 1), side.calibration)
    assert alone.first_s - alone.prefill_s == pytest.approx(predicted.value / 1e3)
    # all eight lanes at once take what a prompt beside seven others is predicted to take
    crowd = replay([Session(0.0, (Turn(20_000, 1, 0.0),))] * 8, service).turns
    predicted = prefill_ms(side.setup, PrefillLoad(20_000, 0, 2048, 8), side.calibration)
    assert {turn.prefill_lane for turn in crowd} == set(range(8))
    assert [turn.first_s for turn in crowd] == pytest.approx([predicted.value / 1e3] * 8)
    assert alone.end_s - alone.first_s == pytest.approx(99 * service.decode_step_s(1, 20_050))
    # published: 20,000 tokens took vLLM 10.5 s and a token 82 ms, which is less than what this worker's attention in
    # float32, its exchange and its experts take
    assert 10.5 < alone.first_s < 1.7 * 10.5
    assert 0.082 < (alone.end_s - alone.first_s) / 99 < 1.7 * 0.082


def test_agents_without_reuse_swamp_prefill_that_serves_them_well_with_it() -> None:
    sessions = draw(K3_AGENTS, 0)
    runs = {share: summarise(replay(sessions, k3_service(share)), k3_service(share)) for share in (0.0, 0.9)}
    assert runs[0.0].binds == "prefill lanes (8 in all)"
    swamped = k3_service(reuse=0.0)
    assert max(row.prefill_busy for row in table(replay(sessions, swamped), swamped, 60.0)) > 0.95
    alone_s, crowd_s = (swamped.prefill_step_s(2048, 0, lanes) for lanes in (1, 8))
    assert crowd_s > 1.2 * alone_s, "lanes share the experts' ranks"
    assert runs[0.9].ttft_p95_s < 0.5 * runs[0.0].ttft_p95_s
    assert runs[0.9].computed_tokens < 0.4 * runs[0.0].computed_tokens


def test_a_small_pool_makes_agents_wait_for_pages() -> None:
    service = k3_service(reuse=0.9, num_pages=1000)
    summary = summarise(replay(draw(K3_AGENTS, 0), service), service)
    assert summary.binds == "KV pages (1,000 a lane)"
    assert summary.pages_peak > 0.8 * 8 * 1000
