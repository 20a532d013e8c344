"""Command lines that no parser can read: every flag answers for its negative value, and others' flags are known."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kimi_operator.cli import build_app
from kimi_operator.cli.flags import MOST_WRITTEN, read_number, read_whole
from kimi_operator.cli.misread import joined

Run = Callable[..., tuple[int, str, str]]
MI300X = ("--chip", "mi300x")
MANIFEST = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
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


UNFIT = {
    "plan extra": "'extra': got a word that belongs to no flag, expected none at the end of plan; leave it out, or "
    "quote a value that has spaces",
    "plan a.yaml": "'a.yaml': got a file without a flag, expected one behind -f; write -f a.yaml",
    "replay --chip mi300x a.json": "'a.json': got a file without a flag, expected one behind -f; write -f a.json",
    "plan --compare a b c.yaml": "'c.yaml': got a word that belongs to no flag, expected none at the end of plan; "
    "leave it out, or quote a value that has spaces",
    "profile show a b": "'b': got a word that belongs to no flag, expected none at the end of profile show; "
    "leave it out, or quote a value that has spaces",
    "plan --chip a --chip b": "--chip: got it more than once, expected it once; leave all but one out",
    "replay --agents 1 --agents 2": "--agents: got it more than once, expected it once; leave all but one out",
    "plan --check=x": "--check: got 'x', expected no value; write --check alone",
    "plan -o xml": "-o: got 'xml', expected one of text, json, yaml, markdown, html; choose one of them",
    "profile list --output xml": "--output: got 'xml', expected one of text, json, yaml, markdown; choose one of them",
    "profile show": "NAME: got nothing, expected a value; write profile show NAME",
    "profile from-node": "NODE: got nothing, expected a value; write profile from-node NODE",
    "needle": "--url: got nothing, expected a value; add --url",
    "render": "--file: got nothing, expected a value; add --file",
    "needle --url u --logprob-bound x": "--logprob-bound: got 'x', expected a number; write one such as 2.5",
}


@pytest.mark.parametrize("words", UNFIT)
def test_words_that_fit_nowhere_are_said_with_what_to_do(told: Callable[..., str], words: str) -> None:
    assert told(*words.split()) == UNFIT[words]


def whole_flags(command: str) -> list[str]:
    found = build_app()[command].assemble_argument_collection()
    return [each.name for each in found if each.parameter.converter is read_whole]


def number_flags(command: str) -> list[str]:
    found = build_app()[command].assemble_argument_collection()
    return [each.name for each in found if each.parameter.converter is read_number]


DIGITS = "9" * 5000
CUT = f"'{DIGITS[:MOST_WRITTEN]}' and 4,960 characters more"
WHOLE = {
    "1e3": "'1e3', expected a whole number; write 1000",
    "8.0": "'8.0', expected a whole number; write 8",
    "1.5": "'1.5', expected a whole number; write 1 or 2",
    "x": "'x', expected a whole number; write one such as 8",
    "nan": "'nan', expected a whole number; write one such as 8",
    "0x10": "'0x10', expected a whole number; write one such as 8",
    "1e999": "'1e999', expected a whole number; write one such as 8",
    DIGITS: f"{CUT}, expected a whole number; write one of fewer digits",
}
NUMBERS = {
    "50%": "'50%', expected a number; write 0.5",
    "$2.5/h": "'$2.5/h', expected a number; write 2.5",
    "0x1p-1": "'0x1p-1', expected a number; write one such as 0.9 or 2.5",
    "1,5": "'1,5', expected a number; write one such as 0.9 or 2.5",
    "x": "'x', expected a number; write one such as 0.9 or 2.5",
    DIGITS: f"{CUT}, expected a number; write one of fewer digits",
    f"{DIGITS}%": f"'{DIGITS[:MOST_WRITTEN]}' and 4,961 characters more, expected a number; write one such as",
}


@pytest.mark.parametrize("command", ["plan", "replay"])
@pytest.mark.parametrize("value", WHOLE, ids=lambda value: value[:9])
def test_every_whole_number_says_what_to_write(told: Callable[..., str], command: str, value: str) -> None:
    flags = whole_flags(command)
    assert {"--nodes", "--tensor-parallel", "--search" if command == "plan" else "--seed"} <= set(flags)
    for flag in flags:
        assert told(command, *MI300X, f"{flag}={value}") == f"{flag}: got {WHOLE[value]}"


@pytest.mark.parametrize("command", ["plan", "replay"])
@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: value[:9])
def test_every_number_says_what_to_write(told: Callable[..., str], command: str, value: str) -> None:
    flags = number_flags(command)
    assert "--reuse" in flags
    for flag in flags:
        assert told(command, *MI300X, flag, value).startswith(f"{flag}: got {NUMBERS[value]}")


@pytest.mark.parametrize("text", [DIGITS, f"{DIGITS}k", f"1-{DIGITS}", f"{DIGITS}s", f"0.{DIGITS}ms"])
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("plan", "--prompt-tokens"),
        ("plan", "--output-tokens"),
        ("plan", "--target-tpot"),
        ("plan", "--target-ttft"),
        ("replay", "--ramp"),
        ("replay", "--think-time"),
    ],
)
def test_lengths_and_times_of_thousands_of_digits_are_cut(
    told: Callable[..., str], command: str, flag: str, text: str
) -> None:
    said = told(command, *MI300X, flag, text)
    assert said.startswith(f"{flag}: got '{text[:MOST_WRITTEN]}' and 4,9")
    assert len(said) < 200


@pytest.mark.parametrize("words", ["- FILE", "FILE -"])
def test_standard_input_is_one_of_two_to_compare(run: Run, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(MANIFEST.read_text()))
    status, out, err = run("plan", "--compare", *words.replace("FILE", str(MANIFEST)).split())
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == words.replace("FILE", str(MANIFEST)).split()


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
