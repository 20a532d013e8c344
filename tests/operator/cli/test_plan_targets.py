"""A target in each form of `kimictl plan`: with its unit and its name, the layout that meets it, and how sure it is.

The targets follow from the predictions, so that other calibrations give other targets and not other answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.planner.case import Timing
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.workload import Workload, fixed, read_workload
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import forecast_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X, FOR_WORKLOAD = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi300x-workload.yaml"
LENGTHS = ("--prompt-tokens", 1000, "--output-tokens", 100)
SHORT = Workload(fixed(1000), fixed(100))
STARTS = [("--chip", "mi300x", "--nodes", 4), ("-f", MI300X)]
Run = Callable[..., tuple[int, str, str]]


def timing_of(workload: Workload, tensor_parallel: int = 2) -> Timing:
    """Of two nodes of MI300X."""
    profile = built_in_profiles()["mi300x"]
    forecast = forecast_of(architecture("kimi-k3"), profile, profile.spec.runtime.kv_cache_dtype, workload)
    return forecast.timing(GroupShape(2, 8, tensor_parallel), 1)


def step_s(tensor_parallel: int = 2) -> float:
    """Of one short request."""
    return timing_of(SHORT, tensor_parallel).decode_step_s(1, SHORT.mean_context)


def step_of_eight_s(tensor_parallel: int) -> float:
    """Of eight short requests at once."""
    return timing_of(SHORT, tensor_parallel).decode_step_s(8 * tensor_parallel // 16, SHORT.mean_context)


def band_s(tensor_parallel: int = 2) -> tuple[float, float]:
    band_of = timing_of(SHORT, tensor_parallel).decode_band_s
    assert band_of is not None
    return band_of(1, SHORT.mean_context)


def ms(seconds: float) -> str:
    """As a flag is written."""
    return f"{seconds * 1e3:.0f}ms"


def workload_step_s() -> float:
    """Of as many as the example's workload runs on each of 8 lanes."""
    work = read_workload(yaml.safe_load(FOR_WORKLOAD.read_text())["spec"]["workload"])
    return timing_of(work).decode_step_s((work.running or 0) // 8, work.mean_context)


MISSED_BY_TP2 = ms((step_of_eight_s(2) + step_of_eight_s(4)) / 2)
BARELY_MET = ms((step_s() + band_s()[1]) / 2)
ONE_A_LANE = ("--concurrency", 8)


@pytest.mark.parametrize("start", STARTS)
def test_a_missed_target_names_the_layout_that_meets_it(run: Run, start: tuple[object, ...]) -> None:
    status, out, _ = run("plan", *start, *LENGTHS, *ONE_A_LANE, "--target-tpot", MISSED_BY_TP2)
    assert status == 1
    (miss,) = [line for line in out.splitlines() if line.startswith(("misses: ", "warning: "))]
    least = f"expected at least {step_s():.4g} s, a step of 1 request a lane"
    assert miss.startswith(f"misses: --target-tpot: got {MISSED_BY_TP2}, {least}")
    low, high = band_s()
    unsure = f"; within the band of {low:.4g} to {high:.4g} s: not sure"
    assert f"{unsure}; use prefill: 1 x 2 nodes (TP4 DP4 EP16)" in miss


@pytest.mark.parametrize("start", STARTS)
def test_a_target_that_is_met_within_the_band_alone_is_said_once(run: Run, start: tuple[object, ...]) -> None:
    flags = (*start, *LENGTHS, *ONE_A_LANE, "--target-tpot", BARELY_MET)
    status, out, _ = run("plan", *flags)
    assert status == 0
    (warning,) = [line for line in out.splitlines() if "band of" in line]
    assert warning.startswith(f"warning: --target-tpot: got {BARELY_MET}, expected more to be sure: 0.")
    assert out.splitlines()[1] == "fits, and meets the workload; --target-tpot met by less than the band"
    document = json.loads(run("plan", *flags, "-o", "json")[1])
    assert document["meets_workload"] is True
    assert [doubt["field"] for doubt in document["not_sure"]] == ["--target-tpot"]


def fits_of(out: str) -> list[str]:
    """The cells of before and after."""
    (row,) = [line for line in out.splitlines() if line.startswith("fits  ")]
    return re.split(r"\s{2,}", row)[1:]


def test_what_if_says_which_side_meets_a_target_within_the_band_alone(run: Run) -> None:
    start = ("plan", "--chip", "mi300x", "--nodes", 4, *LENGTHS, "--target-tpot", ms(3 * band_s()[1]))
    barely = f"workload.targets.tpotSeconds={(step_s() + band_s()[1]) / 2:.4f}"
    status, out, _ = run(*start, "--what-if", barely)
    before, after = fits_of(out)
    assert (status, before) == (0, "yes")
    assert after.startswith("yes, not sure: workload.targets.tpotSeconds: got 0.")
    assert "within the band of" in after
    assert "not sure" not in run(*start, "--what-if", "workload.reuse=0.5")[1]


def test_what_if_says_it_though_nothing_of_it_changes(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "k3.yaml"
    for target, said in ((1.05 * workload_step_s(), "yes, not sure: "), (0.01, "yes, but misses ")):
        file.write_text(FOR_WORKLOAD.read_text().replace("tpotSeconds: 0.5", f"tpotSeconds: {target:.4f}"))
        _, out, _ = run("plan", "-f", file, "--what-if", "prefill.maxNumSeqs=2")
        before, after = fits_of(out)
        assert before == after
        assert after.startswith(said)


def test_a_comparison_says_it_of_each_manifest(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "k3.yaml"
    other.write_text(MI300X.read_text().replace("maxModelLen: 524288", "maxModelLen: 262144"))
    flags = ("plan", "--compare", MI300X, other, *LENGTHS, *ONE_A_LANE, "--target-tpot", BARELY_MET)
    status, out, _ = run(*flags)
    assert status == 0
    assert all(cell.startswith("yes, not sure: --target-tpot: got ") for cell in fits_of(out))


def test_a_target_of_a_manifest_is_named_by_its_field(run: Run, tmp_path: Path) -> None:
    target = round(1.05 * workload_step_s(), 4)
    file = tmp_path / "k3.yaml"
    file.write_text(FOR_WORKLOAD.read_text().replace("tpotSeconds: 0.5", f"tpotSeconds: {target}"))
    status, out, _ = run("plan", "-f", file)
    assert status == 0
    (warning,) = [line for line in out.splitlines() if "band of" in line]
    assert warning.startswith(
        f"warning: spec.workload.targets.tpotSeconds: got {target:g} s, expected more to be sure: "
    )


def test_far_from_the_band_nothing_is_said(run: Run) -> None:
    far = ms(3 * band_s()[1])
    assert "band of" not in run("plan", "--chip", "mi300x", "--nodes", 4, *LENGTHS, "--target-tpot", far)[1]


def test_a_search_says_which_layouts_meet_a_target_within_the_band(run: Run) -> None:
    flags = ("--chip", "mi300x", "--search", 4, *LENGTHS, "--target-tpot", MISSED_BY_TP2)
    status, out, _ = run("plan", *flags)
    lines = [line.strip() for line in out.splitlines() if "band of" in line]
    assert status == 0
    assert [line.partition(":")[0] for line in lines] == ["not sure", "not sure", "misses"]
    assert all(f"--target-tpot: got {MISSED_BY_TP2}, expected " in line for line in lines)
    ranked = json.loads(run("plan", *flags, "-o", "json")[1])["ranked"]
    assert [len(each["not_sure"]) for each in ranked] == [1, 1, 0]


def ttft_behind_others_s(run: Run, flags: tuple[object, ...], output_tokens: int) -> float:
    """By Little's law: what of a request's time is not decode, where prefill binds."""
    speed = json.loads(run("plan", *flags, "-o", "json")[1])["speed"]
    assert speed["binds"] == "prefill"
    request_s = output_tokens * speed["concurrency"] / speed["throughput"]["value"]
    return request_s - output_tokens * speed["tpot"]["value"] / 1e3


def test_plan_and_search_agree_on_a_target_that_prompts_wait_for(run: Run) -> None:
    load = ("--prompt-tokens", 14_336, "--output-tokens", 800, "--concurrency", 184)
    flags = ("--chip", "mi300x", "--nodes", 4, *load)
    ttft_s = ttft_behind_others_s(run, flags, 800)
    for target_s, key in ((0.95 * ttft_s, "misses"), (1.05 * ttft_s, "not_sure")):
        target = ("--target-ttft", f"{target_s:.2f}s")
        plan = json.loads(run("plan", *flags, *target, "-o", "json")[1])
        found = json.loads(run("plan", "--chip", "mi300x", "--search", 4, *load, *target, "-o", "json")[1])["ranked"]
        tensor_parallel = plan["decode"]["ranks"] // plan["decode"]["lanes"]
        (same,) = [each for each in found if each["decode"]["tensor_parallel"] == tensor_parallel]
        (told,) = plan[key]
        assert told["field"] == "--target-ttft"
        assert f"{ttft_s:.4g} s" in told["expected"]
        assert "within the band of" in told["expected"]
        assert same[key] == [told]
        assert plan["meets_workload"] == (key == "not_sure")
    assert "wait for prefill, which binds" in run("plan", *flags, "--target-ttft", f"{0.95 * ttft_s:.2f}s")[1]


@pytest.mark.parametrize("lengths", [LENGTHS, ()])
def test_a_target_is_judged_at_as_many_as_the_plan_runs(run: Run, tmp_path: Path, lengths: tuple[object, ...]) -> None:
    """What a lane could run under the target is nothing that it does run; the remedy that is told makes it so."""
    twice = ms(2 * step_s())
    stated = ("--max-num-seqs", 30) if lengths else ()
    start = ("plan", "--chip", "mi300x", "--nodes", 4, *lengths, "--target-tpot")
    low = json.loads(run(*start, twice, *stated, "-o", "json")[1])["decode"]["max_num_seqs"]
    assert low > 8
    status, out, _ = run(*start, ms(1.1 * step_s()), *stated)
    assert status == 1
    (miss,) = [line for line in out.splitlines() if line.startswith("misses: ")]
    assert f"a step of {low} requests a lane, each of " in miss
    fewer = re.search(r"lower --max-num-seqs to (\d+), or raise it$", miss)
    assert fewer is not None
    assert run(*start, ms(1.1 * step_s()), "--max-num-seqs", fewer[1])[0] == 0
    assert run(*start, ms(1.1 * step_s()), "--max-num-seqs", int(fewer[1]) + 1)[0] == 1


def test_a_layout_that_misses_by_the_wait_alone_is_not_said_to_miss_by_its_prompts(run: Run) -> None:
    """Wider lanes take less for a prompt, and prompts wait all the same."""

    def plan(*flags: object) -> dict[str, Any]:
        load = ("--nodes", 4, "--prompt-tokens", 100_000, "--output-tokens", 1000, *flags)
        document: dict[str, Any] = json.loads(run("plan", "--chip", "mi355x", *load, "-o", "json")[1])
        return document

    wide = plan("--concurrency", 64, "--tensor-parallel", 8)["speed"]
    target = ("--target-ttft", f"{1.05 * wide['prefill_busy']['value'] / 1e3:.1f}s")
    prompt, wait = plan("--concurrency", 64, *target)["misses"]
    assert re.match(
        r"use .*\(TP8 .*, which meets it but for the wait .*, and add groups to prefill or", prompt["remedy"]
    )
    assert "no other tensorParallel" not in prompt["remedy"]
    assert "wait for prefill" in wait["expected"]
    (alone,) = plan("--concurrency", 2, *target)["misses"]
    assert re.match(r"use .*\(TP8 .*, which meets it", alone["remedy"])
    # where not even a prompt alone is in time, no wait is blamed
    prompt, _ = plan("--concurrency", 64, "--target-ttft", f"{wide['prefill']['value'] / 4e3:.1f}s")["misses"]
    assert prompt["remedy"].startswith("no other tensorParallel or size of a group on the same nodes meets it: ")
