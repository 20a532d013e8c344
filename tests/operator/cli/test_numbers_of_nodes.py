"""Numbers of nodes that cannot be, in flags: named as they were typed, with a number that can be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

MI300X = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
CHIP = ("--chip", "mi300x")
Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("flags", "expected", "remedy"),
    [
        ((0,), "a multiple of 2", "write --nodes 4\n"),
        ((1,), "a multiple of 2", "write --nodes 4\n"),
        ((-4,), "a multiple of 2", "write --nodes 4\n"),
        ((3,), "a multiple of 2", "write --nodes 4\n"),
        ((5,), "a multiple of 2", "write --nodes 4 or 8, or --search 5 instead, which chooses the groups\n"),
        ((5, "--prefill-groups", 2), "a multiple of 3", "write --nodes 6, or --search 5 instead"),
        ((1, "--prefill-groups", 3), "a multiple of 4", "write --nodes 8, or lower --prefill-groups or "),
        ((3, "--tensor-parallel", 1), "a multiple of 2", "write --nodes 8\n"),
        ((3, "--tensor-parallel", 3), "a multiple of 2", "no number of nodes fits with the other flags: change those"),
    ],
)
def test_nodes_that_cannot_be_spread_say_which_can(
    run: Run, flags: tuple[object, ...], expected: str, remedy: str
) -> None:
    status, out, err = run("plan", *CHIP, "--nodes", *flags)
    assert (status, out) == (2, "")
    assert err.startswith(f"kimictl: --nodes: got {flags[0]}, expected {expected}: prefill and decode have ")
    assert f"equally large; {remedy}" in err


@pytest.mark.parametrize("nodes", [129, 130, 100_001, 999_999_999_999])
def test_more_nodes_than_groups_can_have_are_refused_at_once(run: Run, nodes: int) -> None:
    status, out, err = run("plan", *CHIP, "--nodes", nodes)
    assert (status, out) == (2, "")
    groups = "prefill and decode have 2 groups, of at most 64 nodes each"
    assert err == f"kimictl: --nodes: got {nodes}, expected at most 128: {groups}; write --nodes 112\n"


def test_no_number_of_nodes_mends_a_number_of_groups(run: Run) -> None:
    _, _, err = run("plan", *CHIP, "--nodes", 999_999_999_999, "--prefill-groups", 0)
    assert err.startswith("kimictl: --prefill-groups: got 0, expected greater than or equal to 1")
    assert "nodes" not in err


@pytest.mark.parametrize("others", [(), ("--kv-cache", "FP32", "--max-model-len", 2**20)])
@pytest.mark.parametrize("nodes", [1, 3, 5, 7, 9, 13])
@pytest.mark.parametrize("chip", ["mi300x", "mi325x", "mi355x"])
def test_each_number_that_is_told_can_be(run: Run, chip: str, nodes: int, others: tuple[object, ...]) -> None:
    _, _, err = run("plan", "--chip", chip, "--nodes", nodes, *others)
    told = re.search(r"write --nodes (\d+)(?: or (\d+))?(, or --search \d+ instead)?", err)
    assert told is not None
    for each in filter(None, told.groups()[:2]):
        assert run("plan", "--chip", chip, "--nodes", each, *others)[0] == 0
    found = json.loads(run("plan", "--chip", chip, "--search", nodes, *others, "-o", "json")[1])["ranked"]
    assert bool(told[3]) == bool(found)


@pytest.mark.parametrize(("gib", "numbers"), [(192, "4 or 8"), (150, "8"), (130, "14")])
def test_of_a_chip_in_a_file_numbers_that_fit_its_memory_are_told(
    run: Run, tmp_path: Path, gib: int, numbers: str
) -> None:
    profile = yaml.safe_load(run("profile", "show", "mi300x", "-o", "yaml")[1])
    profile["metadata"]["name"] = "mine"
    profile["spec"]["gpu"]["memory"] = min(gib * 2**30, profile["spec"]["gpu"]["memory"])
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(profile))
    asked = ("plan", "-f", path, "--chip", "mine", "--nodes")
    _, _, err = run(*asked, 5)
    assert f"; write --nodes {numbers}" in err, err
    assert all(run(*asked, number)[0] == 0 for number in numbers.split(" or "))


@pytest.mark.parametrize("nodes", [0, 3, 4])
def test_a_number_of_groups_is_refused_by_its_own_name(run: Run, nodes: int) -> None:
    status, _, err = run("plan", *CHIP, "--nodes", nodes, "--prefill-groups", 0)
    assert status == 2
    assert err.startswith("kimictl: --prefill-groups: got 0, expected greater than or equal to 1")


@pytest.mark.parametrize("start", [CHIP, ("-f", MI300X)])
@pytest.mark.parametrize(("nodes", "status"), [(-1, 2), (0, 2), (1, 1), (3, 1)])
def test_a_search_of_too_few_nodes_says_how_many_it_needs(
    run: Run, start: tuple[object, ...], nodes: int, status: int
) -> None:
    got, out, err = run("plan", *start, "--search", nodes)
    assert got == status
    told = " ".join((out + err).split())
    assert re.search(rf"--search:? got {nodes},? expected at least 4: one prefill group of 2 x 8 GPUs", told)
    assert re.search(r"decode group of 2 x 8 GPUs with tensorParallel 2;?( remedy)? raise it to 4", told)
    assert run("plan", *start, "--search", 4)[0] == 0


def test_too_many_nodes_and_lengths_that_cannot_be_are_told_together(run: Run) -> None:
    status, _, err = run("plan", *CHIP, "--search", 65)
    assert (status, err) == (
        2,
        "kimictl: --search: got 65, expected at most 64; lower it to 64 or less, and repeat the layout\n",
    )
    lengths = ("--prompt-tokens", 2_000_000, "--output-tokens", 5)
    status, _, err = run("plan", *CHIP, "--search", 0, *lengths)
    nodes, prompt = err.splitlines()
    expected = "at least 2: prefill and decode stand on separate nodes"
    assert nodes == f"kimictl: --search: got 0, expected {expected}; raise it to 2 or more"
    assert prompt.startswith("kimictl: --prompt-tokens: got 2,000,000 tokens")
