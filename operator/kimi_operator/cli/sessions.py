"""Sessions that a command line asks for, drawn or recorded; whatever cannot be is refused by its flag or its line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_operator.api.workload import MAX_TOKENS
from kimi_operator.cli.flag_documents import seconds
from kimi_operator.cli.flags import flag_name, refuse
from kimi_operator.cli.session_flags import DEFAULTS, SessionFlags
from kimi_operator.planner.agents import Agents, Session, draw

if TYPE_CHECKING:
    from kimi_operator.cli.trace import Trace

MOST_TURNS = 10_000
"""Turns of all sessions together: a replay of so many takes some seconds."""
MOST_SECONDS = 86_400.0
MOST_SEED = 2**32 - 1

_MOST = {
    "agents": MOST_TURNS,
    "turns": MOST_TURNS,
    "first_prompt_tokens": MAX_TOKENS,
    "turn_tokens": MAX_TOKENS,
    "output_tokens": MAX_TOKENS,
}


@dataclass(frozen=True, slots=True)
class AskedSessions:
    """Sessions to replay and the share of earlier context that their turns find."""

    sessions: tuple[Session, ...]
    reuse: float
    text: str
    """What they are, for a person."""
    source: str
    """Where they are from, as the user wrote it."""
    first_field: str
    """What the user would mend if the longest first prompt does not fit."""
    agents: Agents | None
    """What they were drawn from; None when they were recorded."""
    seed: int
    assumed: tuple[str, ...]
    """Flags that nobody stated, or fields of a trace, so that their defaults were taken."""

    @property
    def num_turns(self) -> int:
        """Turns of the longest session."""
        return max(len(session.turns) for session in self.sessions)

    @property
    def longest_first(self) -> int:
        """Tokens of the longest first prompt."""
        return max(session.turns[0].new_tokens for session in self.sessions)


def asked_sessions(flags: SessionFlags) -> AskedSessions:
    """Raises InvalidSpec for flags that say nothing, too much, or what cannot be."""
    reuse = 0.0 if flags.reuse is None else flags.reuse
    if not 0 <= reuse <= 1:
        raise refuse("--reuse", f"{reuse:g}", "a share from 0 to 1", "write 0.9 for nine tenths")
    if flags.trace is not None:
        if flags.drawn:
            raise refuse(flags.drawn[0], "a flag beside --trace", "either of them", "leave one out")
        # A trace is read with the API's models, which sessions that are drawn do not need.
        from kimi_operator.cli.trace import read_trace  # noqa: PLC0415

        return _recorded(flags.trace, read_trace(flags.trace), reuse)
    agents, seed = _agents(flags), int(DEFAULTS["seed"] if flags.seed is None else flags.seed)
    if not 0 <= seed <= MOST_SEED:
        raise refuse("--seed", f"{seed}", f"a whole number from 0 to {MOST_SEED}", "choose another")
    assumed = [flag_name(name) for name in DEFAULTS if name != "seed" and getattr(flags, name) is None]
    sessions = draw(agents, seed)
    text, field = _text(agents, seed), "--first-prompt-tokens"
    return AskedSessions(sessions, reuse, text, "flags", field, agents, seed, tuple(assumed))


def _recorded(file: Path, trace: Trace, reuse: float) -> AskedSessions:
    sessions = trace.sessions
    num_turns = sum(len(session.turns) for session in sessions.values())
    longest = max(sessions, key=lambda where: sessions[where].turns[0].new_tokens)
    return AskedSessions(
        sessions=tuple(sessions.values()),
        reuse=reuse,
        text=f"{len(sessions):,} sessions of {file}, {num_turns:,} turns",
        source=f"--trace {file}",
        first_field=f"{longest}.newTokens",
        agents=None,
        seed=0,
        assumed=trace.assumed,
    )


def _agents(flags: SessionFlags) -> Agents:
    def stated(name: str) -> Any:
        value = getattr(flags, name)
        return DEFAULTS[name] if value is None else value

    def whole(name: str) -> int:
        number = int(stated(name))
        if not 1 <= number <= _MOST[name]:
            raise refuse(flag_name(name), f"{number:,}", f"from 1 to {_MOST[name]:,}", "correct it")
        return number

    def time_s(name: str) -> float:
        time = seconds(flag_name(name), stated(name)) or 0.0
        if time > MOST_SECONDS:
            raise refuse(flag_name(name), f"{time:,g}s", f"at most {MOST_SECONDS:,.0f}s, a day", "lower it")
        return time

    agents = Agents(*map(whole, _MOST), *map(time_s, ("think_time", "ramp")))
    if (num_turns := agents.sessions * agents.turns) > MOST_TURNS:
        got = f"{agents.sessions:,} x {agents.turns:,} turns = {num_turns:,}"
        raise refuse("--agents", got, f"at most {MOST_TURNS:,} turns in all", "lower --agents or --turns")
    return agents


def _text(agents: Agents, seed: int) -> str:
    return (
        f"{agents.sessions:,} agents x {agents.turns:,} turns, begun over {agents.ramp_s:g} s, seed {seed}: "
        f"first prompt {agents.first_prompt_tokens:,} tokens, means of {agents.turn_tokens:,} added a turn, "
        f"{agents.output_tokens:,} answered, {agents.think_s:g} s of thinking"
    )
