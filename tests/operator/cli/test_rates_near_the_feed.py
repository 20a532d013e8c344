"""A rate near what prefill feeds or decode serves: lanes wait for each other, and memory is kept for so long only."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Run = Callable[..., tuple[int, str, str]]
LONG = ("--prompt-tokens", 90_000, "--output-tokens", 500, "--target-tpot", "2s")
START = ("plan", "--chip", "mi300x", "--nodes", 4, *LONG, "--requests-per-second")
RATE, RESERVATION = "--requests-per-second", "profile.timeouts.reservationSeconds"


@pytest.fixture
def fed(run: Run) -> float:
    """Requests a second that prefill is said to feed."""
    (miss,) = [each for each in planned(run, *START, 5)["misses"] if "what prefill feeds" in each["expected"]]
    return float(re.findall(r"at most ([\d.]+)", miss["expected"])[0])


def planned(run: Run, *arguments: object) -> dict[str, Any]:
    return json.loads(run(*arguments, "-o", "json")[1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("share", "is_sure"), [(0.4, True), (0.6, False), (0.95, False)])
def test_a_rate_that_needs_lanes_to_keep_step_is_met_without_being_sure(
    run: Run, fed: float, share: float, is_sure: bool
) -> None:
    plan = planned(run, *START, f"{share * fed:.5f}")
    assert not [each for each in plan["misses"] if each["field"] == RATE and "prefill feeds" in each["expected"]]
    unsure = [each for each in plan["not_sure"] if each["field"] == RATE]
    assert is_sure == (not unsure)
    assert all("as they wait for each other, which kimictl replay counts" in each["expected"] for each in unsure)


def test_waits_at_a_rate_are_held_against_the_time_that_decode_keeps_room(run: Run, fed: float, tmp_path: Path) -> None:
    profile = yaml.safe_load(run("profile", "show", "mi300x", "-o", "yaml")[1])
    profile["metadata"]["name"] = "hasty"
    path = tmp_path / "hasty.yaml"
    ask = ("plan", "-f", path, "--chip", "hasty", "--nodes", 4, *LONG, RATE, f"{0.9 * fed:.5f}")
    alone_s = planned(run, *START, f"{0.9 * fed:.5f}")["speed"]["prefill"]["value"] / 1e3
    profile["spec"]["timeouts"]["reservationSeconds"] = round(1.3 * alone_s)
    path.write_text(yaml.safe_dump(profile))
    (miss,) = [each for each in planned(run, *ask)["misses"] if each["field"] == RESERVATION]
    assert "on average, as prompts wait for prefill: decode gives up before" in miss["expected"]
    enough = re.search(r"raise it to ([\d,]+)", miss["remedy"])
    assert enough is not None
    profile["spec"]["timeouts"]["reservationSeconds"] = int(enough[1].replace(",", ""))
    path.write_text(yaml.safe_dump(profile))
    assert RESERVATION not in {each["field"] for each in planned(run, *ask)["misses"]}


@pytest.mark.parametrize("sizes", [(), ("--max-num-seqs", 8), ("--tensor-parallel", 4)])
def test_a_looser_target_makes_no_miss_of_a_rate(run: Run, sizes: tuple[object, ...]) -> None:
    """At a target that nobody needs, a rate would need more requests at once than it has."""
    short = ("plan", "--chip", "mi355x", "--nodes", 4, "--prompt-tokens", 500, "--output-tokens", 1000, *sizes)
    for rate in (0.1, 0.2, 0.4, 0.8):
        misses = [
            {each["field"] for each in planned(run, *short, RATE, rate, "--target-tpot", target)["misses"]}
            for target in ("200ms", "500ms", "2s", "10s")
        ]
        assert all((RATE in looser) <= (RATE in tighter) for tighter, looser in itertools.pairwise(misses)), rate
