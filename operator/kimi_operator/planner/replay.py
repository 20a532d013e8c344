"""Agentic load, replayed: sessions that think, call again with a longer context, and reuse part of it.

Each turn goes to the decode lane with the most room and the prefill lane with the fewest tokens to compute. It takes a
slot and the pages of its whole context on the one, is computed chunk by chunk on the other (`prefill_lanes`), joins the
batch of its decode lane's group, and gives the memory back while its session thinks. The rules are those of the
worker's scheduler and router, which tests run beside it. `agents` draws the sessions and `pressure` sums up what
happened; all are pure.

What is assumed:
- Pages are taken for the whole answer at once. A worker takes them as the answer grows, and preempts when they run out.
- The handoff takes no time, and prefill's own memory never binds: a plan gives it room for the longest request.
- Reuse is a share of the earlier context, the same for each turn; `retention` counts beside it what a cache would keep.
- Answers stay in the context whole, and turns that a worker would refuse, or whose prefill comes too late, are served:
  `pressure` counts them.
- A step of decode depends on how many decode and on their mean context, however they lie over the lanes of the group.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

from msgspec import Struct, field

from kimi_operator.planner.agents import Session
from kimi_operator.planner.prefill_lanes import PrefillGroup, PrefillLane, least_loaded
from kimi_operator.planner.served import Cause, Level, Replayed, Served
from kimi_operator.planner.service import Service
from kimi_operator.planner.units import ceil_div

_PREFILL, _RUNNING, _PAGES, _SLOTS = range(len(Cause))


class _Lane(Struct):
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


class _Group(Struct):
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


class _State(Struct, kw_only=True):
    """The service in the middle of it."""

    service: Service
    sessions: Sequence[Session]
    contexts: list[int]
    asked: list[int]
    """Turns that each session has asked."""
    lanes: list[_Lane]
    groups: list[_Group]
    prefill_lanes: list[PrefillLane]
    prefill_groups: list[PrefillGroup]
    ended: Callable[[], None]
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    held: int = 0
    pages: int = 0
    served: list[Served] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    cut: int = 0
    is_noted: bool = False
    """Whether the last level still holds."""

    def at(self, when_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.numbers), event))

    def ask(self, session: int, now_s: float) -> None:
        """The session's next turn, if it has one and it fits, to the lane that the router would pick."""
        index = self.asked[session]
        if index == len(self.sessions[session].turns):
            return
        self.is_noted = False
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
        loads = [
            (-lane.load, lane.free_pages, -of_group)
            for each in self.groups
            for of_group in [sum(lane.load for lane in each.lanes)]
            for lane in each.lanes
        ]
        number = max(range(len(loads)), key=loads.__getitem__)
        lane = self.lanes[number]
        for group in self.prefill_groups:
            group.settle()
        served = Served(
            session=session,
            turn=index,
            context_tokens=context,
            prompt_tokens=prompt,
            computed_tokens=prompt - int(self.service.reuse * context),
            output_tokens=turn.output_tokens,
            pages=pages,
            lane=number,
            prefill_lane=least_loaded(self.prefill_groups),
            ahead=len(lane.waiting),
            asked_s=now_s,
        )
        self.prefill_lanes[served.prefill_lane].send(served.computed_tokens)
        lane.load += 1
        lane.waiting.append(served)
        self.admit(lane, now_s)

    def admit(self, lane: _Lane, now_s: float) -> None:
        """Give memory to whoever waits for it and fits, in order."""
        while lane.waiting and lane.free_slots and lane.waiting[0].pages <= lane.free_pages:
            turn = lane.waiting.popleft()
            turn.admitted_s = now_s
            lane.free_slots, lane.free_pages = lane.free_slots - 1, lane.free_pages - turn.pages
            self.held, self.pages = self.held + 1, self.pages + turn.pages
            self.prefill_lanes[turn.prefill_lane].prompts.append(turn)

    def compute(self, now_s: float) -> None:
        """Begin a step of each group of prefill that has work and is not in one."""
        for group in self.prefill_groups:
            if group.busy_lanes:
                continue
            if group.goes_on:
                self.at(now_s + group.go_on(self.service), partial(self.computed, group))
            elif group.has_work:
                self.is_noted = False
                self.at(now_s + group.begin(self.service, now_s), partial(self.computed, group))

    def computed(self, group: PrefillGroup, now_s: float) -> None:
        for turn in group.finish():
            self.activate(turn, now_s)

    def activate(self, turn: Served, now_s: float) -> None:
        """Prefill is done: the first token is there, and the rest is ready to run."""
        self.is_noted = False
        turn.first_s = turn.running_s = now_s
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
        self.is_noted = False
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

    def end(self, turn: Served, now_s: float) -> None:
        """The answer is whole: memory is free, the session thinks."""
        turn.end_s = now_s
        lane = self.lanes[turn.lane]
        lane.load -= 1
        lane.free_slots, lane.free_pages = lane.free_slots + 1, lane.free_pages + turn.pages
        self.held, self.pages = self.held - 1, self.pages - turn.pages
        self.served.append(turn)
        self.ended()
        self.at(now_s + self.sessions[turn.session].turns[turn.turn].think_s, partial(self.ask, turn.session))

    def note(self, now_s: float) -> None:
        """Keep the level, if it is a new one. Of several at one moment only the last has lasted."""
        self.is_noted = True
        waiting = [0] * len(Cause)
        waiting[_PREFILL] = sum(lane.num_waiting for lane in self.prefill_lanes if lane.prompts)
        busy = sum(group.busy_lanes for group in self.prefill_groups)
        is_prefill_short = waiting[_PREFILL] > 0
        for lane in self.lanes:
            if lane.running == self.service.lane.max_running:
                waiting[_RUNNING] += len(lane.ready)
            if lane.waiting:
                waiting[_PREFILL if is_prefill_short else self.cause(lane)] += len(lane.waiting)
        level = Level(now_s, self.held, self.pages, busy, tuple(waiting))
        if self.levels and self.levels[-1].since_s == now_s:
            self.levels.pop()
        if not self.levels or self.levels[-1][1:] != level[1:]:
            self.levels.append(level)

    def cause(self, lane: _Lane) -> int:
        """Why the head of those that wait for memory waits, where prompts that have it do not wait for prefill."""
        if lane.ready and lane.running == self.service.lane.max_running:
            return _RUNNING
        return _PAGES if lane.waiting[0].pages > lane.free_pages else _SLOTS


def replay(sessions: Sequence[Session], service: Service, ended: Callable[[], None] = lambda: None) -> Replayed:
    """Run the sessions to their end; `ended` is called as each turn ends."""
    limits = service.lane
    lanes = [_Lane(limits.num_pages, limits.num_slots) for _ in range(service.lanes * service.groups)]
    groups = [_Group(lanes[i : i + service.lanes]) for i in range(0, len(lanes), service.lanes)]
    prefill_lanes = [PrefillLane() for _ in range(service.prefill_lanes * service.prefill_groups)]
    prefill_groups = [
        PrefillGroup(prefill_lanes[i : i + service.prefill_lanes])
        for i in range(0, len(prefill_lanes), service.prefill_lanes)
    ]
    state = _State(
        service=service,
        sessions=sessions,
        contexts=[0] * len(sessions),
        asked=[0] * len(sessions),
        lanes=lanes,
        groups=groups,
        prefill_lanes=prefill_lanes,
        prefill_groups=prefill_groups,
        ended=ended,
    )
    for index, session in enumerate(sessions):
        state.at(session.start_s, partial(state.ask, index))
    while state.events:
        now_s = state.events[0][0]
        while state.events and state.events[0][0] == now_s:
            heapq.heappop(state.events)[2](now_s)
        # what comes at one moment is computed together
        state.compute(now_s)
        if not state.is_noted:
            state.note(now_s)
    assert not any(lane.load for lane in lanes), "all that was asked has ended"
    turns = tuple(sorted(state.served, key=lambda s: (s.asked_s, s.session)))
    return Replayed(turns, tuple(state.levels), state.cut, sum(group.lockstep_s for group in prefill_groups))
