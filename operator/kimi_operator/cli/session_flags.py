"""Flags of `kimictl replay`: the sessions, and the tables. No pydantic and no text types here, as in `flags`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from kimi_operator.cli.flags import Whole, flag_name

SESSIONS = Group("The sessions", sort_key=2)
TABLES = Group("What to show", sort_key=3)


@dataclass(frozen=True)
class SessionFlags:
    """Sessions in flags: drawn from means and a seed, or as they were recorded."""

    agents: Annotated[Whole, Parameter(group=SESSIONS, help="Sessions; 16 by default.")] = None
    turns: Annotated[Whole, Parameter(group=SESSIONS, help="Turns of each session; 10 by default.")] = None
    first_prompt_tokens: Annotated[
        Whole, Parameter(group=SESSIONS, help="Prompt of a session's first turn; 12000 by default.")
    ] = None
    turn_tokens: Annotated[
        Whole, Parameter(group=SESSIONS, help="Mean of what tools and people add a turn; 3000 by default.")
    ] = None
    output_tokens: Annotated[Whole, Parameter(group=SESSIONS, help="Mean of an answer; 400 by default.")] = None
    think_time: Annotated[
        str | None, Parameter(group=SESSIONS, help="Mean time from an answer to the next turn; 15s by default.")
    ] = None
    ramp: Annotated[
        str | None, Parameter(group=SESSIONS, help="Sessions begin evenly spread over this time; 60s by default.")
    ] = None
    seed: Annotated[Whole, Parameter(group=SESSIONS, help="The same seed draws the same sessions; 0 by default.")] = (
        None
    )
    trace: Annotated[
        Path | None,
        Parameter(
            group=SESSIONS,
            allow_leading_hyphen=True,
            help="Recorded sessions instead of these: a line of JSON for each turn, with session, newTokens, "
            "outputTokens, and thinkSeconds or startSeconds if any; - is standard input.",
        ),
    ] = None
    reuse: Annotated[
        float | None,
        Parameter(
            group=SESSIONS,
            help="Share of a session's earlier context that a turn finds in a prefix cache, 0 to 1. 0 by default: "
            "the bundled worker keeps none.",
        ),
    ] = None

    @property
    def drawn(self) -> tuple[str, ...]:
        """Stated flags of sessions that are drawn, as the user writes them."""
        others = {"trace", "reuse"}
        names = (field.name for field in fields(self) if field.name not in others)
        return tuple(flag_name(name) for name in names if getattr(self, name) is not None)


@dataclass(frozen=True)
class TableFlags:
    """How the tables are cut."""

    rows: Annotated[Whole, Parameter(group=TABLES, help="Rows of each table at most; 10 by default.")] = None
