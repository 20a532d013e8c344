"""Every label that the text of a plan shows is taken by `--explain`, which answers in numbers and in plain words."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kimi_operator.cli.asking import asked_for, make_plan, outlook_of
from kimi_operator.cli.cost import cost_of
from kimi_operator.cli.explain import explanation, find_figures, means
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags
from kimi_operator.cli.glossary import WORDS, explained_figures
from kimi_operator.errors import InvalidSpec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Run = Callable[..., tuple[int, str, str]]
ROW = re.compile(r" {2,4}(\S(?: ?\S)*)(?: {2,}|$)")
LEGEND = re.compile(r"(?:^ {4}|, )\S ([A-Za-z ]+?) [0-9.]+ \S?i?B")
LAYOUT = re.compile(r"\b([A-Z]+)\d+\b")
RULED = re.compile(r"[0-9,]+|\[[#=sk.]+\]")
"""Cells of tables, and the bar."""


def labels_of(text: str) -> Iterator[str]:
    """Labels of rows, columns, the bar and the layout, as they stand in the text."""
    for line in text.splitlines():
        if found := LEGEND.findall(line):
            yield from found
        elif "tokens/s  binds" in line or line.startswith("  tokens a request"):
            yield from re.split(r" {2,}", line.strip())
        elif " node" in line and line.lstrip().startswith("prefill:"):
            yield from LAYOUT.findall(line)
        elif (row := ROW.match(line)) and not RULED.fullmatch(row[1]):
            yield row[1]
    yield from ("kv rows", "experts", "handoff", "knee", "experts a rank")


CASES = {
    "of a manifest, with its cost": ("-f", EXAMPLES / "mi325x-2p2d.yaml", "--cost", 2),
    "of a workload": ("-f", EXAMPLES / "mi300x-workload.yaml"),
    "without FLOPs": ("--chip", "mi308x"),
    "without rates": ("-f", EXAMPLES / "local" / "2p2d.yaml"),
    "behind its load": ("--chip", "mi300x", "--prompt-tokens", 20_000, "--output-tokens", 100, "--concurrency", 900),
}


@pytest.mark.parametrize("case", CASES)
def test_every_label_of_the_text_is_explained(run: Run, case: str) -> None:
    arguments = CASES[case]
    _, text, _ = run("plan", *arguments)
    labels = dict.fromkeys(labels_of(text))
    assert len(labels) > 35, labels
    files = [Path(str(file)) for flag, file in itertools.pairwise(arguments) if flag == "-f"]
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    lengths = {"prompt_tokens": "20000", "output_tokens": "100", "concurrency": 900}
    work = WorkloadFlags(**lengths if "--concurrency" in given else {})
    asked = asked_for(files, DeploymentFlags(chip=given.get("--chip")), work)
    outlook = outlook_of(make_plan(asked), asked)
    known = explained_figures(outlook, cost_of(outlook, 2.0) if "--cost" in given else None)
    for label in labels:
        figures = find_figures(known, label)
        lines = list(explanation(figures))
        assert len(lines) == 5 * len(figures), label
        for figure in figures:
            assert min(map(len, (figure.text, figure.formula, figure.values, figure.source))) > 0, label
            assert means(figure).endswith(".")


def test_a_label_is_taken_as_it_stands_and_with_its_role(run: Run) -> None:
    keys = {}
    for label in ("KV pages a lane", "decode.KV pages a lane", "TPOT", "output tokens/s", "pool's remainder", "TP"):
        status, out, _ = run("plan", "--chip", "mi325x", "--explain", label)
        assert status == 0
        keys[label] = [line.split(" = ")[0] for line in out.splitlines() if not line.startswith(" ")]
        assert out.count("\n  means    ") == len(keys[label])
    assert keys == {
        "KV pages a lane": ["prefill.numPages", "decode.numPages"],
        "decode.KV pages a lane": ["decode.numPages"],
        "TPOT": ["tpot"],
        "output tokens/s": ["throughput"],
        "pool's remainder": ["prefill.pool's remainder", "decode.pool's remainder"],
        "TP": ["prefill.tensorParallel", "decode.tensorParallel"],
    }


def test_every_figure_has_its_words_and_no_words_are_left_over(run: Run) -> None:
    used = set()
    for arguments in (("-f", EXAMPLES / "mi325x-2p2d.yaml"), ("-f", EXAMPLES / "local" / "2p2d.yaml")):
        asked = asked_for([Path(arguments[1])], DeploymentFlags(), WorkloadFlags())
        outlook = outlook_of(make_plan(asked), asked)
        for figure in explained_figures(outlook, cost_of(outlook, 2.0) if outlook.speed else None):
            assert means(figure)
            used.add(figure.key.removeprefix("prefill.").removeprefix("decode."))
    # only a stated size of the pool leaves memory outside of it
    assert set(WORDS) - used == {"outside the pool"}


@pytest.mark.parametrize(
    ("wanted", "near"), [("slots", "state slots a lane"), ("decode.page", "KV pages a lane"), ("TPOTs", "TPOT")]
)
def test_an_unknown_label_lists_the_near_ones(run: Run, wanted: str, near: str) -> None:
    status, out, err = run("plan", "--chip", "mi325x", "--explain", wanted)
    assert (status, out) == (2, "")
    suggested = err.strip().partition("name one of: ")[2].split("; ")
    assert near in suggested
    assert 1 <= len(suggested) <= 8
    for label in suggested:
        assert run("plan", "--chip", "mi325x", "--explain", label)[0] == 0


def test_lanes_are_explained_as_what_binds_too(run: Run) -> None:
    _, out, _ = run("plan", "--chip", "mi325x", "--explain", "lanes bind")
    assert out == run("plan", "--chip", "mi325x", "--explain", "lanes")[1]
    assert "lanes bind where each runs as many as it may" in out


def test_scripts_get_the_words_too(run: Run) -> None:
    _, out, _ = run("plan", "--chip", "mi325x", "--explain", "knee", "-o", "json")
    (figure,) = json.loads(out)["figures"]
    assert figure.keys() == {"key", "text", "amount", "means", "formula", "values", "source"}
    assert figure["text"] == f"{figure['amount']['value']} at once"


def test_what_is_not_like_anything_lists_all() -> None:
    asked = asked_for([], DeploymentFlags(chip="mi300x"), WorkloadFlags())
    known = explained_figures(outlook_of(make_plan(asked), asked), None)
    with pytest.raises(InvalidSpec, match=r"the deployment: gpus, .*; predictions: .*throughput") as refused:
        find_figures(known, "nonsense")
    listed = str(refused.value).partition("name one of: ")[2]
    assert "cost" not in listed, "nothing costs anything without a price"
    names = [name for group in listed.split("; ") for name in group.partition(": ")[2].split(", ")]
    assert len(names) == len(set(names)) > 40
    assert {figure.key for name in names for figure in find_figures(known, name)} == {figure.key for figure in known}


@pytest.mark.parametrize("wanted", ["cost", "Price", "cost.output", "a request", "a million output tokens"])
def test_costs_need_a_price_and_are_explained_together_with_one(run: Run, wanted: str) -> None:
    status, out, err = run("plan", "--chip", "mi325x", "--explain", wanted)
    assert (status, out) == (2, "")
    assert "add --cost PRICE, the price of a GPU-hour" in err
    if wanted != "Price":
        assert run("plan", "--chip", "mi325x", "--cost", 2, "--explain", wanted)[0] == 0
    _, out, _ = run("plan", "--chip", "mi325x", "--cost", 2, "--explain", "cost", "-o", "json")
    keys = {figure["key"] for figure in json.loads(out)["figures"]}
    assert keys == {"cost.prompt", "cost.output", "cost.allIn", "cost.request", "cost.binds"}


@pytest.mark.parametrize("chip", ["mi325x", "mi308x"])
def test_the_time_to_the_first_token_is_taken_in_any_case(run: Run, chip: str) -> None:
    for wanted in ("TTFT", "ttft", "tTfT"):
        status, out, _ = run("plan", "--chip", chip, "--explain", wanted, "-o", "json")
        assert status == 0
        assert [figure["key"] for figure in json.loads(out)["figures"]] == ["ttft"]


def test_labels_of_the_markdown_are_explained_too(run: Run) -> None:
    _, text, _ = run("plan", "--chip", "mi325x", "-o", "markdown")
    cells = [row.split(" | ")[0].removeprefix("| ").replace("\\", "") for row in text.splitlines() if row[:2] == "| "]
    labels = [cell for cell in cells if cell and cell not in ("line", "of")]
    assert len(labels) > 20
    for label in [each for each in labels if not each.startswith("|")]:
        assert run("plan", "--chip", "mi325x", "--explain", label)[0] == 0, label
