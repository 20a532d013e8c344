"""`kimictl plan --search` for a rate that is stated: what meets it serves all that comes, and the smallest is first."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]
COMES = ("--prompt-tokens", "1000-8000", "--output-tokens", 300, "--target-tpot", "500ms", "--requests-per-second")


def found(run: Run, chip: str, nodes: int, rate: float) -> list[dict[str, Any]]:
    ranked = json.loads(run("plan", "--chip", chip, "--search", nodes, *COMES, rate, "-o", "json")[1])["ranked"]
    assert isinstance(ranked, list)
    return ranked


@pytest.mark.parametrize("rate", [0.5, 3])
def test_all_that_meet_a_rate_serve_it_and_the_fewest_nodes_come_first(run: Run, rate: float) -> None:
    ranked = found(run, "mi355x", 8, rate)
    met = [each for each in ranked if not each["misses"]]
    assert met == ranked[: len(met)]
    assert {each["tokens_per_second"] for each in met} == {rate * 300}
    nodes = [each["nodes"] for each in met]
    assert nodes == sorted(nodes)
    assert all(each["tokens_per_second"] <= rate * 300 for each in ranked)
    # the same search of no more nodes than the first has finds it again, and none with one node less
    assert found(run, "mi355x", nodes[0], rate)[0]["layout"] == met[0]["layout"]
    fewer = found(run, "mi355x", nodes[0] - 1, rate) if nodes[0] > 2 else []
    assert all(each["misses"] for each in fewer)


def test_a_rate_that_none_meets_is_ranked_by_what_is_served(run: Run) -> None:
    rates = [each["tokens_per_second"] for each in found(run, "mi300x", 4, 50)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 50 * 300


def test_a_plan_shows_the_rate_that_comes_and_that_nothing_else_binds(run: Run) -> None:
    flags = ("plan", "--chip", "mi300x", "--nodes", 4, *COMES, 0.5)
    speed = json.loads(run(*flags, "-o", "json")[1])["speed"]
    rate = speed["throughput"]
    assert (rate["value"], rate["high"], speed["binds"]) == (150, 150, "rate")
    assert rate["low"] <= 150
    assert "; rate binds; knee at " in run(*flags)[1]
