"""Flags of `kimictl replay`: the sessions, and the tables. No pydantic and no text types here, as in `flags`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from kimi_operator.cli.flags import Number, Whole, flag_name

SESSIONS = Group("The sessions", sort_key=2)
TABLES = Group("What to show", sort_key=3)


DEFAULTS: dict[str, int | str] = {
    "agents": 16,
    "turns": 10,
    "first_prompt_tokens": 12_000,
    "turn_tokens": 3000,
    "output_tokens": 400,
    "think_time": "15s",
    "ramp": "60s",
    "seed": 0,
}
"""Of sessions that are drawn, by flag."""


def _drawn(name: str, text: str) -> Parameter:
    return Parameter(group=SESSIONS, help=f"{text}; {DEFAULTS[name]} by default.")


@dataclass(frozen=True)
class SessionFlags:
    """Sessions in flags: drawn from means and a seed, or as they were recorded."""

    agents: Annotated[Whole, _drawn("agents", "Sessions")] = None
    turns: Annotated[Whole, _drawn("turns", "Turns of each session")] = None
    first_prompt_tokens: Annotated[Whole, _drawn("first_prompt_tokens", "Prompt of a session's first turn")] = None
    turn_tokens: Annotated[Whole, _drawn("turn_tokens", "Mean of what tools and people add a turn")] = None
    output_tokens: Annotated[Whole, _drawn("output_tokens", "Mean of an answer")] = None
    think_time: Annotated[str | None, _drawn("think_time", "Mean time from an answer to the next turn")] = None
    ramp: Annotated[str | None, _drawn("ramp", "Sessions begin evenly spread over this time")] = None
    seed: Annotated[Whole, _drawn("seed", "The same seed draws the same sessions")] = None
    trace: Annotated[
        Path | None,
        Parameter(
            group=SESSIONS,
            allow_leading_hyphen=True,
            help="Recorded sessions instead of these: a line of JSON for each turn, with session, newTokens, "
            "outputTokens, and thinkSeconds or startSeconds if any, as in examples/trace.jsonl; - is standard input.",
        ),
    ] = None
    reuse: Annotated[
        Number,
        Parameter(
            group=SESSIONS,
            help="Share of a session's earlier context that a turn finds in a prefix cache, 0 to 1. 0 by default: "
            "the bundled worker keeps none.",
        ),
    ] = None

    @property
    def drawn(self) -> tuple[str, ...]:
        """Stated flags of sessions that are drawn, as the user writes them."""
        return tuple(flag_name(name) for name in DEFAULTS if getattr(self, name) is not None)


@dataclass(frozen=True)
class TableFlags:
    """How the tables are cut."""

    rows: Annotated[Whole, Parameter(group=TABLES, help="Rows of each table at most; 10 by default.")] = None
