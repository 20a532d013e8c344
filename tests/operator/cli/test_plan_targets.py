"""A target in each form of `kimictl plan`: with its unit and its name, the layout that meets it, and how sure it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X, FOR_WORKLOAD = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi300x-workload.yaml"
LENGTHS = ("--prompt-tokens", 1000, "--output-tokens", 100)
Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("start", [("--chip", "mi300x", "--nodes", 4), ("-f", MI300X)])
def test_a_missed_target_names_the_layout_that_meets_it(run: Run, start: tuple[object, ...]) -> None:
    status, out, _ = run("plan", *start, *LENGTHS, "--target-tpot", "70ms")
    assert status == 1
    (miss,) = [line for line in out.splitlines() if line.startswith(("misses: ", "warning: "))]
    assert miss.startswith("misses: --target-tpot: got 70ms, expected at least 0.08387 s, the step of one request")
    assert "; within the band of 0.05987 to 0.1092 s: not sure; use prefill: 1 x 2 nodes (TP4 DP4 EP16)" in miss


@pytest.mark.parametrize("start", [("--chip", "mi300x", "--nodes", 4), ("-f", MI300X)])
def test_a_target_that_is_met_within_the_band_alone_is_said_once(run: Run, start: tuple[object, ...]) -> None:
    flags = (*start, *LENGTHS, "--target-tpot", "100ms")
    status, out, _ = run("plan", *flags)
    assert status == 0
    (warning,) = [line for line in out.splitlines() if "band of" in line]
    assert warning.startswith("warning: --target-tpot: got 100ms, expected more to be sure: 0.0")
    assert json.loads(run("plan", *flags, "-o", "json")[1])["meets_workload"] is True


def test_a_target_of_a_manifest_is_named_by_its_field(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "k3.yaml"
    file.write_text(FOR_WORKLOAD.read_text().replace("tpotSeconds: 0.2", "tpotSeconds: 0.11"))
    status, out, _ = run("plan", "-f", file)
    assert status == 0
    (warning,) = [line for line in out.splitlines() if "band of" in line]
    assert warning.startswith("warning: spec.workload.targets.tpotSeconds: got 0.11 s, expected more to be sure: ")


def test_far_from_the_band_nothing_is_said(run: Run) -> None:
    assert "band of" not in run("plan", "--chip", "mi300x", "--nodes", 4, *LENGTHS, "--target-tpot", "300ms")[1]


def test_a_search_says_which_layouts_meet_a_target_within_the_band(run: Run) -> None:
    flags = ("--chip", "mi300x", "--search", 4, *LENGTHS, "--target-tpot", "70ms")
    status, out, _ = run("plan", *flags)
    lines = [line.strip() for line in out.splitlines() if "band of" in line]
    assert status == 0
    assert [line.partition(":")[0] for line in lines] == ["not sure", "not sure", "misses"]
    assert all("--target-tpot: got 70ms, expected " in line for line in lines)
    ranked = json.loads(run("plan", *flags, "-o", "json")[1])["ranked"]
    assert [len(each["not_sure"]) for each in ranked] == [1, 1, 0]
