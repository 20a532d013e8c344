"""A load that decode does not run at once: first more running requests of a lane, then lanes that prefill fills."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kimi_operator.cli.manifests import deployment_of, plan_deployment, read_documents
from kimi_operator.planner import Plan
from kimi_operator.profiles import built_in_profiles

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STATED, FOR_WORKLOAD = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi300x-workload.yaml"
LENGTHS = ("--prompt-tokens", 14_336, "--output-tokens", 2048)
MORE_PREFILL = "add groups to prefill, which binds: more lanes of decode serve no more; or lower it"
LONG = ("--prompt-tokens", 100_000, "--output-tokens", 1000)
Run = Callable[..., tuple[int, str, str]]


def best_of(run: Run, *arguments: object) -> int:
    """Running requests that fit a decode lane."""
    document = json.loads(run("plan", *arguments, "-o", "json")[1])
    return document["outlook"]["decode"]["best"]["max_num_seqs"]


def test_what_if_offers_the_max_num_seqs_that_fit_before_more_lanes(run: Run) -> None:
    fit = best_of(run, "-f", STATED)
    assert fit > 8, "more than the manifest states"
    status, out, _ = run("plan", "-f", STATED, "--what-if", "workload.concurrency=600")
    assert status == 1
    assert "at most 64: 8 a lane x 8 lanes, where maxNumSeqs binds; " in out
    held = f"raise spec.decode.maxNumSeqs to {fit}, as many as fit, for {fit * 8} at once"
    lanes = re.search(
        rf"binds; {held}; for all 600 use (\d+) lanes and add groups to prefill, which fills no more", out
    )
    assert 8 < int(lanes[1]) < 600 / fit


def test_a_load_that_fits_needs_no_more_max_num_seqs_than_it_has_requests(run: Run) -> None:
    fit = best_of(run, "-f", STATED)
    out = run("plan", "-f", STATED, "--what-if", "workload.concurrency=72")[1]
    assert f"raise spec.decode.maxNumSeqs to 9 ({fit} fit), or use 9 lanes, or lower it" in out


@pytest.mark.parametrize("lengths", [(), LENGTHS])
def test_from_flags_the_flag_is_named_and_the_miss_is_said_once(run: Run, lengths: tuple[object, ...]) -> None:
    def plan(seqs: int, concurrency: int) -> tuple[int, list[str]]:
        flags = ("--nodes", 4, "--max-num-seqs", seqs, *lengths, "--concurrency", concurrency)
        status, out, _ = run("plan", "--chip", "mi300x", *flags)
        return status, [line for line in out.splitlines() if f"got {concurrency}" in line]

    status, (miss,) = plan(8, 600)
    assert (status, miss.partition(", ")[0]) == (1, "misses: --concurrency: got 600")
    fit = int(re.search(r"raise --max-num-seqs to (\d+), as many as fit", miss)[1])
    # the remedy is followed, and offers itself no more
    status, (miss,) = plan(fit, 600)
    binds = f"at most {fit * 8}: {fit} a lane x 8 lanes, where pages bind"
    fills = r"use \d+ lanes and add groups to prefill, which fills no more of them, or lower it"
    assert re.fullmatch(f"misses: --concurrency: got 600, expected {binds}; {fills}", miss)
    assert plan(fit, fit * 8 + 1)[0] == 1
    assert plan(fit, fit * 8) == (0, [])


def test_a_rate_that_needs_more_at_once_names_them_too(run: Run) -> None:
    flags = ("--chip", "mi325x", "--nodes", 4, "--max-num-seqs", 8, "--target-tpot", "2s")
    out = run("plan", *flags, "--requests-per-second", 3)[1]
    prefill, decode = [line for line in out.splitlines() if line.startswith("misses: ")]
    assert prefill.endswith("; add groups to prefill, or lower it")
    assert "; raise --max-num-seqs to " in decode


def test_a_warning_of_the_plan_says_the_same_as_its_outlook(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "k3.yaml"
    text = FOR_WORKLOAD.read_text().replace("concurrency: 48", "concurrency: 256")
    file.write_text(text.replace("tensorParallel: 2", "tensorParallel: 2\n    maxNumSeqs: 5"))
    plan = json.loads(run("plan", "-f", file, "-o", "json")[1])
    (miss,) = plan["misses"]
    assert re.match(
        r"raise spec\.decode\.maxNumSeqs to \d+, as many as fit, for \d+ at once; for all 256", miss["remedy"]
    )
    assert not [each for each in plan["warnings"] if "256" in each]


def test_what_if_plans_a_manifests_own_workload_anew(run: Run) -> None:
    """48 at once are stated: with more of them the plan, which chooses maxNumSeqs, runs more."""
    out = run("plan", "-f", FOR_WORKLOAD, "--what-if", "workload.concurrency=80")[1]
    (row,) = [line.split() for line in out.splitlines() if line.startswith("decode.maxNumSeqs")]
    assert row[1:] == ["6", "10"]
    assert "misses" not in out
    out = run("plan", "-f", FOR_WORKLOAD, "--what-if", "workload.concurrency=2560")[1]
    assert "misses spec.workload.concurrency: got 2560" in out.replace(",", "")
    assert f"where pages bind; {MORE_PREFILL}, not sure: spec.workload.targets.tpotSeconds: got 0.5 s" in out
    assert run("plan", "-f", FOR_WORKLOAD, "--what-if", "workload.prompt=2000")[0] == 0
    status, _, err = run("plan", "-f", FOR_WORKLOAD, "--what-if", "workload.prompt=0")
    assert (status, "--what-if: spec.workload.prompt.fixed: got 0" in err) == (2, True)


def test_a_remedy_of_a_plan_from_flags_names_flags(run: Run) -> None:
    out = run("plan", "--chip", "mi300x", "--nodes", 4, "--max-model-len", 1_000_000)[1]
    assert "lower --max-model-len to 615,872, or use" in out
    assert "spec.model" not in out


def planned(run: Run, *flags: object) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Predictions, and what is missed of the load."""
    plan = json.loads(run("plan", "--chip", "mi300x", *flags, "-o", "json")[1])
    loads = ("--concurrency", "--requests-per-second")
    return plan["speed"], [miss for miss in plan["misses"] if miss["field"] in loads]


@pytest.mark.parametrize(
    ("flags", "is_fed"),
    [
        ((*LONG, "--concurrency", 64), False),
        ((*LONG, "--concurrency", 64, "--max-num-seqs", 2), False),
        ((*LONG, "--concurrency", 184, "--target-tpot", "500ms"), False),
        (
            ("--prompt-tokens", 10_000, "--output-tokens", 500, "--requests-per-second", 5, "--target-tpot", "500ms"),
            False,
        ),
        (("--prompt-tokens", 500, "--output-tokens", 1000, "--concurrency", 600), True),
        (("--prompt-tokens", 2000, "--output-tokens", 500, "--concurrency", 184, "--target-tpot", "200ms"), True),
    ],
)
def test_lanes_are_advised_only_where_more_of_them_serve_more(
    run: Run, flags: tuple[object, ...], is_fed: bool
) -> None:
    speed, misses = planned(run, "--nodes", 4, *flags)
    twice, _ = planned(run, "--nodes", 6, "--decode-groups", 2, *flags)
    assert (twice["throughput"]["value"] > 1.01 * speed["throughput"]["value"]) == is_fed
    remedy = misses[-1]["remedy"]
    assert re.fullmatch(r"use \d+ lanes, or lower it", remedy) if is_fed else remedy == MORE_PREFILL
    if not is_fed:
        more, _ = planned(run, "--nodes", 6, "--prefill-groups", 2, *flags)
        assert more["throughput"]["value"] > 1.4 * speed["throughput"]["value"]


def test_no_more_lanes_are_advised_than_prefill_fills(run: Run) -> None:
    """Under the target a lane runs few: more lanes serve more until prefill feeds no more."""
    flags = (*LENGTHS, "--concurrency", 600, "--target-tpot", "250ms")
    _, ((miss),) = planned(run, "--nodes", 4, *flags)
    lanes = int(re.match(r"use (\d+) lanes and add groups to prefill, which fills no more", miss["remedy"])[1])

    def rate(lanes: int) -> float:
        groups = lanes // 8
        return float(
            planned(run, "--nodes", 2 + 2 * groups, "--decode-groups", groups, *flags)[0]["throughput"]["value"]
        )

    below, above = lanes // 8 * 8, -(-lanes // 8) * 8
    assert rate(below - 8) < rate(below) <= rate(above) == rate(above + 8)


def test_a_load_beside_a_target_that_nothing_meets_waits_for_the_target(run: Run) -> None:
    _, ((miss),) = planned(run, "--nodes", 4, *LONG, "--concurrency", 64, "--target-tpot", "60ms")
    assert miss["remedy"] == "meet the target TPOT first, which not even one request a lane does"


def test_a_search_and_the_status_advise_the_same(run: Run, tmp_path: Path) -> None:
    out = run("plan", "--chip", "mi300x", "--search", 4, *LONG, "--concurrency", 300)[1]
    told = [line for line in out.splitlines() if "misses: --concurrency" in line]
    assert told
    assert all(line.endswith(f"; {MORE_PREFILL}") for line in told)
    file = tmp_path / "k3.yaml"
    file.write_text(FOR_WORKLOAD.read_text().replace("concurrency: 48", "concurrency: 2560"))
    deployment = deployment_of(read_documents([file]), [file])
    plan = plan_deployment(deployment, built_in_profiles()).plan
    assert isinstance(plan, Plan)
    (warning,) = [each for each in plan.warnings if each.startswith("spec.workload.concurrency: got 2,560")]
    assert warning.endswith(f"; {MORE_PREFILL}")
