"""Time to the first token of prompts that come at a rate, with what they wait for: the end of a step, slower lanes of
their group, and a lane. The lanes are those of a replay, and arrivals are drawn from a seed. Pure.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import fmean

from kimi_operator.planner.prefill_lanes import PrefillGroup, PrefillLane, least_loaded
from kimi_operator.planner.served import Served
from kimi_operator.planner.service import Service

_STEPS, _FEWEST, _MOST = 8192, 64, 512
"""Chunks that are drawn at most, so that long prompts take no longer to draw; and prompts."""


def mean_ttft_s(service: Service, prompts: Sequence[tuple[int, int]], per_second: float) -> float:
    """Of prompts that come, so many a second on average, each at any time.

    Each of `prompts`, tokens to compute and those reused before them, is as likely.
    """
    chunks = 1 + fmean(computed for computed, _ in prompts) / service.chunk_tokens
    number = max(_FEWEST, min(_MOST, int(_STEPS / chunks)))
    turns = tuple(islice(_arrivals(prompts, per_second), number))
    _compute(service, turns)
    return fmean(turn.first_s - turn.asked_s for turn in turns)


def _arrivals(prompts: Sequence[tuple[int, int]], per_second: float) -> Iterator[Served]:
    rng, now_s = random.Random(0), 0.0  # noqa: S311 - a simulation, not a secret
    while True:
        # all lengths alike often, whatever is drawn
        for computed, reused in rng.sample(prompts, len(prompts)):
            now_s += rng.expovariate(per_second)
            yield Served(
                session=0, turn=0, context_tokens=reused, prompt_tokens=computed + reused, computed_tokens=computed,
                output_tokens=1, pages=0, lane=0, prefill_lane=0, ahead=0, asked_s=now_s,
            )  # fmt: skip


def _compute(service: Service, turns: Sequence[Served]) -> None:
    """Step after step of each group, until all are computed."""
    lanes = [PrefillLane() for _ in range(service.all_prefill_lanes)]
    groups = [PrefillGroup(lanes[i : i + service.prefill_lanes]) for i in range(0, len(lanes), service.prefill_lanes)]
    ends_s, waiting = [math.inf] * len(groups), deque(turns)
    while waiting or min(ends_s) < math.inf:
        now_s = min(*ends_s, waiting[0].asked_s if waiting else math.inf)
        while waiting and waiting[0].asked_s == now_s:
            for group in groups:
                group.settle()
            lane, turn = lanes[least_loaded(groups)], waiting.popleft()
            lane.send(turn.computed_tokens)
            lane.prompts.append(turn)
        for i, group in enumerate(groups):
            if ends_s[i] == now_s:
                for turn in group.finish():
                    turn.first_s = now_s
                ends_s[i] = math.inf
            if ends_s[i] == math.inf and group.has_work:
                ends_s[i] = now_s + (group.go_on(service) if group.goes_on else group.begin(service, now_s))
