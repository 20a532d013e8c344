"""The time to the first token that a plan predicts at a rate is the one that a replay of that rate has."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from kimi_operator.api import KimiDeployment, parse
from kimi_operator.planner import Plan
from kimi_operator.planner.agents import Session, Turn
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.objective import Forecast
from kimi_operator.planner.predict import prefill_ms
from kimi_operator.planner.replay import replay
from kimi_operator.planner.service import NO_DECODE, Chunk, Service, predicted_service
from kimi_operator.planner.targets import ARRIVING
from kimi_operator.planner.workload import Workload, read_workload
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import forecast_of, plan_on
from msgspec.structs import replace

K3, PROFILES = architecture("kimi-k3"), built_in_profiles()
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SEEDS = range(3)
PROMPTS = {
    "below a chunk": {"fixed": 700},
    "two chunks": {"fixed": 4000},
    "a chunk and little": {"fixed": 2100},
    "several": {"fixed": 14_336},
    "long": {"fixed": 60_000},
    "of many lengths": {"uniform": {"min": 200, "max": 20_000}},
}


def forecast_at(prompt: dict[str, object], rate: float, chip: str = "mi300x") -> Forecast:
    load = {"requestsPerSecond": rate, "targets": {"tpotSeconds": 1.0, "ttftSeconds": 1.0}}
    workload = read_workload({"prompt": prompt, "output": {"fixed": 2}, **load})
    profile = PROFILES[chip]
    return forecast_of(K3, profile, profile.spec.runtime.kv_cache_dtype, workload)


def service_of(forecast: Forecast, shape: GroupShape, groups: int) -> Service:
    room = replace(NO_DECODE, num_pages=10**9, num_slots=10**6, max_running=10**6, max_context=10**9, max_queued=10**6)
    prefill = forecast.prefill_side(shape, groups)
    chunk = Chunk(forecast.chunk_tokens, forecast.chunk_tokens)
    return predicted_service(forecast.decode_side(shape, 1), prefill, room, chunk, 0.0)


def replayed_s(service: Service, workload: Workload, rate: float, seed: int | None) -> float:
    """Mean TTFT of a replay whose prompts come at random, or evenly spaced without a seed."""
    rng, now_s, sessions = random.Random(seed), 0.0, []
    for _ in range(300):
        now_s += 1 / rate if seed is None else rng.expovariate(rate)
        sessions.append(Session(now_s, (Turn(rng.choice(workload.prompt.points), 1, 0.0),)))
    return fmean(turn.first_s - turn.asked_s for turn in replay(sessions, service).turns)


def rate_of(prompt: dict[str, object], shape: GroupShape, groups: int, share: float) -> float:
    """So much of what prefill feeds without waits."""
    forecast = forecast_at(prompt, 1.0)
    request = replace(forecast.request, output_tokens=1)
    load = request.prefill(forecast.chunk_tokens, shape.lanes)
    return share * groups * shape.lanes * 1e3 / prefill_ms(forecast.setup(shape), load, forecast.prefill).value


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
@pytest.mark.parametrize(("tensor_parallel", "groups"), [(2, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_rate_waits_as_in_a_replay(name: str, tensor_parallel: int, groups: int, share: float) -> None:
    """On average of seeds; evenly spaced prompts lie within the band too."""
    prompt, shape = PROMPTS[name], GroupShape(2, 8, tensor_parallel)
    rate = rate_of(prompt, shape, groups, share)
    forecast = forecast_at(prompt, rate)
    found, service = forecast.arriving_ttft(shape, groups), service_of(forecast, shape, groups)
    assert found is not None
    seeds = [replayed_s(service, forecast.workload, rate, seed) for seed in SEEDS]
    assert found.value / 1e3 == pytest.approx(fmean(seeds), rel=0.2)
    assert found.low <= 1e3 * replayed_s(service, forecast.workload, rate, None) <= found.high


def test_the_plan_of_a_manifest_warns_of_it_too() -> None:
    prompt = PROMPTS["several"]
    forecast = forecast_at(prompt, 0.3)
    found = forecast.arriving_ttft(GroupShape(2, 8, 2), 1)
    assert found is not None
    document = yaml.safe_load((EXAMPLES / "mi300x-workload.yaml").read_text())
    document["spec"]["workload"] = {
        "prompt": prompt, "output": {"fixed": 100}, "requestsPerSecond": 0.3,
        "targets": {"tpotSeconds": 0.3, "ttftSeconds": round(0.9 * found.value / 1e3, 2)},
    }  # fmt: skip
    plan = plan_on(K3, parse(KimiDeployment, document).spec, PROFILES["mi300x"])
    assert isinstance(plan, Plan), str(plan)
    assert any("targets.ttftSeconds" in warning and ARRIVING in warning for warning in plan.warnings)
