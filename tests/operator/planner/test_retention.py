"""A prefix cache under a replay: by hand, against one that scans everything, and at its two ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from kimi_operator.planner.agents import Agents, draw
from kimi_operator.planner.replay import replay
from kimi_operator.planner.retention import Retention, retention
from kimi_operator.planner.served import Served
from kimi_operator.planner.service import Lane, Service
from kimi_operator.planner.turns import by_turn
from msgspec.structs import replace

AGENTS = Agents(
    sessions=12, turns=6, first_prompt_tokens=900, turn_tokens=250, output_tokens=60, think_s=4.0, ramp_s=10.0
)
SERVICE = Service(
    lane=Lane(10_000, 64, num_slots=64, max_running=64, max_context=100_000, max_queued=64, reservation_s=1e9),
    lanes=1,
    groups=1,
    prefill_lanes=1,
    prefill_groups=4,
    prefill_running=1,
    chunk_tokens=100_000,
    prefill_step_s=lambda tokens, before, busy: 0.1 + tokens / 900 * (1 + busy / 20) + before / 90_000,
    decode_step_s=lambda decoding, context: 0.02 + decoding / 1000 + context / 1e6,
    reuse=0.0,
)


def served(session: int, turn: int, prefill_s: float, context: int, prompt: int) -> Served:
    """Asked, let in and begun at once; a second of prefill, and another of decode for nine more tokens."""
    return Served(
        session=session,
        turn=turn,
        context_tokens=context,
        prompt_tokens=prompt,
        computed_tokens=prompt - context,
        output_tokens=10,
        pages=math.ceil((prompt + 10) / 64),
        lane=0,
        prefill_lane=0,
        ahead=0,
        asked_s=prefill_s,
        admitted_s=prefill_s,
        prefill_s=prefill_s,
        first_s=prefill_s + 1,
        running_s=prefill_s + 1,
        end_s=prefill_s + 2,
    )


# Three sessions, two turns each; pages of 64 tokens.
#   session 0 asks 200 tokens = 4 pages at 0 s, and 300 = 5 pages at 10 s
#   session 1 asks 128 tokens = 2 pages at 3 s, and 200 = 4 pages at 13 s
#   session 2 asks 100 tokens = 2 pages at 6 s, and 150 = 3 pages at 16 s
BY_HAND = (
    served(0, 0, 0, 0, 200), served(1, 0, 3, 0, 128), served(2, 0, 6, 0, 100),
    served(0, 1, 10, 210, 300), served(1, 1, 13, 138, 200), served(2, 1, 16, 110, 150),
)  # fmt: skip


def test_a_cache_by_hand() -> None:
    # Wanted: from 6 s to 10 s all three first prompts, 4 + 2 + 2 = 8; at 10 s session 0's becomes 5 until 11 s, so
    # 5 + 2 + 2 = 9, the most. Then 2 + 2, 4 + 2 from 13 s, 2, and 3.
    #
    # With 8 pages all three first prompts are kept. At 10 s session 0 finds 200 tokens in whole pages: 3 x 64 = 192.
    # Its new prompt takes 5 beside 2 + 2 = 9 > 8: session 1, the least recently used, goes. At 13 s session 1 finds
    # nothing and takes 4 beside 2 (session 2) + 5 (session 0) = 11 > 8: session 2 goes, 9 > 8: session 0 goes too.
    # At 16 s session 2 finds nothing.
    eight = retention(BY_HAND, 8, 64, state_pages=0)
    assert eight == Retention(8, 9, 3, 2, context_tokens=210 + 138 + 110, found_tokens=192)
    assert eight.reuse == 192 / 458
    # With 16 nothing goes: at 16 s there are 5 + 4 kept and 3 in prefill. All whole pages are found: 3, 2 and 1.
    roomy = retention(BY_HAND, 16, 64, state_pages=0)
    assert roomy == Retention(16, 9, 3, 0, context_tokens=458, found_tokens=192 + 128 + 64)


def test_a_kept_prompt_takes_its_state_too() -> None:
    # A state takes 3 pages. Wanted: until 10 s the first prompts with theirs, 4 + 2 + 2 + 9 = 17, and of the third
    # from 7 s on; then 5 (session 0, in prefill) + 2 + 2 + 6 = 15.
    # With 16 pages, at 6 s 4 + 3 and 2 + 3 are kept beside 2 in prefill, 14. At 7 s that is 2 + 3 more, 17 > 16: it is
    # not kept. At 10 s session 0 finds 192 tokens; at 13 s, beside 5 + 3 of session 0, session 1 finds 128.
    found = retention(BY_HAND, 16, 64, state_pages=3)
    assert found == Retention(16, 17, 3, 1, context_tokens=458, found_tokens=192 + 128)


def slow_retention(turns: Sequence[Served], num_pages: int, state_pages: int) -> tuple[int, int]:
    """Evicted turns and found tokens of a list of (last use, session, tokens) that is looked through each time."""
    kept: list[tuple[float, int, int]] = []
    evicted = found = 0
    moments = sorted(
        [(t.prefill_s, 1, i) for i, t in enumerate(turns)] + [(t.first_s, 0, i) for i, t in enumerate(turns)]
    )
    busy: list[int] = []

    def used() -> int:
        return sum(math.ceil(t / 64) for t in busy) + sum(math.ceil(entry[2] / 64) + state_pages for entry in kept)

    for now_s, is_begin, index in moments:
        turn = turns[index]
        if is_begin:
            own = [entry for entry in kept if entry[1] == turn.session]
            kept = [entry for entry in kept if entry[1] != turn.session]
            evicted += turn.turn > 0 and not own
            found += sum(entry[2] // 64 * 64 for entry in own)
            busy.append(turn.prompt_tokens)
            while kept and used() > num_pages:
                kept.remove(min(kept))
        else:
            busy.remove(turn.prompt_tokens)
            if used() + math.ceil(turn.prompt_tokens / 64) + state_pages <= num_pages:
                kept.append((now_s, turn.session, turn.prompt_tokens))
    return evicted, found


@pytest.mark.parametrize("state_pages", [0, 5])
@pytest.mark.parametrize("num_pages", [1, 30, 90, 200, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_one_that_scans(seed: int, num_pages: int, state_pages: int) -> None:
    turns = replay(draw(AGENTS, seed), SERVICE).turns
    found = retention(turns, num_pages, 64, state_pages)
    assert (found.evicted_turns, found.found_tokens) == slow_retention(turns, num_pages, state_pages)
    assert found.returning_turns == AGENTS.sessions * (AGENTS.turns - 1)


@pytest.mark.parametrize("seed", range(4))
def test_more_pages_find_no_less_and_enough_find_every_prompt(seed: int) -> None:
    turns = replay(draw(AGENTS, seed), SERVICE).turns
    sizes = [retention(turns, num_pages, 64, 0) for num_pages in range(0, 400, 20)]
    assert [each.evicted_turns for each in sizes] == sorted((each.evicted_turns for each in sizes), reverse=True)
    assert sizes[0].reuse == 0
    # prompts that nobody comes back to stay too, so all sessions' longest prompts have to fit
    enough = sum(math.ceil(t.prompt_tokens / 64) for t in turns if t.turn == AGENTS.turns - 1)
    assert retention(turns, enough + 100, 64, 0).evicted_turns == 0
    assert sizes[-1].wanted_pages <= enough


def test_without_turns_there_is_nothing_to_keep() -> None:
    assert retention((), 100, 64, 0).reuse == 0
    # nobody comes back: each prompt has its pages for its second of prefill only
    assert retention(BY_HAND[:3], 100, 64, 9) == Retention(100, 4, 0, 0, 0, 0)


def test_rows_by_turn_cover_each_turn_once() -> None:
    turns = replay(draw(replace(AGENTS, turns=7), 0), SERVICE).turns
    rows = by_turn(turns, num_turns=7, max_rows=3)
    assert [(row.first, row.last) for row in rows] == [(1, 3), (4, 6), (7, 7)]
    assert [row.served for row in rows] == [36, 36, 12]
    assert sum(row.prompt_tokens * row.served for row in rows) == pytest.approx(sum(t.prompt_tokens for t in turns))
    last = sorted(turn.first_s - turn.asked_s for turn in turns if turn.turn == 6)
    assert (rows[-1].ttft_p50_s, rows[-1].ttft_p95_s) == (last[5], last[11])
    assert by_turn(BY_HAND, 2, 10)[1].tpot_p50_s == pytest.approx(1 / 9)
    assert by_turn((), 2, 10) == ()
