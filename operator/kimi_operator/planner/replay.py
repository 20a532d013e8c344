"""Agentic load, replayed: sessions that think, call again with a longer context, and reuse part of it.

Each turn goes to the decode lane with the most room, takes a slot and the pages of its whole context there, waits for a
prefill lane, is computed, joins the batch of its lane's group, and gives the memory back while its session thinks. The
rules are those of the worker's scheduler and router. `draw` makes the sessions from a seed, `replay` runs them, and
`pressure` sums up what happened; all are pure.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial
from itertools import count
from typing import NamedTuple

from kimi_operator.planner.predict import Side, roofline_s
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad
from kimi_operator.planner.units import ceil_div

_FAR = 2**20
"""A context, in tokens, beside 0: a decode step is affine in the context, so two are priced."""


@dataclass(frozen=True, slots=True)
class Agents:
    """What the sessions are like, all at least 1. Lengths and thinking are exponential around their means; the first
    prompt is not."""

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


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: what it adds to the context, what it answers, and how long until the next one."""

    new_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation that begins at `start_s`."""

    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """What a decode lane takes, as its worker is set."""

    num_pages: int
    page_size_tokens: int
    num_slots: int
    """Requests that hold memory at once, prefill's share of their life included."""
    max_running: int
    """Those of them that decode at once."""
    max_context: int
    max_queued: int
    """Requests that wait for memory before the next one is refused."""
    reservation_s: float
    """Longest time from taking memory to the end of prefill; then the request fails."""


@dataclass(frozen=True, slots=True)
class Service:
    """What serves the sessions, and how long work takes."""

    lane: Lane
    lanes: int
    """Decode lanes of a group. They step together."""
    groups: int
    prefill_lanes: int
    """Of all groups; a prompt takes the first that is free."""
    prefill_s: Callable[[int, int, int], float]
    """(tokens to compute, tokens found in the cache, busy lanes) -> seconds on one lane; taken once, at its start."""
    decode_step_s: Callable[[int, float], float]
    """(requests of a group that decode, mean of their contexts) -> seconds of a step; affine in the mean."""
    reuse: float
    """Share of a session's earlier context that a turn finds in the cache."""


def paced(service: Service, prefill: float, decode: float) -> Service:
    """The same service with all times of a phase so many times as long."""
    return replace(
        service,
        prefill_s=lambda new, cached, busy: prefill * service.prefill_s(new, cached, busy),
        decode_step_s=lambda decoding, context: decode * service.decode_step_s(decoding, context),
    )


def predicted_service(decode: Side, prefill: Side, lane: Lane, chunk_tokens: int, reuse: float) -> Service:
    """The service that predictions describe; a step of prefill computes at most `chunk_tokens`."""
    prefill_factor, decode_factor = prefill.calibration.factor(), decode.calibration.factor()

    def prefill_s(new: int, cached: int, busy: int) -> float:
        load = PrefillLoad(new, cached, chunk_tokens, ceil_div(busy, prefill.groups))
        return prefill_factor * roofline_s(prefill.setup, load)

    @cache
    def line(decoding: int) -> tuple[float, float]:
        near, far = (roofline_s(decode.setup, DecodeLoad(decoding, context)) for context in (0, _FAR))
        return decode_factor * near, decode_factor * (far - near) / _FAR

    def decode_step_s(decoding: int, context: float) -> float:
        least, each = line(decoding)
        return least + each * context

    lanes, prefill_lanes = decode.setup.shape.lanes, prefill.setup.shape.lanes * prefill.groups
    return Service(lane, lanes, decode.groups, prefill_lanes, prefill_s, decode_step_s, reuse)


@dataclass(slots=True)
class Served:
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
    ahead: int
    """Requests that waited for that lane's memory when it was asked."""
    asked_s: float
    admitted_s: float = 0.0
    prefill_s: float = 0.0
    """When a lane began with it."""
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


_PREFILL, _RUNNING, _PAGES, _SLOTS = range(len(Cause))


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


@dataclass(frozen=True, slots=True)
class Replayed:
    """All turns, in the order in which they were asked, and those that the context limit ended."""

    turns: tuple[Served, ...]
    levels: tuple[Level, ...]
    cut_sessions: int
    """Sessions that ended because the next turn would have been longer than `max_context`, or than a lane's pages."""


def draw(agents: Agents, seed: int) -> tuple[Session, ...]:
    """Sessions from a seed; the same seed gives the same sessions."""
    rng = random.Random(seed)  # noqa: S311 - a simulation, not a secret

    def around(mean: float) -> int:
        return max(1, round(rng.expovariate(1 / mean)))

    def turn(index: int) -> Turn:
        new = around(agents.turn_tokens) if index else agents.first_prompt_tokens
        think_s = rng.expovariate(1 / agents.think_s) if agents.think_s else 0.0
        return Turn(new, around(agents.output_tokens), think_s)

    apart_s = agents.ramp_s / agents.sessions
    return tuple(Session(i * apart_s, tuple(map(turn, range(agents.turns)))) for i in range(agents.sessions))


@dataclass(slots=True)
class _Lane:
    """A decode lane. Both queues are first in, first out: who does not fit holds back the next."""

    free_pages: int
    free_slots: int
    load: int = 0
    """Requests that have not ended, waiting ones included."""
    running: int = 0
    waiting: deque[Served] = field(default_factory=deque)
    """For memory."""
    ready: deque[Served] = field(default_factory=deque)
    """For a place in the batch."""


@dataclass(slots=True)
class _Group:
    """Lanes that step together. Between two plans the batch stays the same."""

    lanes: Sequence[_Lane]
    steps: int = 0
    """Done at `since_s`."""
    since_s: float = 0.0
    version: int = 0
    """Of the plan; the event of an older one is void."""
    ends: list[tuple[int, int, Served]] = field(default_factory=list)
    """The batch: a heap by the step that is the last of each."""
    offset: int = 0
    """Sum of the batch's contexts, less those that steps have added: each has `steps` more than its part."""


@dataclass(slots=True)
class _State:
    """The service in the middle of it."""

    service: Service
    sessions: Sequence[Session]
    contexts: list[int]
    asked: list[int]
    """Turns that each session has asked."""
    lanes: list[_Lane]
    groups: list[_Group]
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    prompts: deque[Served] = field(default_factory=deque)
    """They hold memory and wait for a prefill lane."""
    held: int = 0
    pages: int = 0
    busy_lanes: int = 0
    served: list[Served] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    cut: int = 0

    def at(self, when_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.numbers), event))

    def ask(self, session: int, now_s: float) -> None:
        """The session's next turn, if it has one and it fits, to the lane that the router would pick."""
        index = self.asked[session]
        if index == len(self.sessions[session].turns):
            return
        turn, limits = self.sessions[session].turns[index], self.service.lane
        context = self.contexts[session]
        prompt = context + turn.new_tokens
        whole = prompt + turn.output_tokens
        pages = ceil_div(whole, limits.page_size_tokens)
        if whole > limits.max_context or pages > limits.num_pages:
            self.cut += 1
            return
        self.asked[session] += 1
        self.contexts[session] = whole
        computed = prompt - int(self.service.reuse * context)
        number = max(range(len(self.lanes)), key=lambda i: (-self.lanes[i].load, self.lanes[i].free_pages))
        lane = self.lanes[number]
        tokens = (context, prompt, computed, turn.output_tokens)
        lane.load += 1
        lane.waiting.append(Served(session, index, *tokens, pages, number, len(lane.waiting), now_s))
        self.admit(lane, now_s)
        self.compute(now_s)

    def admit(self, lane: _Lane, now_s: float) -> None:
        """Give memory to whoever waits for it and fits, in order."""
        while lane.waiting and lane.free_slots and lane.waiting[0].pages <= lane.free_pages:
            turn = lane.waiting.popleft()
            turn.admitted_s = now_s
            lane.free_slots, lane.free_pages = lane.free_slots - 1, lane.free_pages - turn.pages
            self.held, self.pages = self.held + 1, self.pages + turn.pages
            self.prompts.append(turn)

    def compute(self, now_s: float) -> None:
        """Give free prefill lanes to prompts that wait for one, in order."""
        while self.prompts and self.busy_lanes < self.service.prefill_lanes:
            turn = self.prompts.popleft()
            turn.prefill_s = now_s
            self.busy_lanes += 1
            cached = turn.prompt_tokens - turn.computed_tokens
            done_s = now_s + self.service.prefill_s(turn.computed_tokens, cached, self.busy_lanes)
            self.at(done_s, partial(self.activate, turn))

    def activate(self, turn: Served, now_s: float) -> None:
        """Prefill is done: its lane is free, the first token is there, and the rest is ready to run."""
        turn.first_s = turn.running_s = now_s
        self.busy_lanes -= 1
        lane, group = self.lanes[turn.lane], self.groups[turn.lane // self.service.lanes]
        if turn.output_tokens == 1:
            self.end(turn, now_s)
            self.admit(lane, now_s)
        else:
            lane.ready.append(turn)
            if not group.ends:
                group.version += 1
                self.between_steps(group, group.steps, group.version, now_s)
            elif lane.running < self.service.lane.max_running:
                passed_s, left = now_s - group.since_s, group.ends[0][0] - group.steps
                self.plan(group, bisect_left(range(left), passed_s, key=partial(self.span_s, group)))
        self.compute(now_s)

    def span_s(self, group: _Group, steps: int) -> float:
        """Time of the group's next steps, in which each context grows by a token a step."""
        context = group.offset / len(group.ends) + group.steps + (steps - 1) / 2
        return steps * self.service.decode_step_s(len(group.ends), context)

    def plan(self, group: _Group, steps: int) -> None:
        """Look at the batch again after so many steps."""
        group.version += 1
        event = partial(self.between_steps, group, group.steps + steps, group.version)
        self.at(group.since_s + self.span_s(group, steps), event)

    def between_steps(self, group: _Group, steps: int, version: int, now_s: float) -> None:
        """Whoever is done leaves the batch, and whoever is ready joins it."""
        if version != group.version:
            return
        group.steps, group.since_s = steps, now_s
        while group.ends and group.ends[0][0] == steps:
            turn = heapq.heappop(group.ends)[2]
            group.offset -= turn.prompt_tokens + turn.output_tokens - steps
            self.lanes[turn.lane].running -= 1
            self.end(turn, now_s)
        for lane in group.lanes:
            while lane.ready and lane.running < self.service.lane.max_running:
                turn = lane.ready.popleft()
                turn.running_s = now_s
                lane.running += 1
                last = steps + turn.output_tokens - 1
                group.offset += turn.prompt_tokens + turn.output_tokens - last
                heapq.heappush(group.ends, (last, next(self.numbers), turn))
            self.admit(lane, now_s)
        if group.ends:
            self.plan(group, group.ends[0][0] - steps)
        self.compute(now_s)

    def end(self, turn: Served, now_s: float) -> None:
        """The answer is whole: memory is free, the session thinks."""
        turn.end_s = now_s
        lane = self.lanes[turn.lane]
        lane.load -= 1
        lane.free_slots, lane.free_pages = lane.free_slots + 1, lane.free_pages + turn.pages
        self.held, self.pages = self.held - 1, self.pages - turn.pages
        self.served.append(turn)
        self.at(now_s + self.sessions[turn.session].turns[turn.turn].think_s, partial(self.ask, turn.session))

    def note(self, now_s: float) -> None:
        """Keep the level, if it is a new one. Of several at one moment only the last has lasted."""
        waiting = [0] * len(Cause)
        waiting[_PREFILL] = len(self.prompts)
        for lane in self.lanes:
            if lane.running == self.service.lane.max_running:
                waiting[_RUNNING] += len(lane.ready)
            if lane.waiting:
                waiting[self.cause(lane)] += len(lane.waiting)
        level = Level(now_s, self.held, self.pages, self.busy_lanes, tuple(waiting))
        if self.levels and self.levels[-1].since_s == now_s:
            self.levels.pop()
        if not self.levels or self.levels[-1][1:] != level[1:]:
            self.levels.append(level)

    def cause(self, lane: _Lane) -> int:
        """Why the head of those that wait for memory waits: what others with memory wait for, or else the memory."""
        if self.prompts:
            return _PREFILL
        if lane.ready and lane.running == self.service.lane.max_running:
            return _RUNNING
        return _PAGES if lane.waiting[0].pages > lane.free_pages else _SLOTS


def replay(sessions: Sequence[Session], service: Service) -> Replayed:
    """Run the sessions to their end."""
    limits = service.lane
    lanes = [_Lane(limits.num_pages, limits.num_slots) for _ in range(service.lanes * service.groups)]
    groups = [_Group(lanes[i : i + service.lanes]) for i in range(0, len(lanes), service.lanes)]
    state = _State(service, sessions, [0] * len(sessions), [0] * len(sessions), lanes, groups)
    for index, session in enumerate(sessions):
        state.at(session.start_s, partial(state.ask, index))
    while state.events:
        now_s, _, event = heapq.heappop(state.events)
        event(now_s)
        state.note(now_s)
    assert not any(lane.load for lane in lanes), "all that was asked has ended"
    return Replayed(tuple(sorted(state.served, key=lambda s: (s.asked_s, s.session))), tuple(state.levels), state.cut)
