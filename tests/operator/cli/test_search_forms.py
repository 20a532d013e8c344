"""`kimictl plan --search` as Markdown and as a page: the rows of the text, and whatever else it tells."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

CHIP = ("--chip", "mi300x")
BARELY = (*CHIP, "--search", 4, "--prompt-tokens", 1000, "--output-tokens", 100, "--target-tpot")
SEARCHES: dict[str, tuple[object, ...]] = {
    "targets": (*BARELY, "130ms"),
    "cost": (*CHIP, "--search", 4, "--cost", 2, "--max-model-len", 524_288),
    "many": ("--chip", "mi325x", "--search", 8),
    "no throughput": ("--chip", "mi308x", "--search", 4),
    "nothing fits": (*CHIP, "--search", 2),
}
Run = Callable[..., tuple[int, str, str]]


def search(run: Run, name: str, form: str) -> str:
    status, out, err = run("plan", *SEARCHES[name], "-o", form)
    assert (status, err) == (int(name == "nothing fits"), "")
    return out


def rows_of_text(out: str) -> list[list[str]]:
    """Cells of the table; the first has no head."""
    lines = [line for line in out.splitlines() if re.match(r" +(nodes|\d+\.) ", line)]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def rows_of_markdown(out: str) -> list[list[str]]:
    lines = [line for line in out.splitlines() if line.startswith("| ") and "remedy" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|") if cell.strip()] for line in lines]


def tables_of(out: str) -> list[list[list[str]]]:
    """The page is read as XML, which is stricter than what a browser asks for."""
    root = ET.fromstring(out.removeprefix("<!DOCTYPE html>\n"))
    return [[["".join(cell.itertext()) for cell in row] for row in table.iter("tr")] for table in root.iter("table")]


@pytest.mark.parametrize("name", [name for name in SEARCHES if name != "nothing fits"])
def test_each_form_has_the_rows_of_the_text(run: Run, name: str) -> None:
    rows = rows_of_text(search(run, name, "text"))
    assert len(rows) == 1 + min(10, len(json.loads(search(run, name, "json"))["ranked"]))
    assert rows_of_markdown(search(run, name, "markdown")) == rows
    table = tables_of(search(run, name, "html"))[0]
    assert [[cell for cell in row if cell] for row in table] == rows


@pytest.mark.parametrize("name", SEARCHES)
def test_each_form_has_every_line_beside_the_table(run: Run, name: str) -> None:
    """Misses, doubts, refusals, what is assumed and what figures are calibrated on: word for word."""
    lines = [line.strip() for line in search(run, name, "text").splitlines()]
    beside = [line for line in lines if not re.match(r"(\d+\.|nodes) |does not fit:$", line)]
    markdown = search(run, name, "markdown").replace("\\", "")
    page = " ".join(ET.fromstring(search(run, name, "html").removeprefix("<!DOCTYPE html>\n")).itertext())
    assert len(beside) >= 5
    for line in beside:
        # a problem is a row of a table on the page, and so is what does not fit in both
        words = re.split(r": got |, expected |; (?=measure|raise|lower)|: (?=--)|\s{2,}", line)
        assert all(part in page for part in words), line
        assert all(part in markdown for part in words), line


def test_a_page_marks_what_is_missed(run: Run) -> None:
    assert '<p class="verdict">' in search(run, "targets", "html")
    assert '<p class="verdict bad">' in search(run, "nothing fits", "html")


@pytest.mark.parametrize(
    ("flags", "head"),
    [
        ((*CHIP, "--search", 1), "no layout fits 1 node of "),
        ((*CHIP, "--search", 2), "no layout fits 2 nodes of "),
        ((*CHIP, "--search", 4), "3 layouts fit 4 nodes of "),
        ((*CHIP, "--search", 4, "--kv-cache", "FP32", "--max-model-len", 800_000), "1 layout fits 4 nodes of "),
        (("--chip", "mi355x", "--search", 2), "3 layouts fit 2 nodes of "),
    ],
)
def test_numbers_of_layouts_and_nodes_are_said_as_a_person_would(
    run: Run, flags: tuple[object, ...], head: str
) -> None:
    _, out, _ = run("plan", *flags)
    assert out.startswith(head)
    shapes = len({each["shape"] for each in json.loads(run("plan", *flags, "-o", "json")[1])["refused"]})
    does_not = "1 shape of a group does not" if shapes == 1 else f"{shapes} shapes of a group do not"
    assert out.splitlines()[0].endswith(f"; {does_not}")
    _, out, _ = run("plan", *flags, "-o", "markdown")
    nodes = re.search(r"[0-9]+ nodes?", head)[0]
    assert out.startswith(f"# Layouts of {nodes} of mi3")
