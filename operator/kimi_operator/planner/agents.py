"""Sessions of agents that think, call again with a longer context, and reuse part of it: drawn from a seed. Pure."""

from __future__ import annotations

import random

from msgspec import Struct


class Agents(Struct, frozen=True):
    """What the sessions are like; numbers are at least 1. Lengths and thinking are exponential around their means, but
    for the first prompt, and for what is drawn from stated lengths."""

    sessions: int
    turns: int
    first_prompt_tokens: int
    turn_tokens: int
    """Mean of what tools and people add a turn, after the first."""
    output_tokens: int
    think_s: float
    """Mean time from an answer to the next turn: the tool's or the person's. May be 0."""
    ramp_s: float = 0.0
    """Sessions begin evenly spread over this time."""
    first_prompts: tuple[int, ...] = ()
    """Equally likely first prompts; empty: all are of `first_prompt_tokens`."""
    outputs: tuple[int, ...] = ()
    """Equally likely answers; empty: they are exponential around `output_tokens`."""


class Turn(Struct, frozen=True):
    """One request of a session: what it adds to the context, what it answers, and how long until the next one."""

    new_tokens: int
    output_tokens: int
    think_s: float


class Session(Struct, frozen=True):
    """A conversation that begins at `start_s`."""

    start_s: float
    turns: tuple[Turn, ...]


def draw(agents: Agents, seed: int) -> tuple[Session, ...]:
    """Sessions from a seed; the same seed gives the same sessions."""
    rng = random.Random(seed)  # noqa: S311 - a simulation, not a secret

    def around(mean: float) -> int:
        return max(1, round(rng.expovariate(1 / mean)))

    def turn(index: int) -> Turn:
        first = rng.choice(agents.first_prompts) if agents.first_prompts and not index else agents.first_prompt_tokens
        new = around(agents.turn_tokens) if index else first
        think_s = rng.expovariate(1 / agents.think_s) if agents.think_s else 0.0
        return Turn(new, rng.choice(agents.outputs) if agents.outputs else around(agents.output_tokens), think_s)

    apart_s = agents.ramp_s / agents.sessions
    return tuple(Session(i * apart_s, tuple(map(turn, range(agents.turns)))) for i in range(agents.sessions))
