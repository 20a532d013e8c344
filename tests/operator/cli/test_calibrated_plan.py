"""From a measured run to predictions: `profile calibrate`, its fragment in the profile, and what `plan` then says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api import dump
from kimi_operator.profiles import built_in_profiles

MANIFEST = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
LAYOUT = {"nodes": 2, "gpusPerNode": 8, "tensorParallel": 2}
SLOWER = 1.5
Run = Callable[..., tuple[int, str, str]]


def plan(run: Run, *arguments: object) -> dict[str, Any]:
    status, out, err = run("plan", *arguments, "-o", "json")
    assert status == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.fixture
def before(run: Run) -> dict[str, Any]:
    """What is said today, with factors that other engines gave."""
    speed: dict[str, Any] = plan(run, "-f", MANIFEST)["speed"]
    return speed


@pytest.fixture
def profile(run: Run, tmp_path: Path, before: dict[str, Any]) -> Path:
    """The built-in profile with the fragment of a run whose decode steps took 1.5 times what is predicted."""
    load = {"concurrency": before["running"], "contextTokens": 15_360, "tpotMs": SLOWER * before["tpot"]["value"]}
    results = {"chip": "mi300x", "layout": LAYOUT, "measuredOn": "cluster a", "decode": [load]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(results))
    status, out, err = run("profile", "calibrate", tmp_path / "run.yaml", "-o", "yaml")
    assert status == 0, err
    document = dump(built_in_profiles()["mi300x"])
    document["spec"] |= yaml.safe_load(out)["spec"]
    file = tmp_path / "mi300x.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def test_predictions_follow_the_run_and_say_so(run: Run, before: dict[str, Any], profile: Path) -> None:
    after = plan(run, "-f", MANIFEST, "-f", profile)["speed"]
    for time in ("tpot", "tpot_alone"):
        assert after[time]["value"] == pytest.approx(SLOWER * before[time]["value"], rel=1e-4)
        assert "borrowed" in before[time]["calibrated_on"]
        assert "of the profile: kimi-k3 on 2 x 8 GPUs with tensorParallel 2" in after[time]["calibrated_on"]
        assert after[time]["calibrated_on"].endswith("cluster a")
    assert after["throughput"]["value"] < before["throughput"]["value"]
    assert after["prefill"] == before["prefill"], "the run measured no prompt"


def test_text_names_what_predictions_rest_on(run: Run, profile: Path) -> None:
    _, out, _ = run("plan", "-f", MANIFEST, "-f", profile)
    (line,) = (line for line in out.splitlines() if line.lstrip().startswith("decode calibrated on"))
    assert "of the profile: kimi-k3 on 2 x 8 GPUs" in line


def test_layouts_are_ranked_by_the_run_too(run: Run, profile: Path) -> None:
    ask = ("--search", 4, "--chip", "mi300x", "--prompt-tokens", 256, "--output-tokens", 65_536)
    before, after = (plan(run, *ask, *files) for files in ((), ("-f", profile)))
    rates = [[one["tokens_per_second"] for one in found["ranked"]] for found in (before, after)]
    assert rates[0]
    assert "of the profile" in after["calibrated_on"]
    # the run timed no prompts, which take next to nothing of such requests
    assert rates[1] == [pytest.approx(rate / SLOWER, rel=1e-4) for rate in rates[0]]


def test_a_run_narrows_the_band_of_its_own_layout_alone(run: Run, tmp_path: Path) -> None:
    points = [
        {"concurrency": requests, "contextTokens": 1000, "tpotMs": tpot}
        for requests, tpot in ((1, 30.0), (2, 32.5), (4, 35.5))
    ]
    measured = {"nodes": 1, "gpusPerNode": 8, "tensorParallel": 8}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"chip": "mi355x", "layout": measured, "decode": points}))
    status, out, err = run("profile", "calibrate", tmp_path / "run.yaml", "-o", "yaml")
    assert status == 0, err
    document = dump(built_in_profiles()["mi355x"])
    document["spec"] |= yaml.safe_load(out)["spec"]
    (tmp_path / "mi355x.yaml").write_text(yaml.safe_dump(document))
    percent = document["spec"]["calibration"]["decodeBandPercent"]
    files = "--chip", "mi355x", "-f", tmp_path / "mi355x.yaml"

    def step(nodes: int, tensor_parallel: int, *arguments: object) -> dict[str, float]:
        shape = "--nodes-per-group", nodes, "--tensor-parallel", tensor_parallel
        return plan(run, *arguments, *shape, "--prompt-tokens", 1000, "--output-tokens", 100)["speed"]["tpot_alone"]

    own = step(1, 8, *files)
    assert own["high"] / own["value"] == pytest.approx(1 + percent / 100)
    other, uncalibrated = step(2, 2, *files), step(2, 2, "--chip", "mi355x")
    for end in ("low", "high"):
        assert other[end] / other["value"] == pytest.approx(uncalibrated[end] / uncalibrated["value"])
    assert other["high"] / other["value"] > 1.5 * percent / 100 + 1
