"""Files that no command can use: each is refused by its name in a line or two, with exit status 2 and no traceback."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from kimi_operator.cli import MOST_PROBLEMS
from kimi_operator.cli.files import MOST_CHARACTERS, MOST_VALUES

MI300X = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
Run = Callable[..., tuple[int, str, str]]

COMMANDS = (
    ("plan", "-f"),
    ("plan", "--chip", "mi300x", "--workload"),
    ("plan", "--compare", MI300X),
    ("replay", "-f"),
    ("render", "-f"),
    ("profile", "list", "-f"),
    ("profile", "show", "mi300x", "-f"),
    ("profile", "from-node"),
    ("profile", "calibrate"),
)
TENFOLD = "".join(
    f"{name}: &{name} [{', '.join([f'*{inside}'] * 10)}]\n" for inside, name in zip("abcdef", "bcdefg", strict=True)
)
FILES = {
    "random bytes": (bytes(range(255, 0, -1)), "no UTF-8"),
    "control characters": (b"\x00\x01", "no YAML or JSON"),
    "Latin-1": ("metadata: {name: caf\xe9}\n".encode("latin-1"), "no UTF-8"),
    "too long": (b"a" * (MOST_CHARACTERS + 1), "a larger file, expected at most 4,194,304 characters"),
    "a list": (b"- a\n- b\n", "list"),
    "one word": (b"kimi", "str"),
    "aliases of aliases": (f"a: &a [x]\n{TENFOLD}".encode(), f"expected at most {MOST_VALUES:,} values"),
    "an alias in itself": (b"a: &a [*a]\n", f"expected at most {MOST_VALUES:,} values"),
    "lists in lists, as YAML": (b"[" * 5000, "no YAML or JSON: line 1: exceeded maximum nesting depth"),
    "objects in objects, as JSON": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "objects in objects without end"),
    "a broken object": (b"a: [\n", "no YAML or JSON: line 2: did not find expected node content"),
    "a program in a tag": (b"a: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
    "no such day": (b"a: 2026-13-45\n", "no YAML or JSON: month must be in 1..12"),
    "no number in a tag": (b"a: !!int b\n", "no YAML or JSON: invalid literal"),
    "a list for a key": (b"? [a]\n: b\n", "found unhashable key"),
    "nothing for a key": (b"? \n: b\n", "the key None, expected keys that are text"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command[:2])))
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_object_is_refused_by_its_file(
    run: Run, tmp_path: Path, command: tuple[object, ...], name: str
) -> None:
    content, expected = FILES[name]
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    status, out, err = run(*command, file)
    assert (status, out) == (2, "")
    assert err.startswith(f"kimictl: {file}: got ")
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command[:2])))
@pytest.mark.parametrize(("name", "expected"), [("folder", "Is a directory"), ("folder/none", "No such file")])
def test_what_cannot_be_read_is_refused_by_its_name(
    run: Run, tmp_path: Path, command: tuple[object, ...], name: str, expected: str
) -> None:
    (tmp_path / "folder").mkdir()
    status, out, err = run(*command, tmp_path / name)
    assert (status, out) == (2, "")
    assert err == f"kimictl: {tmp_path / name}: got {expected}{err.partition(expected)[2]}"
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["hello", "- a", "3", "true"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command[:2])))
def test_what_is_no_object_is_told_which_is_expected(
    run: Run, tmp_path: Path, command: tuple[object, ...], text: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    fields = {"--workload": "prompt and output", "calibrate": "chip, layout, and lists decode or prefill"}
    expected = f"object with {fields.get(str(command[-1]), 'apiVersion, kind, metadata and spec')}; mend the file\n"
    assert run(*command, file)[2].endswith(expected)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(str, command[:2])))
@pytest.mark.parametrize("name", ["", "./"])
def test_an_empty_name_is_told_as_such(run: Run, command: tuple[object, ...], name: str) -> None:
    status, out, err = run(*command, name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    # an empty name could be a node's
    empty = "got '', expected the name of a node, or a file" if command[-1] == "from-node" and not name else None
    assert (empty or "kimictl: .: got an empty name, or the folder itself, expected a readable file") in err


READ = {
    ("plan", "-f"): MI300X.read_text(),
    ("plan", "--chip", "mi300x", "--workload"): json.dumps({"prompt": 4096, "output": 512, "reuse": 1e-05}),
    ("replay", "--chip", "mi300x", "--trace"): json.dumps({"session": "a", "newTokens": 9, "outputTokens": 9}) + "\n",
    ("profile", "calibrate"): "chip: mi300x\nlayout: {nodes: 2, gpusPerNode: 8, tensorParallel: 2}\n"
    "decode:\n  - {concurrency: 8, contextTokens: 4096, tpotMs: 96.4}\n",
}


@pytest.mark.parametrize("is_standard_input", [False, True], ids=["file", "standard input"])
@pytest.mark.parametrize("command", READ, ids=" ".join)
def test_a_mark_of_byte_order_changes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], *, is_standard_input: bool
) -> None:
    answers = []
    for mark in ("", "\ufeff"):
        file = tmp_path / "file"
        file.write_text(mark + READ[command], encoding="utf-8")
        monkeypatch.setattr("sys.stdin", io.StringIO(mark + READ[command]))
        answers.append(run(*command, "-" if is_standard_input else file))
    assert answers[0] == answers[1]
    assert answers[0][0] == 0


WRONG_KINDS = {
    ("plan", "-f"): "0 KimiDeployments, but kind ConfigMap, expected exactly one; name a file with",
    ("plan", "--chip", "mi300x", "--workload"): "got 'ConfigMap', expected a workload",
    ("replay", "-f"): "0 KimiDeployments, but kind ConfigMap, expected exactly one",
    ("render", "-f"): "0 KimiDeployments, but kind ConfigMap, expected exactly one",
    ("profile", "list", "-f"): "no HardwareProfile, expected at least one",
    ("profile", "show", "mi300x", "-f"): "no HardwareProfile, expected at least one",
    ("profile", "from-node"): "got 'ConfigMap', expected a Node",
    ("profile", "calibrate"): "got 'ConfigMap', expected a measured run",
}


@pytest.mark.parametrize("command", WRONG_KINDS, ids=" ".join)
def test_an_object_of_another_kind_is_refused(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "map.yaml"
    file.write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n")
    status, out, err = run(*command, file)
    assert (status, out) == (2, "")
    assert WRONG_KINDS[command] in err
    assert str(file) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", WRONG_KINDS, ids=" ".join)
def test_an_empty_file_is_refused(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "empty.yaml"
    file.touch()
    status, out, err = run(*command, file)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err


def test_several_deployments_in_a_file_are_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(f"{MI300X.read_text()}\n---\n{MI300X.read_text()}")
    for command in ("plan", "replay", "render"):
        status, _, err = run(command, "-f", file)
        assert (status, "got 2 KimiDeployments" in err) == (2, True)


def test_each_wrong_field_has_a_line_and_very_many_are_counted(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "many.yaml"
    file.write_text("kind: KimiDeployment\nspec: {}\n" + "".join(f"x{i}: {'y' * 5000}\n" for i in range(20)))
    status, _, err = run("plan", "-f", file)
    lines = err.splitlines()
    assert (status, len(lines)) == (2, MOST_PROBLEMS + 1)
    assert all(line.startswith(f"kimictl: {file}: ") for line in lines[:-1])
    assert lines[-1].startswith("kimictl: and ")
    assert max(map(len, lines)) < 400


def test_a_misspelt_field_is_shown_those_that_there_are(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    document = yaml.safe_load(MI300X.read_text())
    spec = document["spec"]
    spec |= {"prefil": {"name": None, "on": True}, "workload": {"prompt": 20_000, "output": {"fixed": 9}}}
    spec["decode"] = None
    file.write_text(yaml.safe_dump(document))
    status, _, err = run("plan", "-f", file)
    assert status == 2
    got = "spec.prefil: got {"
    assert f'kimictl: {file}: {got}"name": null, "on": true}}, expected no such field; ' in err
    assert "mend its spelling; did you mean prefill? known here: model, hardware, " in err
    assert f"{file}: spec.decode: got null, expected an object with any of groups, nodesPerGroup, " in err
    lengths = "fixed, uniform, logNormal, empirical"
    assert f"{file}: spec.workload.prompt: got 20000, expected an object with any of {lengths};" in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{prompt: 9, output: 9, targets: {ttft: 5s}}",
            "work.yaml: targets.ttft: got '5s', expected no such field; remove it or mend its spelling; "
            "did you mean ttftSeconds? known here: ttftSeconds, tpotSeconds\n",
        ),
        ("{prompt: {constant: 9}, output: 9}", "mend its spelling; known here: fixed, uniform, logNormal, empirical\n"),
        ("{prompt: 9, output: 9, concurency: 4}", "did you mean concurrency? known here: prompt, output, reuse, "),
    ],
)
def test_a_misspelt_key_of_a_workload_is_shown_the_right_ones(
    run: Run, tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "work.yaml"
    file.write_text(text)
    status, _, err = run("plan", "--chip", "mi300x", "--workload", file)
    assert (status, expected in err) == (2, True)


def test_standard_input_is_held_to_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a: &a [*a]"))
    status, _, err = run("plan", "-f", "-")
    assert (status, err.startswith("kimictl: -: got more values")) == (2, True)


def test_json_is_read_as_json(run: Run, tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-05 for a text."""
    file = tmp_path / "workload.json"
    file.write_text(json.dumps({"prompt": 4096, "output": 512, "reuse": 1e-05}))
    assert run("plan", "--chip", "mi300x", "--workload", file)[0] == 0
