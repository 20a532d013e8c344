"""Agentic load, replayed: sessions that think, call again with a longer context, and reuse part of it.

Each turn takes memory for its whole context on decode, waits for a prefill lane, is computed, decodes, and gives the
memory back while its session thinks. `draw` makes the sessions from a seed, `replay` runs them, and `pressure` sums up
what happened; all are pure.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from kimi_operator.planner.predict import Capacity, Side, roofline_s
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad
from kimi_operator.planner.units import ceil_div


@dataclass(frozen=True, slots=True)
class Agents:
    """What the sessions are like. Lengths and thinking are exponential around their means; the first prompt is not."""

    sessions: int
    turns: int
    first_prompt_tokens: int
    turn_tokens: int
    """Mean of what tools and people add a turn, after the first."""
    output_tokens: int
    think_s: float
    """Mean time from an answer to the next turn: the tool's or the person's."""
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
class Service:
    """What serves them: memory of all decode lanes together, prefill lanes, and how long work takes."""

    num_pages: int
    page_size_tokens: int
    max_running: int
    """Requests that decode holds at once, prefill's share of their life included."""
    prefill_lanes: int
    prefill_s: Callable[[int, int, int], float]
    """(tokens to compute, tokens found in the cache, busy lanes) -> seconds on one lane; taken once, at its start."""
    decode_step_s: Callable[[int, int], float]
    """(requests held, context) -> seconds a token; taken once, when a turn begins to decode."""
    reuse: float
    """Share of a session's earlier context that a turn finds in the cache."""
    max_context: int


def paced(service: Service, prefill: float, decode: float) -> Service:
    """The same service with all times of a phase so many times as long."""
    return replace(
        service,
        prefill_s=lambda new, cached, busy: prefill * service.prefill_s(new, cached, busy),
        decode_step_s=lambda held, context: decode * service.decode_step_s(held, context),
    )


@dataclass(frozen=True, slots=True)
class Prompts:
    """How prompts are served: `reuse` and `max_context` as in Service, and the most tokens of one step of prefill."""

    reuse: float
    max_context: int
    chunk_tokens: int = 2048


def predicted_service(decode: Side, prefill: Side, capacity: Capacity, prompts: Prompts) -> Service:
    """The service that predictions describe, lanes of all groups together.

    Pages of all lanes count as one pool, requests and prompts as spread evenly, which a router comes close to.
    """
    shape = decode.setup.shape
    lanes = shape.lanes * decode.groups
    prefill_factor, decode_factor = prefill.calibration.factor(), decode.calibration.factor()

    def prefill_s(new: int, cached: int, busy: int) -> float:
        load = PrefillLoad(new, cached, prompts.chunk_tokens, ceil_div(busy, prefill.groups))
        return prefill_factor * roofline_s(prefill.setup, load)

    def decode_step_s(held: int, context: int) -> float:
        return decode_factor * roofline_s(decode.setup, DecodeLoad(ceil_div(held, decode.groups), context))

    return Service(
        num_pages=capacity.num_pages * lanes,
        page_size_tokens=capacity.page_size_tokens,
        max_running=capacity.max_num_seqs * lanes,
        prefill_lanes=prefill.setup.shape.lanes * prefill.groups,
        prefill_s=prefill_s,
        decode_step_s=decode_step_s,
        reuse=prompts.reuse,
        max_context=prompts.max_context,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """One turn as it went. Times in seconds from the start; it holds pages from `admitted_s` to `end_s`."""

    session: int
    turn: int
    """Its number within the session, from 0."""
    asked_s: float
    admitted_s: float
    prefill_s: float
    """When a lane began with it."""
    decode_s: float
    """When prefill was done."""
    end_s: float
    context_tokens: int
    """Those of the prompt that earlier turns asked or answered."""
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    pages: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """All turns, in the order in which they were asked, and those that the context limit ended."""

    turns: tuple[Served, ...]
    cut_sessions: int
    """Sessions that ended because the next turn would have been longer than `max_context`, or than the whole pool."""


def draw(agents: Agents, seed: int) -> tuple[Session, ...]:
    """Sessions from a seed; the same seed gives the same sessions. Raises ValueError for less than one of anything."""
    _check(agents)
    rng = random.Random(seed)  # noqa: S311 - a simulation, not a secret

    def around(mean: float) -> int:
        return max(1, round(rng.expovariate(1 / mean)))

    def turn(index: int) -> Turn:
        new = around(agents.turn_tokens) if index else agents.first_prompt_tokens
        think_s = rng.expovariate(1 / agents.think_s) if agents.think_s else 0.0
        return Turn(new, around(agents.output_tokens), think_s)

    apart_s = agents.ramp_s / agents.sessions
    return tuple(Session(i * apart_s, tuple(map(turn, range(agents.turns)))) for i in range(agents.sessions))


def _check(agents: Agents) -> None:
    for name in ("sessions", "turns", "first_prompt_tokens", "turn_tokens", "output_tokens"):
        if getattr(agents, name) < 1:
            raise ValueError(f"{name}: got {getattr(agents, name)}, expected at least 1")
    for name in ("think_s", "ramp_s"):
        if not 0 <= getattr(agents, name) < math.inf:
            raise ValueError(f"{name}: got {getattr(agents, name)}, expected 0 or more seconds")


@dataclass(slots=True)
class _Request:
    """A turn on its way."""

    session: int
    turn: int
    asked_s: float
    context_tokens: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    think_s: float
    pages: int
    admitted_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class _State:
    """The service in the middle of it. Both queues are first in, first out: who does not fit holds back the next."""

    service: Service
    sessions: Sequence[Session]
    contexts: list[int]
    asked: list[int]
    """Turns that each session has asked."""
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    for_memory: deque[_Request] = field(default_factory=deque)
    for_lane: deque[_Request] = field(default_factory=deque)
    held: int = 0
    pages: int = 0
    busy_lanes: int = 0
    served: list[Served] = field(default_factory=list)
    cut: int = 0

    def at(self, when_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.numbers), event))

    def ask(self, session: int, now_s: float) -> None:
        """The session's next turn, if it has one and it fits."""
        index = self.asked[session]
        if index == len(self.sessions[session].turns):
            return
        turn, service = self.sessions[session].turns[index], self.service
        context = self.contexts[session]
        prompt = context + turn.new_tokens
        whole = prompt + turn.output_tokens
        pages = ceil_div(whole, service.page_size_tokens)
        if whole > service.max_context or pages > service.num_pages:
            self.cut += 1
            return
        self.asked[session] += 1
        computed = prompt - int(service.reuse * context)
        self.contexts[session] = whole
        tokens = (context, prompt, computed, turn.output_tokens)
        self.for_memory.append(_Request(session, index, now_s, *tokens, turn.think_s, pages))
        self.move(now_s)

    def move(self, now_s: float) -> None:
        """Let in whoever fits, in order, and give free lanes to those who wait for one."""
        service = self.service
        while self.for_memory and self.held < service.max_running:
            if self.pages + self.for_memory[0].pages > service.num_pages:
                break
            request = self.for_memory.popleft()
            request.admitted_s = now_s
            self.held, self.pages = self.held + 1, self.pages + request.pages
            self.for_lane.append(request)
        while self.for_lane and self.busy_lanes < service.prefill_lanes:
            request = self.for_lane.popleft()
            request.prefill_s = now_s
            self.busy_lanes += 1
            cached = request.prompt_tokens - request.computed_tokens
            done_s = now_s + service.prefill_s(request.computed_tokens, cached, self.busy_lanes)
            self.at(done_s, partial(self.decode, request))

    def decode(self, request: _Request, now_s: float) -> None:
        """Prefill is done: the lane is free, the answer begins."""
        request.decode_s = now_s
        self.busy_lanes -= 1
        step_s = self.service.decode_step_s(self.held, request.prompt_tokens + request.output_tokens // 2)
        self.at(now_s + request.output_tokens * step_s, partial(self.end, request))
        self.move(now_s)

    def end(self, request: _Request, now_s: float) -> None:
        """The answer is whole: memory is free, the session thinks."""
        self.held, self.pages = self.held - 1, self.pages - request.pages
        r = request
        times = (r.asked_s, r.admitted_s, r.prefill_s, r.decode_s, now_s)
        tokens = (r.context_tokens, r.prompt_tokens, r.computed_tokens, r.output_tokens)
        self.served.append(Served(r.session, r.turn, *times, *tokens, r.pages))
        self.at(now_s + request.think_s, partial(self.ask, request.session))
        self.move(now_s)


def replay(sessions: Sequence[Session], service: Service) -> Replayed:
    """Run the sessions to their end. Raises ValueError for a service that could never serve one."""
    if min(service.num_pages, service.page_size_tokens, service.max_running, service.prefill_lanes) < 1:
        raise ValueError("numPages, pageSizeTokens, maxRunning and prefillLanes must each be at least 1")
    if not 0 <= service.reuse <= 1:
        raise ValueError(f"reuse: got {service.reuse}, expected a share from 0 to 1")
    state = _State(service, sessions, [0] * len(sessions), [0] * len(sessions))
    for index, session in enumerate(sessions):
        state.at(session.start_s, partial(state.ask, index))
    while state.events:
        now_s, _, event = heapq.heappop(state.events)
        event(now_s)
    assert not state.held, "all that was admitted has ended"
    return Replayed(tuple(sorted(state.served, key=lambda s: (s.asked_s, s.session))), state.cut)
