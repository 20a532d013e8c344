"""Prompts of a replay by hand: chunks, lanes that step together, and which lane a prompt goes to."""

from __future__ import annotations

import pytest
from kimi_operator.planner.agents import Session, Turn
from kimi_operator.planner.pressure import summarise
from kimi_operator.planner.replay import replay
from kimi_operator.planner.service import Service
from replay_services import FLAT, changed

CHUNKS = changed(
    FLAT, prefill_lanes=2, prefill_groups=1, prefill_running=8, chunk_tokens=100,
    prefill_step_s=lambda tokens, before, busy: tokens / 100 + before / 1000 + busy - 1,
)  # fmt: skip
"""Two lanes that step together; a step takes a second a chunk of 100 tokens, more behind others and beside others."""


def prefilled(service: Service, *prompts: tuple[float, int]) -> list[tuple[int, float, float]]:
    """Lane, begin and end of each prompt that is asked at a time."""
    sessions = [Session(at, (Turn(tokens, 1, 0.0),)) for at, tokens in prompts]
    turns = sorted(replay(sessions, service).turns, key=lambda t: t.session)
    return [(t.prefill_lane, *(round(at, 9) for at in (t.prefill_s, t.first_s))) for t in turns]


def test_a_prompt_is_computed_in_chunks_each_behind_those_before() -> None:
    # three steps of 1 s + 0 s, 1 s + 0.1 s behind 100 tokens, 0.5 s + 0.2 s behind 200
    assert prefilled(CHUNKS, (0, 250)) == [(0, 0, 2.8)]


def test_lanes_of_a_group_step_together_as_long_as_the_slowest() -> None:
    # first step: both have 100 tokens, two lanes' worth of experts: 1 s + 1 s. Then the first alone: 1.1 s.
    assert prefilled(CHUNKS, (0, 200), (0, 100)) == [(0, 0, 3.1), (1, 0, 2)]
    # of 50 beside 100 tokens: two lanes of 100 at most, three of 50: 0.5 s + 2 s against 1 s + 1 s
    assert prefilled(CHUNKS, (0, 100), (0, 50)) == [(0, 0, 2.5), (1, 0, 2.5)]
    apart = changed(CHUNKS, prefill_lanes=1, prefill_groups=2)
    assert prefilled(apart, (0, 200), (0, 100)) == [(0, 0, 2.1), (1, 0, 1)]


def test_what_lanes_wait_for_the_slowest_is_a_share_of_their_time() -> None:
    """Two lanes for 2.5 s, where 100 tokens beside 50 would take 2 s; then the first alone, 50 tokens behind 100."""
    sessions = [Session(0, (Turn(tokens, 1, 0.0),)) for tokens in (150, 50)]
    replayed = replay(sessions, CHUNKS)
    assert replayed.lockstep_s == pytest.approx(0.5)
    summary = summarise(replayed, CHUNKS)
    assert (summary.duration_s, summary.prefill_lockstep) == pytest.approx((2.5 + 0.6, 0.5 / (2 * 2.5 + 0.6)))
    assert summarise(replay(sessions[:1], CHUNKS), CHUNKS).prefill_lockstep == 0


def test_what_comes_during_a_step_waits_for_its_end() -> None:
    assert prefilled(CHUNKS, (0, 100), (0.25, 100)) == [(0, 0, 1), (1, 1, 2)]
    apart = changed(CHUNKS, prefill_lanes=1, prefill_groups=2)
    assert prefilled(apart, (0, 100), (0.25, 100)) == [(0, 0, 1), (1, 0.25, 1.25)]


def test_a_wait_for_the_end_of_a_step_alone_is_none() -> None:
    """The second prompt comes to a free lane of a group that steps; the third is behind the first, from 0.5 s to 1."""
    sessions = [Session(at, (Turn(100, 1, 0.0),)) for at in (0, 0.25, 0.5)]
    alone = summarise(replay(sessions[:2], CHUNKS), CHUNKS)
    assert alone.lane_wait_s == 0.75
    assert (alone.binds, set(alone.waited_s.values())) == ("nothing: no request waited", {0})
    behind = summarise(replay(sessions, CHUNKS), CHUNKS)
    assert behind.waited_s == {"prefill lanes": 0.5, "maxNumSeqs": 0, "KV pages": 0, "state slots": 0}


def test_who_comes_during_a_long_prompt_finds_what_is_left_of_it() -> None:
    """Ten steps of 1 s, each 0.1 s longer than the one before it."""
    # asked at 1.5 s, the second joins at 2.1 s: behind 200 tokens and with two lanes' worth of experts a step is 2.2 s
    assert prefilled(CHUNKS, (0, 1000), (1.5, 100))[1] == (1, 2.1, 4.3)
    # at 7.6 s six steps are over: 400 tokens are left on one lane, and the second prompt's 450 go to the other
    apart = changed(CHUNKS, prefill_lanes=1, prefill_groups=2)
    assert [lane for lane, _, _ in prefilled(apart, (0, 1000), (7.6, 450), (7.6, 10))] == [0, 1, 0]


def test_the_rest_of_a_chunk_is_the_next_prompts() -> None:
    """150 and 50 tokens are two chunks: the second one has 50 of each, the first 50 behind 100, so 50 in the mean."""
    one = changed(CHUNKS, prefill_lanes=1)
    assert prefilled(one, (0, 150), (0, 50)) == [(0, 0, 2.05), (0, 1, 2.05)]
    # one prompt a step: 1 s, 0.5 s + 0.1 s, 0.5 s
    assert prefilled(changed(one, prefill_running=1), (0, 150), (0, 50)) == [(0, 0, 1.6), (0, 1.6, 2.1)]


def test_a_prompt_goes_to_the_lane_with_fewest_tokens_and_stays_there() -> None:
    found = prefilled(CHUNKS, (0, 1000), (0, 300), (0, 100), (0, 500), (0, 100))
    assert [lane for lane, _, _ in found] == [0, 1, 1, 1, 1], "300 + 100 + 500 are fewer than 1000"
    # lane 1 is free long before the second prompt's lane, which it was sent to when that had fewer tokens
    crossed = prefilled(CHUNKS, (0, 500), (0, 400), (0, 450), (0.5, 100))
    assert [lane for lane, _, _ in crossed] == [0, 1, 1, 0]


def test_prompts_that_wait_for_memory_count_in_their_lanes() -> None:
    """One slot: all wait for decode, and are sent to the lanes in turn."""
    found = prefilled(changed(CHUNKS, lanes=1, num_slots=1), *[(0, 100)] * 4)
    assert found == [(0, 0, 1), (1, 1, 2), (0, 2, 3), (1, 3, 4)]
