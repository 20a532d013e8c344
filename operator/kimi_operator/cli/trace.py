"""Recorded sessions, read from lines of JSON: one line for each turn. What is wrong is named by line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct
from pydantic import Field

from kimi_operator.api.base import ApiModel, parse
from kimi_operator.api.workload import Tokens
from kimi_operator.cli.files import DuplicateKeyError, read_json, refuse_file, text_of
from kimi_operator.cli.flags import refuse
from kimi_operator.cli.sessions import MOST_SECONDS, MOST_TURNS
from kimi_operator.planner.agents import Session, Turn
from kimi_operator.planner.units import counted

Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]


class TurnSpec(ApiModel):
    """One turn of a session; the turns of a session are in the order of their lines."""

    session: str = Field(min_length=1, description="Which session it is a turn of.")
    new_tokens: Tokens = Field(description="What the turn adds to the context.")
    output_tokens: Tokens = Field(description="The answer.")
    think_seconds: Seconds | None = Field(default=None, description="From the answer to the session's next turn.")
    start_seconds: Seconds | None = Field(default=None, description="When the session begins; on its first turn only.")


class Trace(Struct, frozen=True):
    """Recorded sessions by the places of their first lines; the earliest begins at 0 s."""

    sessions: dict[str, Session]
    assumed: tuple[str, ...]
    """Fields that some lines left out where they matter, with the default and how often it was taken."""


def read_trace(file: Path) -> Trace:
    """The sessions of a file. Raises InvalidSpec that names line and field."""
    lines: dict[str, list[tuple[str, TurnSpec]]] = {}
    for number, (where, spec) in enumerate(_specs(file), start=1):
        if number > MOST_TURNS:
            raise refuse_file([file], f"more turns, at {where}", f"at most {MOST_TURNS:,}", "shorten it")
        if spec.session in lines and spec.start_seconds is not None:
            got, expected = f"{spec.start_seconds:g} on a later turn of {spec.session!r}", "it on the first turn only"
            raise refuse(f"{where}.startSeconds", got, expected, "remove it, or say thinkSeconds before")
        lines.setdefault(spec.session, []).append((where, spec))
    if not lines:
        raise refuse_file([file], "no turns", "a line of JSON for each turn", "name a file that has some")
    earliest_s = min(turns[0][1].start_seconds or 0.0 for turns in lines.values())
    sessions = {turns[0][0]: _session([spec for _, spec in turns], earliest_s) for turns in lines.values()}
    return Trace(sessions, tuple(_assumed([[spec for _, spec in turns] for turns in lines.values()])))


def _session(specs: list[TurnSpec], earliest_s: float) -> Session:
    turns = (Turn(spec.new_tokens, spec.output_tokens, spec.think_seconds or 0.0) for spec in specs)
    return Session((specs[0].start_seconds or 0.0) - earliest_s, tuple(turns))


def _assumed(sessions: list[list[TurnSpec]]) -> Iterator[str]:
    if starts := sum(specs[0].start_seconds is None for specs in sessions):
        yield f"startSeconds 0 for {counted(starts, 'session')}"
    # after a session's last turn nobody waits for it to think
    if thinks := sum(spec.think_seconds is None for specs in sessions for spec in specs[:-1]):
        yield f"thinkSeconds 0 for {counted(thinks, 'turn')}"


def _specs(file: Path) -> Iterator[tuple[str, TurnSpec]]:
    """Each turn, after the place that problems of it are named by."""
    for number, line in enumerate(text_of(file).split("\n"), start=1):
        if line.strip():
            where = f"{file}: line {number}"
            yield where, parse(TurnSpec, _object(where, line), where)


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        found = read_json(line)
    except DuplicateKeyError as error:
        raise refuse(where, str(error), "each key once", "leave one of them") from error
    except (ValueError, RecursionError) as error:
        # a plain ValueError is Python's limit on the digits of a whole number
        odd = "objects in objects without end" if isinstance(error, RecursionError) else "a number of too many digits"
        reason = error.msg if isinstance(error, json.JSONDecodeError) else odd
        raise refuse(where, f"no JSON: {reason}", "an object on one line", "mend the line") from error
    if not isinstance(found, dict):
        expected = "an object with session, newTokens and outputTokens"
        raise refuse(where, type(found).__name__, expected, "mend the line")
    return found
