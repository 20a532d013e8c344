"""`timeouts.reservationSeconds`: `kimictl plan` misses what `kimictl replay` sees fail, and what to do helps both.

Limits follow from the predictions, so that other calibrations give other limits and not other answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api import KimiDeployment, dump, parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.planner import Plan
from kimi_operator.planner.report import plan_status
from kimi_operator.planner.reservation import RESERVATION
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import plan_on

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHIPPED = [EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi325x-2p2d.yaml"]
LAYOUT = ("--chip", "mi325x", "--nodes", 4, "--max-num-seqs", 16)
LONG = ("--prompt-tokens", 600_000, "--output-tokens", 10, "--concurrency", 1)
QUEUED = ("--prompt-tokens", 100_000, "--output-tokens", 100, "--concurrency", 64)
AT_ONCE = ("--think-time", "0s", "--ramp", "0s", "--turn-tokens", 1)
Run = Callable[..., tuple[int, str, str]]
Own = Callable[[int], Path]


@pytest.fixture
def own(tmp_path: Path) -> Own:
    """A profile of MI325X whose decode keeps room for so many seconds."""

    def write(seconds: int) -> Path:
        profile = dump(built_in_profiles()["mi325x"])
        profile["spec"]["timeouts"]["reservationSeconds"] = seconds
        file = tmp_path / f"{seconds}.yaml"
        file.write_text(yaml.safe_dump(profile))
        return file

    return write


def ttft_s(run: Run, *load: object) -> dict[str, float]:
    found = json.loads(run("plan", *LAYOUT, *load, "-o", "json")[1])["speed"]["ttft"]
    return {end: found[end] / 1e3 for end in ("low", "value", "high")}


def replayed(run: Run, file: Path, *load: object) -> tuple[int, str]:
    """Of as many sessions as the load has requests at once."""
    lengths = ("--first-prompt-tokens", load[1], "--output-tokens", load[3])
    turns = ("--agents", load[5], "--turns", 1 if load[5] == 1 else 3)
    status, out, _ = run("replay", "-f", file, *LAYOUT, *lengths, *turns, *AT_ONCE)
    return status, out


def misses(out: str) -> str:
    found = re.search(rf"^misses: ({re.escape(RESERVATION)}: .*)$", out, re.M)
    return found[1] if found else ""


@pytest.mark.parametrize("load", [LONG, QUEUED])
def test_a_plan_misses_what_a_replay_sees_fail(run: Run, own: Own, load: tuple[Any, ...]) -> None:
    """A long prompt alone, and prompts that wait for prefill; raising the field as far as is said helps both."""
    limit = int(ttft_s(run, *load)["low"] * 0.8)
    status, out, _ = run("plan", "-f", own(limit), *LAYOUT, *load)
    assert status == 1
    assert f"fits, but misses the workload: {RESERVATION}" in out
    assert f"got {limit:,} s, expected at least" in misses(out)
    assert replayed(run, own(limit), *load)[0] == 1
    raised = int(re.search(r"raise it to ([\d,]+)", misses(out))[1].replace(",", ""))
    status, out, _ = run("plan", "-f", own(raised), *LAYOUT, *load)
    assert (status, RESERVATION in out.splitlines()[1]) == (0, False)
    status, out = replayed(run, own(raised), *load)
    assert status == 0, out
    assert "would fail" not in out


@pytest.mark.parametrize("load", [LONG, QUEUED])
def test_a_limit_within_the_band_is_not_sure(run: Run, own: Own, load: tuple[Any, ...]) -> None:
    times = ttft_s(run, *load)
    limit = int((times["value"] + times["high"]) / 2)
    status, out, _ = run("plan", "-f", own(limit), *LAYOUT, *load)
    assert status == 0
    assert f"; {RESERVATION} met by less than the band" in out
    assert f"warning: {RESERVATION}: got {limit:,} s, expected more to be sure" in out
    found = json.loads(run("plan", "-f", own(limit), *LAYOUT, *load, "-o", "json")[1])
    assert found["meets_workload"]


def test_a_shorter_prompt_and_a_wider_lane_are_in_time(run: Run, own: Own) -> None:
    limit = int(ttft_s(run, *LONG)["low"] * 0.8)
    told = misses(run("plan", "-f", own(limit), *LAYOUT, *LONG)[1])
    shorter = int(re.search(r"shorten prompts to ([\d,]+) tokens", told)[1].replace(",", ""))
    for tokens, is_missed in ((shorter, False), (shorter + 3000, True)):
        load = ("--prompt-tokens", tokens, *LONG[2:])
        assert bool(misses(run("plan", "-f", own(limit), *LAYOUT, *load)[1])) is is_missed
    wider = re.search(r"use prefill: 1 x 2 nodes \(TP(\d) .*?, which meets it", told)
    assert wider
    out = run("plan", "-f", own(limit), "--tensor-parallel", wider[1], *LAYOUT[:4], *LONG)[1]
    assert not misses(out)


def test_other_timeouts_are_tried_by_what_if(run: Run) -> None:
    """The same in a manifest's profile."""
    _, out, _ = run("plan", *LAYOUT, *LONG, "--what-if", f"{RESERVATION}=60")
    assert f"misses {RESERVATION}: got 60 s" in out


@pytest.mark.parametrize("file", SHIPPED)
def test_the_shipped_profiles_serve_the_longest_request_of_the_shipped_examples(run: Run, file: Path) -> None:
    longest = yaml.safe_load(file.read_text())["spec"]["model"]["maxModelLen"]
    load = ("--prompt-tokens", longest - 10, "--output-tokens", 10, "--concurrency", 1)
    status, out, _ = run("plan", "-f", file, *load)
    assert status == 0
    assert RESERVATION not in out


@pytest.mark.parametrize("workload", [None, {"prompt": {"fixed": 1000}, "output": {"fixed": 10}}])
def test_a_longest_request_that_is_admitted_and_would_fail_is_warned_of(
    run: Run, own: Own, tmp_path: Path, workload: dict[str, Any] | None
) -> None:
    """By the command line and in the status alike, with the longest prompt that is in time."""
    document = yaml.safe_load(SHIPPED[1].read_text())
    if workload:
        document["spec"]["workload"] = workload
    manifest, profile = tmp_path / "k3.yaml", own(1800)
    manifest.write_text(yaml.safe_dump(document))
    status, out, _ = run("plan", "-f", manifest, "-f", profile)
    assert status == 0
    told = re.search(r"^warning: (spec\.model\.maxModelLen: got 1,048,576 tokens, expected a prompt of .*)$", out, re.M)
    assert told
    parsed = parse(KimiDeployment, document)
    own_profile = parse(HardwareProfile, yaml.safe_load(profile.read_text()))
    plan = plan_on(architecture("kimi-k3"), parsed.spec, own_profile)
    assert isinstance(plan, Plan)
    assert told[1] in plan_status(plan, own_profile).warnings
    lower = int(re.search(r"lower maxModelLen to ([\d,]+)", told[1])[1].replace(",", ""))
    document["spec"]["model"]["maxModelLen"] = lower
    manifest.write_text(yaml.safe_dump(document))
    assert "not sure" not in run("plan", "-f", manifest, "-f", profile)[1]
    assert "expected a prompt of" not in run("plan", "-f", manifest, "-f", profile)[1]


def test_more_nodes_are_not_advised_for_one_prompt_that_is_too_long(run: Run, own: Own) -> None:
    limit = int(ttft_s(run, *LONG)["low"] * 0.8)
    _, out = replayed(run, own(limit), *LONG)
    told = re.search(r"^warning: 1 of 1 turn would fail, and is counted as served: .*$", out, re.M)
    assert told
    assert "tensorParallel" in told[0]
    assert "add nodes" not in told[0]
    queued = replayed(run, own(int(ttft_s(run, *QUEUED)["low"] * 0.8)), *QUEUED)[1]
    assert re.search(r"turns would fail, and are counted as served: .*; raise it to [\d,]+, or add nodes", queued)
