"""Recorded sessions, read from lines of JSON: one line for each turn. What is wrong is named by line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kimi_operator.api.base import ApiModel, parse
from kimi_operator.api.workload import Tokens
from kimi_operator.cli.files import refuse_file, text_of
from kimi_operator.cli.flags import refuse
from kimi_operator.cli.sessions import MOST_SECONDS, MOST_TURNS
from kimi_operator.planner.replay import Session, Turn

Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]


class TurnSpec(ApiModel):
    """One turn of a session; the turns of a session are in the order of their lines."""

    session: str = Field(min_length=1, description="Which session it is a turn of.")
    new_tokens: Tokens = Field(description="What the turn adds to the context.")
    output_tokens: Tokens = Field(description="The answer.")
    think_seconds: Seconds = Field(default=0.0, description="From the answer to the session's next turn.")
    start_seconds: Seconds | None = Field(default=None, description="When the session begins; on its first turn only.")


def read_trace(file: Path) -> dict[str, Session]:
    """The sessions of a file by the places of their first lines. Raises InvalidSpec that names line and field."""
    begun: dict[str, tuple[str, float]] = {}
    turns: dict[str, list[Turn]] = {}
    for number, (where, spec) in enumerate(_specs(file), start=1):
        if number > MOST_TURNS:
            raise refuse_file([file], f"more turns, at {where}", f"at most {MOST_TURNS:,}", "shorten it")
        if spec.session in begun and spec.start_seconds is not None:
            got, expected = f"{spec.start_seconds:g} on a later turn of {spec.session!r}", "it on the first turn only"
            raise refuse(f"{where}.startSeconds", got, expected, "remove it, or say thinkSeconds before")
        begun.setdefault(spec.session, (where, spec.start_seconds or 0.0))
        turns.setdefault(spec.session, []).append(Turn(spec.new_tokens, spec.output_tokens, spec.think_seconds))
    if not turns:
        raise refuse_file([file], "no turns", "a line of JSON for each turn", "name a file that has some")
    return {where: Session(start_s, tuple(turns[name])) for name, (where, start_s) in begun.items()}


def _specs(file: Path) -> Iterator[tuple[str, TurnSpec]]:
    """Each turn, after the place that problems of it are named by."""
    for number, line in enumerate(text_of(file).split("\n"), start=1):
        if line.strip():
            where = f"{file}: line {number}"
            yield where, parse(TurnSpec, _object(where, line), where)


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "objects in objects without end"
        raise refuse(where, f"no JSON: {reason}", "an object on one line", "mend the line") from error
    if not isinstance(found, dict):
        expected = "an object with session, newTokens and outputTokens"
        raise refuse(where, type(found).__name__, expected, "mend the line")
    return found
