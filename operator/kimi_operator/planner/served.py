"""What a replay records: each turn as it went, and how things stood in between."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from msgspec import Struct


class Served(Struct, kw_only=True):
    """One turn as it went. Times in seconds from the start; it holds memory from `admitted_s` to `end_s`."""

    session: int
    turn: int
    """Its number within the session, from 0."""
    context_tokens: int
    """Those of the prompt that earlier turns asked or answered."""
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    pages: int
    lane: int
    """The decode lane, counted over all groups."""
    prefill_lane: int
    """The lane that computes the prompt, counted over all groups."""
    ahead: int
    """Requests that waited for that lane's memory when it was asked."""
    asked_s: float
    admitted_s: float = 0.0
    prefill_s: float = 0.0
    """When its lane began with it."""
    first_s: float = 0.0
    """When prefill was done and gave the first token."""
    running_s: float = 0.0
    """When it joined the batch; as `first_s` where that token is the whole answer."""
    end_s: float = 0.0


class Cause(Enum):
    """What requests wait for."""

    PREFILL = "prefill lanes"
    RUNNING = "maxNumSeqs"
    PAGES = "KV pages"
    SLOTS = "state slots"


class Level(NamedTuple):
    """How things stand until the next level."""

    since_s: float
    held: int
    """Requests that hold memory."""
    pages: int
    busy_lanes: int
    """Of prefill."""
    waiting: tuple[int, ...]
    """Requests that wait, for each Cause in its order."""


class Replayed(Struct, frozen=True):
    """All turns, in the order in which they were asked, and those that the context limit ended."""

    turns: tuple[Served, ...]
    levels: tuple[Level, ...]
    cut_sessions: int
    """Sessions that ended because the next turn would have been longer than `max_context`, or than a lane's pages."""
    lockstep_s: float
    """Time that lanes of prefill waited for the slowest of their group, who had computed too, summed over lanes."""
