"""Predictions name the rates that nobody measured, once, and what silences that is what they say to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--agents", 1, "--turns", 1)


@pytest.mark.parametrize(
    ("chip", "said"),
    [
        ("mi300x", None),
        ("mi325x", None),
        ("mi308x", "decode on spec.gpu.hbmBytesPerSecond 5,300,000,000,000: secondary sources say 5.3 TB/s"),
        ("mi350x", "prefill on spec.gpu.bf16FlopsPerSecond 2,300,000,000,000,000: about 2.3 PFLOPS"),
        ("mi355x", "prefill on spec.gpu.bf16FlopsPerSecond 2,500,000,000,000,000: 2.5 PFLOPS"),
    ],
)
def test_every_form_names_what_the_predictions_rest_on_once(run: Run, chip: str, said: str | None) -> None:
    for output in ("text", "markdown", "html", "json"):
        _, out, _ = run("plan", "--chip", chip, "-o", output)
        assert out.count("predictions rest on what nobody measured") == (0 if said is None else 1), output
        assert said is None or said in out
        assert said is None or "kimictl profile calibrate" in out


def test_a_replay_says_it_too(run: Run) -> None:
    _, out, _ = run("replay", "--chip", "mi350x", *SMALL)
    assert out.count("warning: predictions rest on what nobody measured of mi350x") == 1


@pytest.mark.parametrize(("chip", "count"), [("mi350x", 1), ("mi300x", 0), ("mi308x", 0)])
def test_a_search_says_it_where_it_ranks_by_predictions(run: Run, chip: str, count: int) -> None:
    """Without FLOPs nothing is ranked by them, and the search says that instead."""
    _, out, _ = run("plan", "--chip", chip, "--search", 4)
    assert out.count(f"warning: predictions rest on what nobody measured of {chip}") == count
    assert ("not ranked by throughput" in out) == (chip == "mi308x")


def test_a_field_that_is_set_and_a_factor_that_is_measured_end_the_warning(run: Run, tmp_path: Path) -> None:
    """As the warning says: the profile is saved, mended and read instead of the built-in one."""
    _, text, _ = run("profile", "show", "mi308x", "-o", "yaml")
    file, profile = tmp_path / "own.yaml", yaml.safe_load(text)

    def warnings() -> list[str]:
        file.write_text(yaml.safe_dump(profile), encoding="utf-8")
        _, out, err = run("plan", "--chip", "mi308x", "-f", file, "-o", "json")
        assert err == ""
        found: list[str] = json.loads(out)["warnings"]
        return found

    assert len(warnings()) == 1
    profile["spec"]["gpu"]["bf16FlopsPerSecond"] = 300_000_000_000_000
    (both,) = warnings()
    assert "decode on spec.gpu.hbmBytesPerSecond" in both
    assert "prefill on spec.gpu.bf16FlopsPerSecond 300,000,000,000,000: no source given" in both
    profile["spec"]["basis"]["gpu.hbmBytesPerSecond"] = "Measured"
    (flops,) = warnings()
    assert "hbmBytesPerSecond" not in flops
    factors = {"prefillFactor": 1.2, "prefillBandPercent": 10, "measuredOn": "a test"}
    profile["spec"]["calibration"] = {"engine": "vllm", **factors}
    assert warnings() == [flops], "another engine's factor is not used"
    profile["spec"]["calibration"]["engine"] = "kimi-worker"
    assert warnings() == []


def test_without_flops_the_remedy_leads_out(run: Run) -> None:
    status, out, err = run("replay", "--chip", "mi308x", *SMALL)
    assert (status, out) == (2, "")
    assert "state the peak of dense bfloat16 in a HardwareProfile of your own, then kimictl profile calibrate" in err
    _, out, _ = run("plan", "--chip", "mi308x")
    assert out.count("state the peak of dense bfloat16") == 1
