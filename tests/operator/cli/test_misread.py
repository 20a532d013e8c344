"""Command lines that no parser can read: every flag answers for its negative value, and others' flags are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kimi_operator.cli import build_app
from kimi_operator.cli.misread import joined

Run = Callable[..., tuple[int, str, str]]
MI300X = ("--chip", "mi300x")
NO_VALUE = {"--help", "-h", "--check"}
FILES = {"--file", "-f", "--trace", "--workload"}
"""Named by the file alone."""


@pytest.fixture
def told(run: Run) -> Callable[..., str]:
    """The first reason that a command line is answered with, without where to read more."""

    def call(*words: str) -> str:
        status, out, err = run(*words)
        assert (status, out) == (2, "")
        return err.splitlines()[0].removeprefix("kimictl: ").split("; see `")[0]

    return call


def flags_with_values(command: str) -> list[str]:
    names = {name for each in build_app()[command].assemble_argument_collection() for name in each.names}
    return sorted(name for name in names - NO_VALUE - {"--compare"} if name.startswith("-"))


@pytest.mark.parametrize("value", ["-60ms", "-.5s"])
@pytest.mark.parametrize("command", ["plan", "replay"])
def test_every_flag_answers_for_a_negative_value(told: Callable[..., str], command: str, value: str) -> None:
    flags = flags_with_values(command)
    assert {"--output", "-o", "--chip", "--nodes", "--kv-cache", "--reuse"} <= set(flags)
    for flag in flags:
        given_ = () if flag == "--chip" else MI300X
        text = told(command, *given_, flag, value)
        assert "requires an argument" not in text
        assert value in text.replace("-0.5s", "-.5s"), flag
        assert flag in text or flag in FILES, text
        assert "\n" not in text


WRONG = {
    "--ramp -x": "--ramp: got '-x', which reads as a flag, expected a value; write --ramp=-x if it is one",
    "--think-time --reuse 0.5": "--think-time: got nothing, expected a value; write it behind the flag",
    "-o": "-o: got nothing, expected a value; write it behind the flag",
    "--prompt-tokens 2": "--prompt-tokens: got a flag of plan, expected a flag of replay; replay has "
    "--first-prompt-tokens",
    "--requests-per-second=2": "--requests-per-second: got a flag of plan, expected a flag of replay; "
    "leave it out, or choose the other command",
    "--concurrency=2": "--concurrency: got a flag of needle and plan, expected a flag of replay; replay has --agents",
    "--cost 2": "--cost: got a flag of plan, expected a flag of replay; leave it out, or choose the other command",
    "--think-tim 2s": "Unknown option: --think-tim. Did you mean --think-time?",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said_with_what_to_do(told: Callable[..., str], words: str) -> None:
    assert told("replay", *MI300X, *words.split()) == WRONG[words]


def test_commands_below_others_know_their_flags(told: Callable[..., str]) -> None:
    expected = "--chip: got a flag of plan and replay, expected a flag of profile show; leave it out, or choose"
    assert told("profile", "show", "x", "--chip", "y").startswith(expected)


@pytest.mark.parametrize(
    ("words", "got"),
    [
        (("--compare", "a"), "1 file, expected 2"),
        (("--compare=a",), "1 file, expected 2"),
        (("--compare", "a", "--cost", "2"), "1 file, expected 2"),
        (("--compare",), "nothing, expected 2 files"),
        (("--compare", "--cost", "2"), "nothing, expected 2 files"),
    ],
)
def test_one_file_alone_is_compared_with_nothing(told: Callable[..., str], words: tuple[str, ...], got: str) -> None:
    assert told("plan", *words) == f"--compare: got {got}; write --compare A.yaml B.yaml"


@example(["--a", "-5"])
@example(["--", "--a", "-5"])
@given(st.lists(st.sampled_from(["plan", "--a", "--b=1", "-5", "-5ms", "-.5", "-x", "--", "4", "-", "-f"])))
def test_joining_moves_nothing_but_negative_values_to_the_flag_before(words: list[str]) -> None:
    found = joined(words)
    assert joined(found) == found
    behind = words[words.index("--") :] if "--" in words else []
    assert found[len(found) - len(behind) :] == behind
    # each is one of the words, or two of them with the second one negative
    parts = [part for word in found for part in ([word] if word in words else word.split("=", 1))]
    assert parts == words
    before = found[: len(found) - len(behind)]
    for flag, value in itertools.pairwise(before):
        assert not (flag == "--a" and value.startswith(("-5", "-.5")))
