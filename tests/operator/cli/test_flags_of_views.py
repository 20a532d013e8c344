"""Flags that a view does not look at are refused by name, and edits that undo each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kimi_operator.cli import build_app

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X, MI325X = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi325x-2p2d.yaml"
Run = Callable[..., tuple[int, str, str]]
COMPARE = ("--compare", MI300X, MI325X)


def flags_of(group: str) -> list[str]:
    """Flags of `plan` by the beginning of the heading that its help has them under."""
    return [
        each.name
        for each in build_app()["plan"].assemble_argument_collection()
        if any(str(found.name).startswith(group) for found in each.parameter.group or ())
    ]


DEPLOYMENT, WORKLOAD = flags_of("A deployment from flags"), flags_of("The workload")


def test_the_flags_are_those_of_the_help() -> None:
    assert {"--chip", "--nodes", "--max-num-seqs", "--kv-cache"} <= set(DEPLOYMENT)
    assert {"--workload", "--prompt-tokens", "--concurrency", "--target-ttft"} <= set(WORKLOAD)


@pytest.mark.parametrize("flag", ["--file", *DEPLOYMENT, *WORKLOAD])
@pytest.mark.parametrize("value", ["5", "nonsense"])
def test_a_check_takes_nothing_to_plan(run: Run, flag: str, value: str) -> None:
    status, out, err = run("plan", "--check", flag, value)
    assert (status, out, err.count("\n")) == (2, "", 1)
    # what is no number is told first
    assert err.startswith(f"kimictl: {flag}: got a flag beside --check, expected it alone") or value in err
    assert flag in err


@pytest.mark.parametrize("flag", DEPLOYMENT)
def test_a_comparison_takes_no_deployment_from_flags(run: Run, flag: str) -> None:
    assert run("plan", *COMPARE, flag, "5") == (
        2, "",
        f"kimictl: {flag}: got a flag beside --compare, expected two manifests, and flags of a workload; "
        "edit the manifests, or plan without --compare\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("decode.maxNumSeqs=3", "decode.maxNumSeqs=8"),
        ("decode.maxNumSeqs=3", " spec.decode.maxNumSeqs = 3"),
        ("maxNumSeqs=3", "maxNumSeqs=4"),
        ("chip=mi325x", "profile=mi300x"),
        ("chip=mi325x", "hardware.profile=mi300x"),
        ("nodes=8", "nodes=4"),
        ("workload.concurrency=8", "workload.concurrency=4"),
        ("profile.reserve.driver=1Gi", "profile.reserve.driver=2Gi"),
    ],
)
def test_an_edit_that_undoes_another_is_refused(run: Run, one: str, other: str) -> None:
    assert run("plan", "-f", MI300X, "--what-if", one, "--what-if", "decode.groups=1", "--what-if", other) == (
        2, "", f"kimictl: --what-if: got {one!r} and {other!r}, expected each key once; leave one of them out\n"
    )  # fmt: skip


def test_one_role_may_differ_from_what_is_set_for_both(run: Run) -> None:
    status, _, err = run("plan", "-f", MI300X, "--what-if", "maxNumSeqs=3", "--what-if", "decode.maxNumSeqs=4")
    assert (status, err) == (0, "")
