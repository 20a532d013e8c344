"""`kimictl plan --what-if nodes=N`: both roles grow in their proportion, or the fields to set are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MI300X = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
Run = Callable[..., tuple[int, str, str]]


def groups_of(run: Run, *arguments: object) -> tuple[str, dict[str, str]]:
    """The heading of what was edited, and what became of the groups of the roles that changed."""
    status, out, err = run("plan", *arguments, "-o", "json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    return found["after"], {row["key"]: row["after"] for row in found["changes"] if row["key"].endswith(".groups")}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("nodes=8.0", "--what-if nodes: got 8.0, expected a whole number; write nodes=8\n"),
        (
            "concurrency=8",
            "--what-if: got 'concurrency=8', expected the path of a field: workload.concurrency; write wo",
        ),
        ("tpotSeconds=1", "; write workload.targets.tpotSeconds=1\n"),
        ("groups=2", "expected the path of a field: prefill.groups or decode.groups; write prefill.groups=2\n"),
        ("hbmBytesPerSecond=1", "; write profile.gpu.hbmBytesPerSecond=1\n"),
        ("profile.gpu.hbmBytesPerSecond=4.0e+12", "got 4000000000000.0, expected a valid integer; write 4000000000000"),
        ("kvCache=bf16", "got 'bf16', expected 'Auto', 'BF16' or 'FP32'; write BF16\n"),
        ("chip=mi99", "--what-if chip: got 'mi99', expected the name of a HardwareProfile: one of ['mi300x', "),
        ("foo=1", "--what-if: spec.foo: got 1, expected no such field"),
    ],
)
def test_what_is_nearly_an_edit_is_told_what_to_write(run: Run, edit: str, said: str) -> None:
    status, _, err = run("plan", "-f", MI300X, "--what-if", edit)
    assert status == 2
    assert said in err


def test_a_chip_is_known_in_capitals(run: Run) -> None:
    small, large = (
        run("plan", "-f", MI300X, "--what-if", f"chip={name}", "-o", "yaml") for name in ("mi325x", "MI325X")
    )
    assert small[1].replace("chip=mi325x", "chip=MI325X") == large[1]
    assert small[0] == large[0]


def test_two_and_two_nodes_become_four_and_four(run: Run) -> None:
    heading, groups = groups_of(run, "-f", MI300X, "--what-if", "nodes=8")
    assert heading == "nodes=8 (4 prefill, 4 decode)"
    assert groups == {"prefill.groups": "2", "decode.groups": "2"}


@pytest.mark.parametrize(("nodes", "prefill", "decode"), [(16, 4, 12), (24, 6, 18)])
def test_unequal_roles_keep_their_proportion(run: Run, nodes: int, prefill: int, decode: int) -> None:
    flags = ("--chip", "mi300x", "--prefill-groups", 1, "--decode-groups", 3)
    heading, groups = groups_of(run, *flags, "--what-if", f"nodes={nodes}")
    assert heading == f"nodes={nodes} ({prefill} prefill, {decode} decode)"
    assert groups == {"prefill.groups": str(prefill // 2), "decode.groups": str(decode // 2)}


def test_fewer_nodes_are_fewer_groups_of_both(run: Run) -> None:
    flags = ("--chip", "mi300x", "--prefill-groups", 2, "--decode-groups", 2)
    heading, groups = groups_of(run, *flags, "--what-if", "nodes=4")
    assert heading == "nodes=4 (2 prefill, 2 decode)"
    assert groups == {"prefill.groups": "1", "decode.groups": "1"}


@pytest.mark.parametrize("nodes", [6, 2, 0, -4])
def test_a_proportion_that_is_not_whole_is_refused_with_the_keys_to_set(run: Run, nodes: int) -> None:
    status, out, err = run("plan", "-f", MI300X, "--what-if", f"nodes={nodes}")
    assert (status, out) == (2, "")
    assert f"got {nodes}, expected a multiple of 4: whole groups of both roles in the proportion 2 prefill" in err
    assert "set prefill.groups (now 1 of 2 nodes) and decode.groups (now 1 of 2 nodes) instead" in err
    _, groups = groups_of(run, "-f", MI300X, "--what-if", "decode.groups=2")
    assert groups == {"decode.groups": "2"}


@pytest.mark.parametrize(("edits", "heading"), [
    (["nodes = 8"], "nodes = 8 (4 prefill, 4 decode)"),
    (["nodes=8", "decode.groups=3"], "nodes=8, decode.groups=3"),
])  # fmt: skip
def test_shares_stand_beside_nodes_while_they_are_their_sum(run: Run, edits: list[str], heading: str) -> None:
    _, out, err = run("plan", "-f", MI300X, *(part for edit in edits for part in ("--what-if", edit)))
    assert out.splitlines()[0].endswith(heading), out + err


def test_a_price_that_was_asked_for_is_shown_though_it_stays(run: Run) -> None:
    """Twice the nodes give twice the tokens."""
    _, out, err = run("plan", "-f", MI300X, "--what-if", "nodes=8", "--cost", 2.5, "-o", "json")
    prices = {row["key"]: (row["before"], row["after"]) for row in json.loads(out)["changes"] if "cost." in row["key"]}
    assert prices, err
    assert prices["cost.output"][0] == prices["cost.output"][1]
