"""The throughput table: every load that a text names is a row, and words say what `at once` counts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PLANS = {
    "assumed": ("-f", EXAMPLES / "mi300x-2p2d.yaml"),
    "stated": ("-f", EXAMPLES / "mi300x-workload.yaml"),
    "below capacity": ("-f", EXAMPLES / "mi300x-2p2d.yaml", "--concurrency", 23),
    "above capacity": (
        "-f",
        EXAMPLES / "mi300x-2p2d.yaml",
        "--concurrency",
        1000,
        "--prompt-tokens",
        2048,
        "--output-tokens",
        512,
    ),
    "prefill binds": ("--chip", "mi325x", "--nodes", 4, "--prompt-tokens", 60000, "--output-tokens", 128),
}


def table(text: str) -> dict[int, str]:
    """Rows of the throughput table by their first cell."""
    lines = text.partition("output tokens/s  binds\n")[2].partition("\n\n")[0].splitlines()
    return {int(line.split()[0].replace(",", "")): line for line in lines}


@pytest.mark.parametrize("name", PLANS)
def test_every_load_that_a_text_names_is_a_marked_row(run: Run, name: str) -> None:
    _, text, _ = run("plan", *PLANS[name])
    speed = json.loads(run("plan", *PLANS[name], "-o", "json")[1])["speed"]
    rows = table(text)
    assert list(rows) == sorted(rows)
    assert len(rows) <= 16
    named = {"knee": speed["knee"], "fills decode": speed["capacity"], "this load": speed["concurrency"]}
    for mark, at in named.items():
        assert mark in rows[at].partition(" <- ")[2], (mark, at)
    assert sum(" <- " in line for line in rows.values()) == len({*named.values()})
    assert {1, speed["curve"][-1]["concurrency"]} <= rows.keys()


@pytest.mark.parametrize("name", PLANS)
def test_a_knee_above_the_capacity_says_how_many_decode_runs(run: Run, name: str) -> None:
    _, text, _ = run("plan", *PLANS[name])
    speed = json.loads(run("plan", *PLANS[name], "-o", "json")[1])["speed"]
    beyond = f", of which decode runs {speed['capacity']:,}" if speed["knee"] > speed["capacity"] else ""
    assert re.search(rf"; knee at {speed['knee']:,}{beyond}$", text, re.MULTILINE)


def test_a_knee_above_the_capacity_exists(run: Run) -> None:
    found = re.search(r"knee at (\d+), of which decode runs 48\b", run("plan", *PLANS["stated"])[1])
    assert found is not None
    assert int(found[1]) > 48


def test_output_follows_from_the_rule_above_the_table(run: Run) -> None:
    _, text, _ = run("plan", *PLANS["assumed"])
    assert "requests at once count those in prefill too, " in text
    assert "output tokens/s = at once / (TPOT + prefill of a prompt beside the others / tokens" in text
    speed = json.loads(run("plan", *PLANS["assumed"], "-o", "json")[1])["speed"]
    lanes = speed["prefill_busy"]["lanes"]
    followed = [point for point in speed["curve"] if point["binds"] == "concurrency"]
    beside = [point for point in followed if point["concurrency"] >= lanes]
    assert len(beside) > 10
    for point in beside:
        of_prompt = speed["prefill_busy"]["value"] / speed["request"]["output_tokens"]
        a_token_s = (point["tpot"]["value"] + of_prompt) / 1e3
        assert point["tokens_per_second"]["value"] == pytest.approx(point["concurrency"] / a_token_s)
    for point in followed[:1]:
        assert point["concurrency"] == 1
        a_token_s = (point["tpot"]["value"] + speed["prefill"]["value"] / speed["request"]["output_tokens"]) / 1e3
        assert point["tokens_per_second"]["value"] == pytest.approx(point["concurrency"] / a_token_s)


def test_the_words_of_concurrency_agree(run: Run) -> None:
    helped = " ".join(run("plan", "--help")[1].replace("│", " ").split())
    assert "Requests at once, in prefill or in decode" in helped
    assert "in decode at once" not in helped
    _, explained, _ = run("plan", *PLANS["stated"], "--explain", "at once")
    assert "in prefill, in decode, or waiting" in explained
    assert "decode has room for 48" in explained


def test_the_knee_is_where_more_requests_stop_paying_in_proportion(run: Run) -> None:
    """Not at the next of some sampled points beyond it: the load whose clients alone would give the most there is."""
    for name in ("assumed", "stated", "above capacity"):
        speed = json.loads(run("plan", *PLANS[name], "-o", "json")[1])["speed"]
        full = next(point for point in speed["curve"] if point["concurrency"] == speed["capacity"])
        prefill_ms = speed["prefill_busy"]["value"] / speed["request"]["output_tokens"]
        most = speed["curve"][-1]["tokens_per_second"]["value"]
        assert speed["knee"] == pytest.approx(most * (full["tpot"]["value"] + prefill_ms) / 1e3, abs=1)


def test_the_knee_is_the_better_of_the_loads_about_the_bend(run: Run) -> None:
    """Asking for a neighbour puts it among the points of the curve, which must not give another knee."""

    def speed_of(prompt_tokens: int, *flags: object) -> dict[str, Any]:
        lengths = ("--prompt-tokens", prompt_tokens, "--output-tokens", 512)
        found: dict[str, Any] = json.loads(run("plan", *PLANS["assumed"], *lengths, *flags, "-o", "json")[1])["speed"]
        return found

    is_above = set()
    for prompt_tokens in (500, 1000, 1500, 2000, 3000, 4000):
        speed = speed_of(prompt_tokens)
        knee, full = speed["knee"], next(p for p in speed["curve"] if p["concurrency"] == speed["capacity"])
        beside = {speed_of(prompt_tokens, "--concurrency", at)["knee"] for at in (knee - 1, knee + 1)}
        assert beside == {knee}, prompt_tokens
        prefill_ms = speed["prefill_busy"]["value"] / speed["request"]["output_tokens"]
        is_above.add(knee > speed["capacity"] * (1 + prefill_ms / full["tpot"]["value"]))
    assert is_above == {True, False}, "lengths of both kinds, else one of the two loads is not tested"
