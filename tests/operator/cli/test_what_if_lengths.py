"""`--what-if workload.prompt=..` where nobody stated lengths: the other one is as it was assumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MI300X = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
FLAGS = ("--chip", "mi300x", "--nodes", 4)
Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("start", [("-f", MI300X), FLAGS])
@pytest.mark.parametrize(
    ("edit", "both", "assumed"),
    [
        ("workload.prompt=32000", ("workload.prompt=32000", "workload.output=2048"), "output is 2,048 tokens"),
        ("workload.output=500", ("workload.prompt=14336", "workload.output=500"), "prompt is 14,336 tokens"),
    ],
)
def test_one_length_takes_the_other_from_the_assumed_ones(
    run: Run, start: tuple[object, ...], edit: str, both: tuple[str, str], assumed: str
) -> None:
    status, out, err = run("plan", *start, "--what-if", edit, "-o", "json")
    assert err == ""
    found = json.loads(out)
    edits = [word for each in both for word in ("--what-if", each)]
    stated, out, _ = run("plan", *start, *edits, "-o", "json")
    expected = json.loads(out)
    assert (status, found["changes"]) == (stated, expected["changes"])
    note = f"workload.{assumed} (assumed: none was given)"
    assert found["notes"] == [note, *expected["notes"]]
    assert note in run("plan", *start, "--what-if", edit)[1].splitlines()


@pytest.mark.parametrize(("most", "assumed"), [((), "2,048"), (("--max-model-len", 8192), "1,024")])
def test_of_a_plan_that_does_not_fit_the_profiles_context_is_assumed(
    run: Run, most: tuple[object, ...], assumed: str
) -> None:
    small = ("--chip", "mi300x", "--nodes", 2, *most)
    edits = ("--what-if", "spec.prefill.nodesPerGroup=2", "--what-if", "spec.decode.nodesPerGroup=2")
    status, out, err = run("plan", *small, *edits, "--what-if", "workload.prompt=7000")
    assert (status, err) == (0, "")
    assert f"workload.output is {assumed} tokens (assumed: none was given)" in out
