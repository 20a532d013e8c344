"""The replay of agentic load against the worker's own schedulers and router, step by step and token by token."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from kimi_operator.planner.agents import Session, Turn
from kimi_operator.planner.pressure import summarise
from kimi_operator.planner.replay import replay
from kimi_operator.planner.service import Service
from kimi_worker.protocol.engine import Sampling
from kimi_worker.router.pick import LaneKey, LaneView, pick
from kimi_worker.scheduler.lane import LaneScheduler, Share
from kimi_worker.scheduler.requests import Goal, Request
from kimi_worker.settings import LimitSettings
from replay_services import SERVICES, changed


@dataclass
class Driven:
    """Lanes of both roles of the worker behind its router; time is an argument. Lanes of a group step together."""

    service: Service
    sessions: Sequence[Session]
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    stepping: set[tuple[str, int]] = field(default_factory=set)
    prefill_of: dict[str, int] = field(default_factory=dict)
    """The lane that each request's prompt was sent to."""
    lane_of: dict[str, int] = field(default_factory=dict)
    uncomputed: dict[str, Request] = field(default_factory=dict)
    """Requests as they are in their lanes of prefill."""
    promised: dict[str, int] = field(default_factory=dict)
    """Tokens that requests will ask their lanes of prefill to compute, once they have decode's memory."""
    times: dict[str, list[float]] = field(default_factory=dict)
    """Asked, memory, prefill, first token, last token; by session and turn."""

    def __post_init__(self) -> None:
        lane, service = self.service.lane, self.service
        of_decode = LimitSettings(
            max_num_seqs=lane.max_running, max_queued=10_000, max_num_batched_tokens=4096, num_pages=lane.num_pages,
            page_size_tokens=lane.page_size_tokens, num_state_slots=lane.num_slots,
        )  # fmt: skip
        of_prefill = LimitSettings(
            max_num_seqs=service.prefill_running, max_queued=10_000, max_num_batched_tokens=service.chunk_tokens,
            num_pages=100_000, page_size_tokens=lane.page_size_tokens, num_state_slots=1000,
        )  # fmt: skip
        self.lanes = [
            LaneScheduler(of_decode, lane.max_context, 1, frozenset()) for _ in range(service.lanes * service.groups)
        ]
        self.prefills = [
            LaneScheduler(of_prefill, lane.max_context, 1, frozenset()) for _ in range(service.all_prefill_lanes)
        ]

    def at(self, when_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.numbers), event))

    def run(self) -> None:
        for index, session in enumerate(self.sessions):
            self.at(session.start_s, lambda now_s, index=index: self.ask(index, 0, 0, now_s))
        while self.events:
            now_s = self.events[0][0]
            while self.events and self.events[0][0] == now_s:
                heapq.heappop(self.events)[2](now_s)
            self.serve(now_s)
        assert not any(lane.num_requests or lane.num_preemptions for lane in (*self.lanes, *self.prefills))

    def computed_tokens(self, request_id: str, prompt: int) -> int:
        session, index = map(int, request_id.split("/"))
        return prompt - int(self.service.reuse * (prompt - self.sessions[session].turns[index].new_tokens))

    def queued_tokens(self) -> Counter[int]:
        """Tokens to compute, by lane of prefill."""
        found: Counter[int] = Counter()
        for request_id, request in self.uncomputed.items():
            found[self.prefill_of[request_id]] += request.num_missing
        for request_id, tokens in self.promised.items():
            found[self.prefill_of[request_id]] += tokens
        return found

    def ask(self, session: int, index: int, context: int, now_s: float) -> None:
        turns = self.sessions[session].turns
        if index == len(turns):
            return
        prompt, request_id = context + turns[index].new_tokens, f"{session}/{index}"
        decodes = [
            LaneView(
                LaneKey("decode", number), "", "", can_prefill=False, queued_tokens=0,
                free_pages=lane.memory.pages.num_free, room=self.service.lane.max_running - lane.num_requests,
                group=str(number // self.service.lanes),
            )
            for number, lane in enumerate(self.lanes)
        ]  # fmt: skip
        promised, queued = Counter(self.prefill_of[each] for each in self.promised), self.queued_tokens()
        prefills = [
            LaneView(
                LaneKey("prefill", number), "", "", can_prefill=False, queued_tokens=queued[number],
                free_pages=0, room=self.service.prefill_running - lane.num_requests - promised[number],
                group=str(number // self.service.prefill_lanes),
            )
            for number, lane in enumerate(self.prefills)
        ]  # fmt: skip
        found = pick(decodes, prefills)
        assert found is not None
        assert found.prefill is not None
        self.prefill_of[request_id], self.lane_of[request_id] = found.prefill.key.lane, found.decode.key.lane
        self.promised[request_id] = self.computed_tokens(request_id, prompt)
        request = Request(request_id, [0] * prompt, Sampling(turns[index].output_tokens), Goal.GENERATE_FROM_HANDOFF)
        self.lanes[found.decode.key.lane].submit(request)
        self.times[request_id] = [now_s]

    def serve(self, now_s: float) -> None:
        """What lane leaders do between steps: reserve, hand prompts on, and step where there is work."""
        for lane in self.lanes:
            for request in lane.reserve_handoffs():
                self.times[request.request_id].append(now_s)
                prompt = Request(request.request_id, list(request.token_ids), Sampling(1), Goal.PREFILL)
                self.prefills[self.prefill_of[request.request_id]].submit(prompt)
                # this worker keeps no prefix cache; one that did would begin behind what it found
                prompt.num_computed = request.num_prompt_tokens - self.promised.pop(request.request_id)
                self.uncomputed[request.request_id] = prompt
        service = self.service
        for role, lanes, width, step_s in (
            ("prefill", self.prefills, service.prefill_lanes, self.prefill_step_s),
            ("decode", self.lanes, service.lanes, self.decode_step_s),
        ):
            for number, start in enumerate(range(0, len(lanes), width)):
                if (role, number) in self.stepping:
                    continue
                group = lanes[start : start + width]
                shares = [lane.schedule() for lane in group]
                if any(shares):
                    self.stepping.add((role, number))
                    done = partial(self.stepped, (role, number), group, shares)
                    self.at(now_s + step_s(shares, now_s), done)

    def prefill_step_s(self, shares: list[list[Share]], now_s: float) -> float:
        for share in itertools.chain(*shares):
            if len(times := self.times[share.request.request_id]) == 2:
                times.append(now_s)
        tokens = [sum(share.num_tokens for share in each) for each in shares]
        before = [sum(share.num_tokens * share.request.num_computed for share in each) for each in shares]
        return max(
            self.service.prefill_step_s(mine, behind / mine, -(-sum(tokens) // mine))
            for mine, behind in zip(tokens, before, strict=True)
            if mine
        )

    def decode_step_s(self, shares: list[list[Share]], _: float) -> float:
        contexts = [len(share.request.token_ids) for each in shares for share in each]
        return self.service.decode_step_s(len(contexts), statistics.fmean(contexts))

    def stepped(self, key: tuple[str, int], group: list[LaneScheduler], did: list[list[Share]], now_s: float) -> None:
        self.stepping.remove(key)
        for lane, shares in zip(group, did, strict=True):
            for progress in lane.complete(shares, [0] * sum(share.sample for share in shares)):
                if progress.request.goal is Goal.PREFILL:
                    lane.release(progress.request)
                    self.computed(progress.request.request_id, now_s)
                elif progress.finish_reason:
                    self.answered(progress.request, now_s)

    def computed(self, request_id: str, now_s: float) -> None:
        self.times[request_id].append(now_s)
        del self.uncomputed[request_id]
        lane = self.lanes[self.lane_of[request_id]]
        request = lane.get(request_id)
        assert request is not None
        if lane.activate(request, 0).finish_reason:
            self.answered(request, now_s)

    def answered(self, request: Request, now_s: float) -> None:
        self.times[request.request_id].append(now_s)
        session, index = map(int, request.request_id.split("/"))
        think_s, whole = self.sessions[session].turns[index].think_s, len(request.token_ids)
        self.at(now_s + think_s, lambda now_s: self.ask(session, index + 1, whole, now_s))


def drawn(seed: int, sessions: int = 14, turns: int = 5) -> tuple[Session, ...]:
    """Sessions each of whose answers stays in the last page of its prompt, so that pages never grow in the worker."""
    rng, found = random.Random(seed), []
    for _ in range(sessions):
        context, script = 0, []
        for _ in range(turns):
            output = rng.choice([1, 2, rng.randint(3, 60)])
            new = rng.randint(2, 500)
            new += max(0, (context + new - 1) % 64 + 1 + output - 64) and 64 - (context + new - 1) % 64
            context += new + output
            script.append(Turn(new, output, rng.expovariate(1 / 3)))
        found.append(Session(rng.uniform(0, 8), tuple(script)))
    return tuple(found)


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("seed", range(6))
def test_every_time_is_what_the_worker_makes_of_it(seed: int, name: str) -> None:
    service, sessions = changed(SERVICES[name], max_context=100_000), drawn(seed)
    driven = Driven(service, sessions)
    driven.run()
    turns = replay(sessions, service).turns
    got = {f"{t.session}/{t.turn}": [t.asked_s, t.admitted_s, t.prefill_s, t.first_s, t.end_s] for t in turns}
    assert {f"{t.session}/{t.turn}": t.prefill_lane for t in turns} == driven.prefill_of
    assert got.keys() == driven.times.keys()
    for request_id, times in driven.times.items():
        assert got[request_id] == pytest.approx(times, rel=1e-9), request_id


def test_the_walks_reach_every_limit() -> None:
    """They would prove little if nobody waited."""
    waited = [summarise(replay(drawn(0), service), service).waited_s for service in SERVICES.values()]
    for cause in waited[0]:
        assert max(each[cause] for each in waited) > 1, cause
