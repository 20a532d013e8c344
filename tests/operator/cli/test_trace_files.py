"""Traces of any content: sessions that a replay serves, or problems that name file and line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kimi_operator.cli.trace import read_trace
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner.replay import replay
from kimi_operator.planner.service import Lane, Service

SERVICE = Service(
    lane=Lane(10**6, 64, num_slots=3, max_running=2, max_context=10**9, max_queued=64, reservation_s=1e9),
    lanes=1,
    groups=1,
    prefill_lanes=1,
    prefill_groups=1,
    prefill_running=1,
    chunk_tokens=2**24,
    prefill_step_s=lambda tokens, before, busy: 0.1,
    decode_step_s=lambda decoding, context: 0.01,
    reuse=0.5,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=9), inside, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["a", "b", "\u2028", "", "\ud800"])
TURNS = st.fixed_dictionaries(
    {"session": NAMES, "newTokens": st.integers(0, 2**25), "outputTokens": st.integers(0, 2**25)},
    optional={"thinkSeconds": st.floats(), "startSeconds": st.floats(0, 10), "more": JSON},
)
GOOD = st.fixed_dictionaries(
    {"session": st.sampled_from("abc"), "newTokens": st.integers(1, 9999), "outputTokens": st.integers(1, 99)},
    optional={"thinkSeconds": st.floats(0, 99)},
)


def read(text: str) -> tuple[dict[str, Any], str]:
    """Sessions and no complaint, or none and a complaint without the folder's name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        file.write_text(text, encoding="utf-8")
        try:
            return read_trace(file).sessions, ""
        except InvalidSpec as error:
            field = error.problems[0].field
    assert field.startswith(str(file))
    return {}, field.removeprefix(str(file))


@given(st.lists(JSON.map(json.dumps) | TURNS.map(json.dumps) | st.text('{}[]":,ae1\r\u2028 ', max_size=20), max_size=6))
def test_any_lines_are_sessions_or_are_refused_by_their_place(lines: list[str]) -> None:
    sessions, field = read("\n".join(lines))
    if not sessions:
        # nothing but blank lines is no line's fault
        assert field.startswith(": line ") or (field == "" and not any(line.strip() for line in lines))
    else:
        turns = replay(tuple(sessions.values()), SERVICE).turns
        assert len(turns) == sum(len(session.turns) for session in sessions.values())
        assert len(turns) == sum(bool(line.strip()) for line in lines)


@given(st.lists(GOOD, min_size=1, max_size=20))
def test_what_is_written_is_read(turns: list[dict[str, Any]]) -> None:
    sessions, field = read("\n".join(map(json.dumps, turns)))
    assert field == ""
    names = list(dict.fromkeys(turn["session"] for turn in turns))
    assert len(sessions) == len(names)
    for name, session in zip(names, sessions.values(), strict=True):
        own = [turn for turn in turns if turn["session"] == name]
        assert [(turn.new_tokens, turn.output_tokens, turn.think_s) for turn in session.turns] == [
            (turn["newTokens"], turn["outputTokens"], turn.get("thinkSeconds", 0.0)) for turn in own
        ]


@given(st.lists(GOOD, min_size=2, max_size=9), st.data())
def test_one_bad_line_is_named(turns: list[dict[str, Any]], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(turns) - 1))
    name, value = data.draw(
        st.sampled_from([("newTokens", 0), ("outputTokens", "7"), ("thinkSeconds", -0.5), ("startSeconds", 1e9)])
    )
    turns[at] = {**turns[at], name: value}
    assert read("\n".join(map(json.dumps, turns)))[1] == f": line {at + 1}.{name}"


def test_time_counts_from_the_earliest_start_and_defaults_are_told() -> None:
    lines = [
        {"session": "a", "newTokens": 1, "outputTokens": 1, "startSeconds": 900},
        {"session": "b", "newTokens": 1, "outputTokens": 1, "startSeconds": 905.5, "thinkSeconds": 3},
        {"session": "a", "newTokens": 1, "outputTokens": 1},
        {"session": "a", "newTokens": 1, "outputTokens": 1},
        {"session": "b", "newTokens": 1, "outputTokens": 1},
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        trace = read_trace(file)
        # what follows the last turn of a session is nobody's business
        assert trace.assumed == ("thinkSeconds 0 for 2 turns",)
        assert [session.start_s for session in trace.sessions.values()] == [0, 5.5]
        lines[1].pop("startSeconds")
        file.write_text("\n".join(map(json.dumps, lines)))
        trace = read_trace(file)
        assert trace.assumed == ("startSeconds 0 for 1 session", "thinkSeconds 0 for 2 turns")
        assert [session.start_s for session in trace.sessions.values()] == [900, 0]
