"""What a plan says of prompts that wait: of most of a stated load, and for ever at a rate that is not served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mi300x-workload.yaml"
LONG = ("--chip", "mi355x", "--nodes", 4, "--prompt-tokens", 100_000, "--output-tokens", 1000)
COMES = ("--chip", "mi300x", "--nodes", 4, "--prompt-tokens", 4000, "--output-tokens", 500, "--target-tpot", "500ms")
CROWD = re.compile(
    r"got ([\d,]+), expected less than ([\d,]+), from which on prefill binds: ([\d,]+) decode, ([\d,]+) are in prefill "
    r"and ([\d,]+) wait, .*; add groups to prefill, lower it, or rank other groups and tensorParallel with "
    r"kimictl plan --search (\d+)"
)
Run = Callable[..., tuple[int, str, str]]


def plan(run: Run, *flags: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run("plan", *flags, "-o", "json")[1])
    return document


def crowds(document: dict[str, Any], field: str = "--concurrency") -> list[list[int]]:
    """The numbers of the warning: the load, from where on prefill binds, in decode, in prefill, waiting, and nodes."""
    told = [each.removeprefix(f"{field}: ") for each in document["warnings"] if each.startswith(f"{field}: ")]
    return [[int(part.replace(",", "")) for part in CROWD.fullmatch(each).groups()] for each in told]


def test_a_load_that_mostly_waits_for_prefill_is_warned_of(run: Run) -> None:
    document = plan(run, *LONG, "--concurrency", 64)
    assert document["meets_workload"], "no target is stated"
    ((load, first, decode, prefill, waiting, nodes),) = crowds(document)
    assert (load, decode + prefill + waiting, prefill, nodes) == (64, 64, 8, 4)
    assert decode == document["speed"]["running"]
    at = {load: plan(run, *LONG, "--concurrency", load)["speed"]["binds"] for load in (first - 1, first)}
    assert at == {first - 1: "concurrency", first: "prefill"}


@pytest.mark.parametrize(
    "flags",
    [
        ("--concurrency", 11),  # few wait
        (),  # nobody stated a load
        ("--concurrency", 64, "--target-ttft", "60s"),  # a miss that says it
        ("--concurrency", 64, "--target-ttft", "2000s"),  # a target that it meets
        ("--concurrency", 600),  # a miss whose remedy is prefill
    ],
)
def test_nothing_is_said_where_few_wait_or_where_it_is_said_already(run: Run, flags: tuple[object, ...]) -> None:
    document = plan(run, *LONG, *flags)
    assert not [each for each in document["warnings"] if "from which on prefill binds" in each]
    assert bool(document["misses"]) == ("60s" in flags or 600 in flags)


def test_more_groups_of_prefill_make_the_wait_shorter(run: Run) -> None:
    def ttft(*flags: object) -> float:
        return float(plan(run, *LONG[:2], *LONG[4:], "--concurrency", 64, *flags)["speed"]["ttft"]["value"])

    assert ttft("--nodes", 6, "--prefill-groups", 2) < 0.6 * ttft("--nodes", 4)


def test_a_manifest_names_its_field(run: Run, tmp_path: Path) -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["workload"] |= {"prompt": {"fixed": 100_000}, "output": {"fixed": 100}, "concurrency": 40}
    file = tmp_path / "k3.yaml"
    file.write_text(yaml.safe_dump(document))
    assert crowds(plan(run, "-f", file), "spec.workload.concurrency")


@pytest.mark.parametrize(("rate", "grows"), [(1, False), (5, True)])
def test_the_wait_at_a_rate_that_is_not_served_has_no_end(run: Run, rate: int, grows: bool) -> None:
    flags = (*COMES, "--requests-per-second", rate)
    speed = plan(run, *flags)["speed"]
    assert speed["ttft"]["grows_without_end"] == grows
    assert (speed["ttft"]["value"] is None) == grows
    for form in ("text", "markdown", "html"):
        out = run("plan", *flags, "-o", form)[1]
        told = f"grows without end: {rate * 500:,} output tokens/s come, 669.4 are served at most"
        assert (told in out.replace("\\", "")) == grows
        assert not (grows and "no wait counted" in out)
    told = run("plan", *flags, "--explain", "ttft")[1].splitlines()[0]
    assert told.startswith("ttft = grows without end") == grows


def test_a_target_that_no_layout_meets_makes_no_queue_grow(run: Run) -> None:
    """With the maxNumSeqs that is stated all that comes is served, though by more at once than the target allows."""
    rate = (*COMES[:-1], "40ms", "--requests-per-second", 1)
    stated, cut = (plan(run, *rate, *seqs)["speed"] for seqs in (("--max-num-seqs", 32), ()))
    assert (stated["ttft"]["grows_without_end"], cut["ttft"]["grows_without_end"]) == (False, True)
