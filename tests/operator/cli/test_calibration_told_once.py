"""What a prediction is calibrated on is a long sentence: it stands once in one output, and is missing in none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from kimi_operator.api import dump
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import forecast_of

Run = Callable[..., tuple[int, str, str]]
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
PROFILE = built_in_profiles()["mi300x"]
FORECAST = forecast_of(
    architecture("kimi-k3"), PROFILE, PROFILE.spec.runtime.kv_cache_dtype, Workload(fixed(1000), fixed(100))
)
ONCE = {"decode": FORECAST.decode.fitted_on, "prefill": FORECAST.prefill.fitted_on}


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
@pytest.mark.parametrize("cost", [(), ("--cost", 2)])
def test_a_plan_tells_it_once_a_phase(run: Run, form: str, cost: tuple[object, ...]) -> None:
    _, out, _ = run("plan", "-f", EXAMPLE, *cost, "-o", form)
    assert {phase: out.replace("\\", "").count(point) for phase, point in ONCE.items()} == dict.fromkeys(ONCE, 1)
    assert len(re.findall("factor [0-9.]+ fitted on", out)) == len(ONCE)


@pytest.mark.parametrize(("wanted", "figures"), [("cost", 5), ("TTFT", 1), ("knee", 1), ("calibrated on", 2)])
def test_an_explanation_tells_it_once(run: Run, wanted: str, figures: int) -> None:
    _, out, _ = run("plan", "-f", EXAMPLE, "--cost", 2, "--explain", wanted)
    sources = re.findall("^  source   (.*)$", out, re.MULTILINE)
    assert len(sources) == figures
    told = [source for source in sources if not source.startswith("as of ")]
    assert len(told) == len(set(told))
    for source in sources:
        if source.startswith("as of "):
            assert f"{source.removeprefix('as of ')} = " in out.partition(source)[0]
    assert all(out.count(point) <= 1 for point in ONCE.values())


def test_a_step_tells_that_its_missing_graphs_are_counted_as_captured(run: Run) -> None:
    decode, prefill = re.findall(r"(?:decode|prefill) calibrated on +(.*)", run("plan", "--chip", "mi300x")[1])
    assert "kimi-worker launches its kernels one by one, which is counted as captured graphs" in decode
    assert "graphs" not in prefill


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_a_plan_says_what_no_band_holds(run: Run, form: str) -> None:
    """Longer prompts are more of what nobody measured, and the share is that of the terms which --explain shows."""
    shares = []
    for tokens in (1000, 200_000):
        _, out, _ = run("plan", "-f", EXAMPLE, "--prompt-tokens", tokens, "--output-tokens", 100, "-o", form)
        assert "TPOT: kimi-worker launches its kernels one by one" in out.replace("\\", "")
        shares += re.findall("TTFT: kimi-worker attends in float32, as no measured engine does: ([0-9]+)%", out)
    short, long = map(int, shares)
    assert short < 5
    assert long > 70


def test_a_band_of_the_engine_itself_holds_all(run: Run, tmp_path: Path) -> None:
    profile = dump(PROFILE)
    profile["spec"]["calibration"] = {
        "engine": "kimi-worker", "measuredOn": "a cluster", "decodeFactor": 1.5, "decodeBandPercent": 10,
        "prefillFactor": 2.5, "prefillBandPercent": 10,
    }  # fmt: skip
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(profile))
    assert "not in the bands" not in run("plan", "-f", EXAMPLE, "-f", file)[1]
    assert "not in the bands" in run("plan", "-f", EXAMPLE)[1]
