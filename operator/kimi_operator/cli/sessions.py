"""Sessions that a command line asks for, drawn or recorded; whatever cannot be is refused by its flag or its line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kimi_operator.api.workload import MAX_TOKENS
from kimi_operator.cli.flag_documents import seconds
from kimi_operator.cli.flags import flag_name, refuse
from kimi_operator.cli.manifest_sessions import FromManifest, from_manifest
from kimi_operator.cli.session_flags import DEFAULTS, SessionFlags
from kimi_operator.planner.agents import Agents, Session, draw
from kimi_operator.planner.demand import FIELD
from kimi_operator.planner.units import counted
from kimi_operator.planner.workload import Workload

if TYPE_CHECKING:
    from kimi_operator.cli.trace import Trace

MOST_TURNS = 10_000
"""Turns of all sessions together: a replay of so many takes from some seconds to half a minute."""
MOST_SECONDS = 86_400.0
MOST_SEED = 2**32 - 1
CONCURRENCY = f"{FIELD}.concurrency"

_MOST = {
    "agents": MOST_TURNS,
    "turns": MOST_TURNS,
    "first_prompt_tokens": MAX_TOKENS,
    "turn_tokens": MAX_TOKENS,
    "output_tokens": MAX_TOKENS,
}


class AskedSessions(Struct, frozen=True):
    """Sessions to replay and the share of earlier context that their turns find."""

    sessions: tuple[Session, ...]
    reuse: float
    text: tuple[str, ...]
    """What they are, for a person, in lines."""
    source: str
    """Where they are from, as the user wrote it."""
    first_field: str | None
    """What the user would mend if the longest first prompt does not fit; None where a tail may be cut."""
    agents: Agents | None
    """What they were drawn from; None when they were recorded."""
    seed: int
    assumed: tuple[str, ...]
    """Flags that nobody stated, or fields of a trace, so that their defaults were taken."""
    manifest: FromManifest
    """What the manifest's workload says of them; empty without one."""

    @property
    def num_turns(self) -> int:
        """Turns of the longest session."""
        return max(len(session.turns) for session in self.sessions)

    @property
    def longest_first(self) -> int:
        """Tokens of the longest first prompt."""
        return max(session.turns[0].new_tokens for session in self.sessions)


def asked_sessions(flags: SessionFlags, workload: Workload | None = None) -> AskedSessions:
    """The sessions of flags; what these leave open is of the manifest's workload, if it has one.

    Raises InvalidSpec for flags that say nothing, too much, or what cannot be.
    """
    manifest = FromManifest() if workload is None else from_manifest(workload, flags)
    reuse = (manifest.reuse or 0.0) if flags.reuse is None else flags.reuse
    if not 0 <= reuse <= 1:
        raise refuse("--reuse", f"{reuse:g}", "a share from 0 to 1", "write 0.9 for nine tenths")
    if flags.trace is not None:
        if flags.drawn:
            raise refuse(flags.drawn[0], "a flag beside --trace", "either of them", "leave one out")
        # A trace is read with the API's models, which sessions that are drawn do not need.
        from kimi_operator.cli.trace import read_trace  # noqa: PLC0415

        return _recorded(flags.trace, read_trace(flags.trace), reuse, manifest)
    agents, seed = _agents(flags, manifest), int(DEFAULTS["seed"] if flags.seed is None else flags.seed)
    if not 0 <= seed <= MOST_SEED:
        raise refuse("--seed", f"{seed}", f"a whole number from 0 to {MOST_SEED}", "choose another")
    known = {"seed", *(name for name, value in _of_manifest(manifest).items() if value is not None)}
    assumed = [flag_name(name) for name in DEFAULTS if name not in known and getattr(flags, name) is None]
    return AskedSessions(
        sessions=draw(agents, seed),
        reuse=reuse,
        text=_text(agents, manifest, seed),
        source="flags" if workload is None else "flags and spec.workload",
        first_field="--first-prompt-tokens" if manifest.first_prompt is None else None,
        agents=agents,
        seed=seed,
        assumed=tuple(assumed),
        manifest=manifest,
    )


def _recorded(file: Path, trace: Trace, reuse: float, manifest: FromManifest) -> AskedSessions:
    sessions = trace.sessions
    num_turns = sum(len(session.turns) for session in sessions.values())
    longest = max(sessions, key=lambda where: sessions[where].turns[0].new_tokens)
    return AskedSessions(
        sessions=tuple(sessions.values()),
        reuse=reuse,
        text=(f"{counted(len(sessions), 'session')} of {file}, {counted(num_turns, 'turn')}",),
        source=f"--trace {file}",
        first_field=f"{longest}.newTokens",
        agents=None,
        seed=0,
        assumed=trace.assumed,
        manifest=manifest,
    )


def _of_manifest(manifest: FromManifest) -> dict[str, Any]:
    """What takes the place of a default, by flag."""
    return {
        "agents": manifest.agents,
        "first_prompt_tokens": manifest.first_prompt,
        "output_tokens": manifest.output,
    }


def _agents(flags: SessionFlags, manifest: FromManifest) -> Agents:
    def stated(name: str) -> Any:
        value = getattr(flags, name)
        return DEFAULTS[name] if value is None else value

    def whole(name: str) -> int:
        lengths = {"first_prompt_tokens": manifest.first_prompt, "output_tokens": manifest.output}.get(name)
        if lengths is not None:
            return round(lengths.mean)
        number = int(stated(name)) if name != "agents" or manifest.agents is None else manifest.agents
        if not 1 <= number <= _MOST[name]:
            is_mine = name != "agents" or manifest.agents is None
            field, remedy = (flag_name(name), "correct it") if is_mine else (CONCURRENCY, "state --agents")
            raise refuse(field, f"{number:,}", f"from 1 to {_MOST[name]:,}", remedy)
        return number

    def time_s(name: str) -> float:
        time = seconds(flag_name(name), stated(name)) or 0.0
        if time > MOST_SECONDS:
            raise refuse(flag_name(name), f"{time:,g}s", f"at most {MOST_SECONDS:,.0f}s, a day", "lower it")
        return time

    num_sessions, num_each, first_tokens, turn_tokens, output_tokens = map(whole, _MOST)
    if (num_turns := num_sessions * num_each) > MOST_TURNS:
        got = f"{num_sessions:,} x {num_each:,} turns = {num_turns:,}"
        field, remedy = "--agents", "lower --agents or --turns"
        if manifest.agents is not None:
            field, remedy = CONCURRENCY, "state fewer --agents or --turns"
        raise refuse(field, got, f"at most {MOST_TURNS:,} turns in all", remedy)
    think_s, ramp_s = time_s("think_time"), time_s("ramp")
    first, output = manifest.first_prompt, manifest.output
    return Agents(
        sessions=num_sessions,
        turns=num_each,
        first_prompt_tokens=first_tokens,
        turn_tokens=turn_tokens,
        output_tokens=output_tokens,
        think_s=think_s,
        ramp_s=ramp_s,
        first_prompts=() if first is None else first.points,
        outputs=() if output is None else output.points,
    )


def _text(agents: Agents, manifest: FromManifest, seed: int) -> tuple[str, str]:
    first = manifest.first_prompt or counted(agents.first_prompt_tokens, "token")
    means = [f"{agents.turn_tokens:,} added a turn", f"{agents.think_s:g} s of thinking"]
    if manifest.output is None:
        means.insert(1, f"{agents.output_tokens:,} answered")
    lengths = [f"first prompt {first}", *([f"answers {manifest.output}"] if manifest.output else [])]
    return (
        f"{counted(agents.sessions, 'agent')} x {counted(agents.turns, 'turn')}, begun over {agents.ramp_s:g} s, "
        f"seed {seed}",
        f"{'; '.join(lengths)}; means of {', '.join(means)}",
    )
