"""The Markdown and the HTML page of a replay: the same cells as its text, by strict parsers and in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

MI300X = ("--chip", "mi300x", "--nodes", 4)
AGENTS = ("--agents", 6, "--turns", 5, "--reuse", 0.9)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
BROWSER_S = 120.0

Run = Callable[..., tuple[int, str, str]]
Table = list[list[str]]


def tree(text: str) -> ET.Element:
    """The page as XML: stricter than what a browser asks for."""
    assert text.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def tables_of_page(text: str) -> list[Table]:
    return [
        [[cell.text or "" for cell in row] for row in table.iter("tr")] for table in tree(text).iter("table")
    ]  # fmt: skip


def tables_of_markdown(text: str) -> list[Table]:
    """Each line of a table is cut where a bar has no backslash before it; the line of dashes is left out."""
    blocks = [block.strip().splitlines() for block in text.split("\n\n") if block.strip().startswith("|")]
    cut = [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block if not line.startswith("|---")] for block in blocks]
    return [[[re.sub(r"\\(.)", r"\1", cell).strip() for cell in line] for line in table] for table in cut]


def tables_of_text(text: str) -> list[Table]:
    """Labels of the summary end where two spaces begin; columns of the others are as wide as the report says."""
    summary, over_time, by_turn, _ = text.split("\n\n")
    rows = [line for line in summary.splitlines() if line.startswith("  ")]
    widths = ((8, 13, 11, 8, 6, 18, 5, 13), (9, 6, 9, 9, 28, 28, 28))
    cut = [[[row[2:18].strip(), row[19:]] for row in rows]]
    for block, columns in zip((over_time, by_turn), widths, strict=True):
        starts = [sum(columns[:i]) + i for i in range(len(columns))]
        cut.append(
            [
                [line[start : start + width].strip() for start, width in zip(starts, columns, strict=True)]
                for line in block.splitlines()[1:]
            ]
        )
    return cut


def test_every_form_has_the_cells_of_the_text(run: Run) -> None:
    text, markdown, html = (run("replay", *MI300X, *AGENTS, "-o", form)[1] for form in ("text", "markdown", "html"))
    expected = tables_of_text(text)
    assert [len(table) for table in expected][2] == 1 + 5
    assert tables_of_page(html) == expected
    # a table of Markdown has a head, if an empty one
    assert [table[1:] if table[0] == ["", ""] else table for table in tables_of_markdown(markdown)] == expected
    notes = text.split("\n\n")[-1].splitlines()
    assert [item.text for item in tree(html).iter("li")] == notes
    assert [re.sub(r"\\(.)", r"\1", line[2:]) for line in markdown.splitlines() if line.startswith("- ")] == notes
    for line in text.splitlines()[1:4]:
        assert line in [each.text for each in tree(html).iter("p")]
        assert line in re.sub(r"\\(.)", r"\1", markdown).splitlines()


def test_the_page_needs_nothing_from_elsewhere(run: Run) -> None:
    page = run("replay", *MI300X, *AGENTS, "-o", "html")[1]
    assert re.findall(r"<script|@import|(?:src|href|url)\s*[=(]|https?://", page) == []


@pytest.mark.parametrize("form", ["markdown", "html"])
def test_warnings_and_the_exit_status_are_those_of_the_text(run: Run, form: str) -> None:
    flags = (*MI300X, "--max-model-len", 20_000, "--agents", 3, "--turns", 8)
    status, out, err = run("replay", *flags, "-o", form)
    assert (status, err) == (1, "")
    assert "warning: 3 of 3 sessions end early" in out


@pytest.mark.parametrize("form", ["markdown", "html"])
def test_when_no_turn_is_served_the_page_says_so_and_no_more(run: Run, form: str) -> None:
    flags = (*MI300X, "--max-model-len", 12_001, "--agents", 3, "--first-prompt-tokens", 12_000)
    status, out, _ = run("replay", *flags, "-o", form)
    assert status == 1
    assert "no turn is served" in out
    assert not (tables_of_page(out) if form == "html" else tables_of_markdown(out))


def test_a_refusal_is_a_page_and_a_table_too(run: Run) -> None:
    flags = ("replay", *MI300X, "--tensor-parallel", 1)
    reason = json.loads(run(*flags, "-o", "json")[1])["problems"][0]["got"]
    status, out, _ = run(*flags, "-o", "html")
    assert (status, tables_of_page(out)[0][1][1]) == (1, reason)
    status, out, _ = run(*flags, "-o", "markdown")
    assert (status, tables_of_markdown(out)[0][1][1]) == (1, reason)


def test_markup_in_a_name_stays_text(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "<b>a|b*.jsonl"
    trace.write_text(json.dumps({"session": "a", "newTokens": 1000, "outputTokens": 100}))
    page = run("replay", *MI300X, "--trace", trace, "-o", "html")[1]
    assert "<b>" not in page
    assert any(trace.name in (each.text or "") for each in tree(page).iter("p"))
    assert "\\<b\\>a\\|b\\*.jsonl" in run("replay", *MI300X, "--trace", trace, "-o", "markdown")[1]


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")
def test_a_browser_shows_the_page_from_a_file(run: Run, tmp_path: Path) -> None:
    """What it makes of the page, written out again, has the same cells."""
    page = run("replay", *MI300X, *AGENTS, "-o", "html")[1]
    file = tmp_path / "replay.html"
    file.write_text(page, encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=BROWSER_S, env={**os.environ, "TMPDIR": "/tmp"}
    )
    drawn = re.sub(r"<(meta[^>]*)>", r"<\1/>", done.stdout.removeprefix("<!DOCTYPE html>"))
    assert tables_of_page(f"<!DOCTYPE html>\n{drawn}") == tables_of_page(page)
