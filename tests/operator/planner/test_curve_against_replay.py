"""The throughput curve against replays of clients that ask again at once, with each thing short in turn."""

from __future__ import annotations

import random
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import pytest
from kimi_operator.planner.agents import Session, Turn
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.objective import Forecast
from kimi_operator.planner.predict import Capacity, CurvePoint, Request, throughput_curve
from kimi_operator.planner.pressure import summarise
from kimi_operator.planner.replay import replay
from kimi_operator.planner.roofline import Setup
from kimi_operator.planner.served import Replayed
from kimi_operator.planner.service import Chunk, Lane, Service, predicted_service
from kimi_operator.planner.workload import Workload, fixed
from msgspec.structs import replace
from published_setups import EP16, FACTOR_2, INT4, K3, MI300X, TP8

LEAST, MOST = 0.8, 1.1
"""What replays give, of what the curve says. More, as it takes all to decode for the time of a token; less, as prompts
meet in some lanes and groups of prefill while others idle."""
LONGEST_WAIT = 1.3
"""How long prompts wait in replays, of what is said: 1 / LEAST, and the own time of those that meet."""
TURNS = 6
CHUNK = 2048


class Load(NamedTuple):
    """Clients on a service, and what they find short."""

    shape: GroupShape
    clients: int
    request: Request
    of_lane: Capacity
    prefill_groups: int
    binds: str
    decode_groups: int = 1

    @property
    def forecast(self) -> Forecast:
        work = Workload(fixed(self.request.prompt_tokens), fixed(self.request.output_tokens), concurrency=self.clients)
        return Forecast(work, lambda shape: Setup(K3, MI300X, shape, INT4), FACTOR_2, FACTOR_2, CHUNK)

    @property
    def point(self) -> CurvePoint:
        decode = self.forecast.decode_side(self.shape, self.decode_groups)
        prefill = self.forecast.prefill_side(self.shape, self.prefill_groups)
        (point,) = throughput_curve(decode, self.of_lane, self.request, [self.clients], prefill)
        return point

    @property
    def service(self) -> Service:
        decode = self.forecast.decode_side(self.shape, self.decode_groups)
        prefill, room = self.forecast.prefill_side(self.shape, self.prefill_groups), self.of_lane
        assert room.num_slots is not None
        lane = Lane(
            num_pages=room.num_pages, page_size_tokens=room.page_size_tokens, num_slots=room.num_slots,
            max_running=room.max_num_seqs, max_context=10**6, max_queued=10**6, reservation_s=1e9,
        )  # fmt: skip
        return predicted_service(decode, prefill, lane, Chunk(CHUNK, 32), reuse=0.0)


ROOMY = Capacity(max_num_seqs=32, num_pages=20_000, page_size_tokens=64, num_slots=40)
TIGHT = replace(ROOMY, max_num_seqs=8, num_pages=8_600, num_slots=10)
SLOTS = replace(ROOMY, max_num_seqs=4, num_slots=5)
LONG, MIDDLE, SHORT = Request(60_000, 500), Request(16_000, 300), Request(2_000, 500)
LOADS = {
    "nothing": Load(EP16, 32, Request(8_000, 500), ROOMY, 6, "concurrency"),
    "nothing, two decode groups": Load(EP16, 65, Request(8_000, 500), ROOMY, 12, "concurrency", 2),
    "prefill": Load(EP16, 64, Request(20_000, 100), ROOMY, 1, "prefill"),
    "prefill beside little memory": Load(TP8, 64, LONG, TIGHT, 2, "prefill", 2),
    "maxNumSeqs": Load(EP16, 96, SHORT, TIGHT, 4, "maxNumSeqs"),
    "pages": Load(EP16, 128, LONG, TIGHT, 16, "KV pages"),
    "pages, two decode groups": Load(TP8, 33, LONG, TIGHT, 16, "KV pages", 2),
    "pages, hardly any decode": Load(EP16, 128, Request(60_000, 50), TIGHT, 24, "KV pages"),
    "slots": Load(EP16, 80, MIDDLE, SLOTS, 16, "state slots"),
    "slots, two decode groups": Load(TP8, 31, MIDDLE, SLOTS, 12, "state slots", 2),
}
CAUSES = {"concurrency": "nothing", "prefill": "prefill lanes"}


def clients(load: Load, seed: int) -> list[Session]:
    """Clients that begin at any time of a round, ask at once for requests of about the mean, and forget each."""
    rng = random.Random(seed)
    round_s = load.clients * load.request.output_tokens / load.point.tokens_per_second.value

    def about(mean: int) -> int:
        return round(mean * rng.uniform(0.7, 1.3))

    def turns() -> tuple[Turn, ...]:
        found, context = [], 0
        for _ in range(TURNS):
            prompt, output = about(load.request.prompt_tokens), about(load.request.output_tokens)
            # a session's context is all that it asked and answered: what the new prompt does not have is taken back
            found.append(Turn(prompt - context, output, 0.0))
            context = prompt + output
        return tuple(found)

    return [Session(rng.uniform(0, round_s), turns()) for _ in range(load.clients)]


def steady_rate(replayed: Replayed) -> float:
    """Output tokens a second of the middle half of all answers."""
    ended = sorted((turn.end_s, turn.output_tokens) for turn in replayed.turns)
    first, last = len(ended) // 4, 3 * len(ended) // 4
    tokens = sum(output for _, output in islice(ended, first + 1, last + 1))
    return tokens / (ended[last][0] - ended[first][0])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", LOADS)
def test_the_curve_agrees_with_clients_that_come_and_go(name: str, seed: int) -> None:
    load, service = LOADS[name], LOADS[name].service
    replayed = replay(clients(load, seed), service)
    assert load.point.binds == load.binds
    assert summarise(replayed, service).binds.startswith(CAUSES.get(load.binds, load.binds))
    assert LEAST <= steady_rate(replayed) / load.point.tokens_per_second.value <= MOST


@pytest.mark.parametrize("name", LOADS)
def test_prompts_wait_as_long_as_those_before_them_take(name: str) -> None:
    """For a lane of prefill, or for memory of decode; without a wait a prompt takes its own time."""
    load = LOADS[name]
    waiting = load.forecast.waiting_ttft(load.shape, load.prefill_groups, load.point)
    assert (waiting is None) == (load.binds == "concurrency")
    if waiting is None:
        return
    turns = sorted(replay(clients(load, 0), load.service).turns, key=lambda turn: turn.first_s)
    steady = turns[len(turns) // 4 : 3 * len(turns) // 4]
    assert LEAST <= 1e3 * fmean(turn.first_s - turn.asked_s for turn in steady) / waiting.value <= LONGEST_WAIT


@pytest.mark.parametrize("name", LOADS)
def test_no_more_hold_memory_than_the_curve_says(name: str) -> None:
    load = LOADS[name]
    held = load.of_lane.held(load.request)[0] * load.shape.lanes * load.decode_groups
    assert load.point.held == min(load.clients, held)
    turn = Turn(load.request.prompt_tokens, load.request.output_tokens, 0.0)
    at_once = replay([Session(0.0, (turn,))] * load.clients, load.service)
    assert max(level.held for level in at_once.levels) == load.point.held
