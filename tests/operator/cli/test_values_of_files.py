"""Keys that stand twice, and values that JSON cannot carry: refused by file and field, wherever they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from kimi_operator.api.base import MOST_LEVELS
from kimi_operator.cli.files import UniqueKeys

Run = Callable[..., tuple[int, str, str]]
MI300X = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
HUGE = "0x" + "f" * 5000
LEVELS = (MOST_LEVELS + 1, 127, 200, 900)
COMMANDS = {
    "manifest": ("plan", "-f"),
    "manifest to render": ("render", "-f"),
    "manifest to replay": ("replay", "-f"),
    "one of two": ("plan", "--compare", MI300X),
    "workload": ("plan", "--chip", "mi300x", "--workload"),
    "profile": ("profile", "list", "-f"),
    "run": ("profile", "calibrate"),
    "node": ("profile", "from-node"),
}


@pytest.fixture
def told(run: Run, tmp_path: Path) -> Callable[..., str]:
    """What a command says of a file, without the file's name."""

    def call(command: tuple[object, ...], text: str) -> str:
        file = tmp_path / "file"
        file.write_text(text)
        status, out, err = run(*command, file)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"kimictl: {file}: ")
        assert len(err) < 400
        return err.removeprefix(f"kimictl: {file}: ").rstrip()

    return call


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("kind: a\nb: 1\nkind: c\n", "'kind' on line 1 and again on line 3"),
        ("a:\n  - {n: 3, 'n': 8}\n", "'n' twice on line 2"),
        ("--- {x: 1}\n---\na: &a {b: {c: 1, c: 2}}\n", "'c' twice on line 3"),
        ('{"a": {"n": 3, "m": 1, "n": 8}}', "'n' more than once in an object"),
        ('{"a": 1, "a": 1}', "'a' more than once in an object"),
    ],
)
def test_a_key_that_stands_twice_is_refused(
    told: Callable[..., str], command: tuple[object, ...], text: str, got: str
) -> None:
    assert told(command, text) == f"got the key {got}, expected each key once; leave one of them"


def test_a_key_may_set_anew_what_is_merged_in() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}\nd: *b\n"
    assert yaml.load(text, Loader=UniqueKeys) == yaml.safe_load(text)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("form", ["a: {b: [0, %s]}", "a: {b: [0, -%s]}"])
def test_a_number_of_thousands_of_digits_is_named_by_its_field(
    told: Callable[..., str], command: tuple[object, ...], form: str
) -> None:
    got = "a.b.1: got a whole number of about 6,021 digits, expected at most 1,000 digits; correct the value"
    assert told(command, form % HUGE) == got


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_key_of_thousands_of_digits_is_refused(told: Callable[..., str], command: tuple[object, ...]) -> None:
    assert told(command, f"a:\n  ? {HUGE}\n  : 1\n").startswith("a: got a key, a whole number of about 6,021 digits")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("form", ["a: %s\n", "a: {b: -%s}\n", '{"a": %s}'])
def test_decimal_digits_are_counted_too(told: Callable[..., str], command: tuple[object, ...], form: str) -> None:
    said = told(command, form % ("9" * 5000))
    assert said == "got no YAML or JSON: a number of too many digits, expected YAML or JSON; mend the file"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_deep_nesting_is_told_as_such(
    told: Callable[..., str], command: tuple[object, ...], levels: int, opening: str, closing: str
) -> None:
    text = told(command, '{"spec": ' + opening * levels + "1" + closing * levels + "}")
    assert text in (
        f"spec: got more than {MOST_LEVELS} levels of objects in objects, expected at most {MOST_LEVELS}; "
        "write it flatter",
        "got objects in objects without end, expected YAML or JSON of a few levels; mend the file",
    )


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("text", "at"), [('{"a": ["\\ud800"]}', "a.0: got "), ('{"a": {"\\udc00": 1}}', "a: got a key")]
)
def test_half_a_character_is_told_as_such(
    told: Callable[..., str], command: tuple[object, ...], text: str, at: str
) -> None:
    said = told(command, text)
    assert said.startswith(at)
    assert "half a character, '\\ud" in said
    assert said.endswith("expected both halves, or none; mend the text")


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (HUGE, "a whole number of about 6,021 digits, expected at most 1,000"),
        ("9" * 5000, "a number of too many digits, expected a value"),
        ("{a: 1, a: 2}", "the key 'a' twice on line 1, expected each key once"),
        ("[" * 127 + "]" * 127, f"more than {MOST_LEVELS} levels"),
        ("[" * 900 + "]" * 900, f"more than {MOST_LEVELS} levels"),
    ],
)
@pytest.mark.parametrize("key", ["nodes", "chip", "decode.maxNumSeqs", "workload.prompt", "profile.reserve.driver"])
def test_values_of_what_if_are_held_to_the_same(run: Run, key: str, value: str, got: str) -> None:
    status, out, err = run("plan", "-f", MI300X, "--what-if", f"{key}={value}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"kimictl: --what-if {key}")
    assert got in err


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ('"\\ud800"', "line 2.session: got half a character"),
        ('"a", "session": "b"', "line 2: got the key 'session' more than once in an object, expected each key once"),
        ('"a", "new": ' + '{"a":' * 200 + "1" + "}" * 200, "line 2.new: got more than 100 levels of objects"),
    ],
)
def test_lines_of_traces_are_held_to_the_same(run: Run, tmp_path: Path, value: str, got: str) -> None:
    file = tmp_path / "trace.jsonl"
    rest = '"newTokens": 9, "outputTokens": 9}\n'
    file.write_text(f'{{"session": "a", {rest}{{"session": {value}, {rest}')
    status, out, err = run("replay", "--chip", "mi300x", "--trace", file)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"kimictl: {file}: {got}")
