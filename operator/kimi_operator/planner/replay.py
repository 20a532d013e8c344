"""Agentic load, replayed: sessions that think, call again with a longer context, and reuse part of it.

Each turn goes to the decode lane with the most room, takes a slot and the pages of its whole context there, waits for a
prefill lane, is computed, joins the batch of its lane's group, and gives the memory back while its session thinks. The
rules are those of the worker's scheduler and router. `draw` makes the sessions from a seed, `replay` runs them, and
`pressure` sums up what happened; all are pure.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kimi_operator.planner.agents import Session
from kimi_operator.planner.served import Cause, Level, Replayed, Served
from kimi_operator.planner.service import Service
from kimi_operator.planner.units import ceil_div

_PREFILL, _RUNNING, _PAGES, _SLOTS = range(len(Cause))


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
