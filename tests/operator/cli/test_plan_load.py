"""One load: the times, the tokens and the price that a plan shows are of the requests that it sustains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.cli.figures import number
from kimi_operator.planner.targets import ARRIVING

MI325X = Path(__file__).resolve().parents[3] / "examples" / "mi325x-2p2d.yaml"
Run = Callable[..., tuple[int, str, str]]
UNFED = ("--prompt-tokens", 20_000, "--output-tokens", 500)
"""Prefill feeds a part of what decode would run."""


def speed_of(run: Run, *arguments: object) -> dict[str, Any]:
    status, out, err = run("plan", "--chip", "mi300x", *arguments, "-o", "json")
    assert status in (0, 1), err
    speed: dict[str, Any] = json.loads(out)["speed"]
    return speed


@pytest.mark.parametrize("load", [(), ("--concurrency", 200), ("--decode-groups", 2)])
def test_a_step_is_of_what_prefill_feeds(run: Run, load: tuple[object, ...]) -> None:
    """Little's law: running requests = tokens a second x time of a token."""
    speed = speed_of(run, *UNFED, *load)
    assert speed["binds"] == "prefill"
    assert speed["running"] < speed["concurrency"]
    for point in (speed, *(point for point in speed["curve"] if point["binds"] == "prefill")):
        rate = point.get("tokens_per_second") or point["throughput"]
        fed = rate["value"] * point["tpot"]["value"] / 1e3
        # groups step together, so that a request more in a group may slow all of its own
        assert point["running"] == pytest.approx(fed, rel=0.02, abs=1)


def test_few_requests_that_prefill_feeds_are_not_rounded_down(run: Run) -> None:
    """Output, TPOT and what runs are of one load; the nearest whole number has the time, and the mean is shown."""
    load = ("--prompt-tokens", 100_000, "--output-tokens", 1000, "--concurrency", 32)
    speed = speed_of(run, "--nodes", 4, *load)
    fed = speed["throughput"]["value"] * speed["tpot"]["value"] / 1e3
    assert 5.5 < fed < 6
    assert speed["running"] == 6
    out = run("plan", "--chip", "mi300x", "--nodes", 4, *load)[1]
    assert f"with {number(fed)} of 32 running on average: prefill feeds no more" in out


def test_a_step_is_of_all_requests_where_prefill_feeds_them(run: Run) -> None:
    speed = speed_of(run, "--prompt-tokens", 1000, "--output-tokens", 2000, "--concurrency", 100)
    assert (speed["binds"], speed["running"]) == ("concurrency", 100)


def test_a_rate_that_cannot_be_fed_is_not_priced_or_timed_as_if_it_were(run: Run) -> None:
    rate = ("--requests-per-second", 0.5, "--target-tpot", "2s")
    status, out, _ = run("plan", "--chip", "mi300x", *UNFED, *rate)
    assert status == 1
    assert "misses: --requests-per-second" in out
    assert "of 500 running on average: prefill feeds no more" in out


def test_a_prompt_is_timed_alone_and_beside_those_that_the_load_computes(run: Run) -> None:
    many, one = speed_of(run, *UNFED), speed_of(run, *UNFED, "--concurrency", 1)
    assert (many["prefill_busy"]["lanes"], one["prefill_busy"]["lanes"]) == (8, 1)
    assert many["prefill"]["value"] == one["prefill"]["value"] == one["prefill_busy"]["value"]
    # what 8 busy lanes feed is what the rate stands on
    fed = 8 * 500 / many["prefill_busy"]["value"] * 1e3
    assert many["throughput"]["value"] == pytest.approx(fed)
    for output in ("text", "markdown"):
        _, out, _ = run("plan", "--chip", "mi300x", *UNFED, "-o", output)
        assert "while 8 lanes compute" in out


@pytest.mark.parametrize("flags", [(), UNFED, (*UNFED, "--concurrency", 16)])
def test_the_price_is_of_the_load_that_the_plan_shows(run: Run, flags: tuple[object, ...]) -> None:
    _, out, _ = run("plan", "-f", MI325X, *flags, "--cost", 3, "-o", "json")
    found = json.loads(out)
    speed, cost = found["speed"], found["cost"]
    assert cost["concurrency"] == speed["concurrency"]
    assert cost["output"]["value"] == pytest.approx(16 * 3 / 3600 / speed["throughput"]["value"] * 1e6)
    _, text, _ = run("plan", "-f", MI325X, *flags, "--cost", 3)
    assert f"for the output of {speed['concurrency']:,} at once, as above" in text
    assert f"tokens/s ({number(speed['throughput']['low'])}" in text


def test_a_stated_rate_is_the_output_whatever_the_targets_allow(run: Run) -> None:
    """A tenth of a request a second of 500 tokens: a looser target neither makes more of them nor each cheaper."""
    load = ("--requests-per-second", 0.1, "--prompt-tokens", 4000, "--output-tokens", 500)
    tight, loose = (speed_of(run, "--nodes", 4, *load, "--target-tpot", target) for target in ("1s", "2s"))
    assert (tight["concurrency"], tight["throughput"]) == (loose["concurrency"], loose["throughput"])
    assert 50 <= tight["throughput"]["value"] < 50 * (1 + 1 / (tight["concurrency"] - 1))


@pytest.mark.parametrize("load", [("--concurrency", 200), ()])
def test_prompts_that_wait_are_in_the_time_to_the_first_token(run: Run, load: tuple[object, ...]) -> None:
    """Little's law over a whole request: how many are at once is their rate x (TTFT + decode)."""
    speed = speed_of(run, *UNFED, *load)
    assert speed["ttft"]["waits_for_prefill"]
    rate = speed["throughput"]["value"] / 500
    request_s = (speed["ttft"]["value"] + 500 * speed["tpot"]["value"]) / 1e3
    assert rate * request_s == pytest.approx(speed["concurrency"])
    told = f"{number(speed['ttft']['value'] / 1e3)} s ("
    for form in ("text", "markdown", "html"):
        assert f"on average, as {speed['concurrency']:,} at once wait for prefill" in run(
            "plan", "--chip", "mi300x", *UNFED, *load, "-o", form
        )[1].replace("\\", "")
    assert told in run("plan", "--chip", "mi300x", *UNFED, *load)[1]


def test_no_wait_is_counted_where_prefill_does_not_bind(run: Run) -> None:
    speed = speed_of(run, *UNFED, "--concurrency", 3)
    assert not speed["ttft"]["waits_for_prefill"]
    assert speed["ttft"]["value"] == speed["prefill_busy"]["value"]


def test_prompts_that_come_seldom_hardly_wait(run: Run) -> None:
    speed = speed_of(run, *UNFED, "--requests-per-second", 0.001, "--target-tpot", "1s")
    assert not speed["ttft"]["waits_for_prefill"]
    assert speed["prefill_busy"]["value"] <= speed["ttft"]["value"] < 1.02 * speed["prefill_busy"]["value"]


MEMORY = ("--nodes-per-group", 2, "--prefill-groups", 16, "--prompt-tokens", 60_000, "--output-tokens", 500)
"""Decode runs 64; its pages hold 72, of which most are in prefill at a time."""


def test_prompts_that_hold_memory_of_decode_bind_the_output(run: Run) -> None:
    """Replays of 128 such clients give 136 to 138 tokens/s."""
    speed = speed_of(run, *MEMORY, "--concurrency", 128)
    assert (speed["binds"], speed["capacity"]) == ("KV pages", 64)
    assert speed["throughput"]["low"] < 136
    assert 138 < speed["throughput"]["value"] < 160
    assert speed["knee"] == 72
    last = speed["curve"][-1]
    assert (last["held"], last["tokens_per_second"]) == (72, speed["throughput"])
    text = run("plan", "--chip", "mi300x", *MEMORY, "--concurrency", 128)[1]
    assert "KV pages bind, held by 72 in prefill and decode; knee at 72, of which decode runs 64" in text


def test_no_prefill_is_advised_where_memory_binds(run: Run) -> None:
    """12 groups of prefill feed less than full lanes of decode serve, and more than lanes with prompts in prefill."""
    lengths = ("--nodes-per-group", 2, "--prompt-tokens", 60_000, "--output-tokens", 200)
    out = run("plan", "--chip", "mi300x", *lengths, "--prefill-groups", 12, "--concurrency", 128)[1]
    assert "; KV pages bind, held by 72" in out
    assert "where pages bind; use 16 lanes, or lower it" in out


def test_those_that_wait_for_memory_are_in_the_time_to_the_first_token(run: Run) -> None:
    """Little's law over a whole request, as where prefill binds; replays give 341 to 348 s."""
    speed = speed_of(run, *MEMORY, "--concurrency", 128)
    waits = {name: waits for name, waits in speed["ttft"].items() if name.startswith("waits")}
    assert waits == {"waits_for_prefill": False, "waits_for_memory": True}
    request_s = (speed["ttft"]["value"] + 500 * speed["tpot"]["value"]) / 1e3
    assert speed["throughput"]["value"] / 500 * request_s == pytest.approx(128)
    assert speed["ttft"]["low"] < 341e3
    assert speed["ttft"]["high"] > 348e3
    assert (
        "on average, as 56 of 128 at once wait for memory of decode"
        in run("plan", "--chip", "mi300x", *MEMORY, "--concurrency", 128)[1]
    )
    # beyond the slots of all lanes requests wait for one, whatever binds the output
    beyond = speed_of(run, "--nodes", 4, "--prompt-tokens", 1000, "--output-tokens", 1000, "--concurrency", 600)
    assert (beyond["binds"], beyond["ttft"]["waits_for_memory"]) == ("maxNumSeqs", True)
    assert beyond["ttft"]["value"] == pytest.approx(418e3, rel=0.01), "what replays give"


@pytest.mark.parametrize("rate", [0.1, 0.15])
def test_a_rate_keeps_those_in_prefill_under_way_too(run: Run, rate: float) -> None:
    speed = speed_of(run, *MEMORY, "--requests-per-second", rate, "--target-tpot", "250ms")
    assert (speed["binds"], speed["throughput"]["value"]) == ("rate", pytest.approx(rate * 500))
    request_s = (speed["prefill"]["value"] + 500 * speed["tpot"]["value"]) / 1e3
    assert speed["concurrency"] >= rate * request_s > speed["running"]


@pytest.mark.parametrize(
    ("rate", "told", "flags"),
    [
        (0.35, "KV pages bind, held by 72 in prefill and decode; add groups to decode", ("--decode-groups", 2)),
        (0.17, "state slots bind, held by 32 in prefill and decode; raise maxNumSeqs", ("--max-num-seqs", 4)),
    ],
)
def test_a_rate_that_memory_does_not_serve_is_a_miss(
    run: Run, rate: float, told: str, flags: tuple[object, ...]
) -> None:
    """Decode has room for what runs, and none for what is in prefill beside it."""
    load = (*MEMORY, "--requests-per-second", rate, "--target-tpot", "340ms" if rate > 0.3 else "260ms")
    served = speed_of(run, *load)["throughput"]["value"] / 500
    status, out, _ = run("plan", "--chip", "mi300x", *load)
    assert status == 1
    assert f"misses: --requests-per-second: got {rate:g}, expected at most {served:.3g}, where {told}" in out
    assert run("plan", "--chip", "mi300x", *load, *flags)[0] == 0, "the remedy"


@pytest.mark.parametrize(
    ("lengths", "at_once"), [(UNFED, 200), (("--prompt-tokens", 14_336, "--output-tokens", 800), 184)]
)
def test_the_band_of_a_wait_holds_both_phases(run: Run, lengths: tuple[object, ...], at_once: int) -> None:
    """Slow prompts beside fast decodes wait longest; at the other end none waits, and a prompt takes its own time."""
    speed = speed_of(run, "--nodes", 4, *lengths, "--concurrency", at_once)
    prompt, tpot, outputs = speed["prefill_busy"], speed["tpot"], lengths[-1]

    def ttft(of_prompt: str, of_token: str) -> float:
        return float(at_once * prompt[of_prompt] / prompt["lanes"] - outputs * tpot[of_token])

    assert speed["ttft"]["high"] == pytest.approx(ttft("high", "low"))
    assert speed["ttft"]["low"] == pytest.approx(max(prompt["low"], ttft("low", "high")))


def test_a_target_that_is_missed_by_waiting_is_not_called_unsure(run: Run) -> None:
    load = ("--prompt-tokens", 14_336, "--output-tokens", 800, "--concurrency", 184)
    speed = speed_of(run, "--nodes", 4, *load)
    between = (speed["prefill_busy"]["value"] + speed["prefill_busy"]["high"]) / 2
    assert between < speed["ttft"]["value"]
    out = run("plan", "--chip", "mi300x", "--nodes", 4, *load, "--target-ttft", f"{between:.0f}ms")[1]
    assert "misses: --target-ttft" in out
    assert "warning: --target-ttft" not in out
    assert "spec.workload.targets" not in out


def test_attention_of_prompts_of_many_lengths_is_their_mean(run: Run, tmp_path: Path) -> None:
    """It grows with the square: two prompts of 4,000 and 60,000 take longer than two of 32,000."""

    def prefill(prompt: object) -> float:
        file = tmp_path / "load.yaml"
        file.write_text(yaml.safe_dump({"prompt": prompt, "output": 500}))
        return float(speed_of(run, "--nodes", 4, "--workload", file)["prefill"]["value"])

    short, long, middle, mixed = map(prefill, (4_000, 60_000, 32_000, {"empirical": [4_000, 60_000]}))
    assert mixed == pytest.approx((short + long) / 2, rel=0.02)
    assert mixed > 1.1 * middle


def test_a_search_gives_what_a_plan_gives_of_a_rate(run: Run) -> None:
    load = ("--chip", "mi300x", "--prompt-tokens", 1000, "--output-tokens", 300, "--requests-per-second", 1)
    asked = (*load, "--target-tpot", "150ms", "--cost", 2, "-o", "json")
    found = json.loads(run("plan", *asked, "--nodes", 4)[1])
    ranked = json.loads(run("plan", *asked, "--search", 4)[1])["ranked"]
    (same,) = (each for each in ranked if each["decode"]["tensor_parallel"] == 2)
    assert same["tokens_per_second"] == pytest.approx(found["speed"]["throughput"]["value"])
    assert max(each["tokens_per_second"] for each in ranked) < 1.05 * 300


def test_a_target_is_judged_by_the_load_that_is_stated(run: Run) -> None:
    """One client has one request in decode, whatever a captured step of all lanes would take."""
    load = ("--nodes", 4, "--prompt-tokens", 1000, "--output-tokens", 300, "--concurrency", 1)
    speed = speed_of(run, *load)
    assert speed["tpot"] == speed["tpot_alone"]
    barely = speed["tpot"]["value"] * 1.01
    status, out, _ = run("plan", "--chip", "mi300x", *load, "--target-tpot", f"{barely:.2f}ms")
    assert (status, "misses" in out) == (0, False)
    wait = speed["prefill_busy"]["value"] * 1.01
    assert run("plan", "--chip", "mi300x", *load, "--target-ttft", f"{wait:.1f}ms")[0] == 0


def test_times_never_fall_with_more_at_once(run: Run) -> None:
    load = ("--nodes", 4, "--prompt-tokens", 8_000, "--output-tokens", 200, "--max-num-seqs", 32)
    found = [speed_of(run, *load, "--concurrency", at)["ttft"]["value"] for at in (1, 4, 8, 24, 28, 32, 64, 200)]
    assert found == sorted(found)


@pytest.mark.parametrize(("target", "told"), [(0.9, "misses: "), (1.1, "warning: ")])
def test_a_target_is_held_against_the_mean_with_waits(run: Run, target: float, told: str) -> None:
    """One that a prompt beside others would meet for sure."""
    load = ("--prompt-tokens", 14_336, "--output-tokens", 100, "--requests-per-second", 0.3, "--target-tpot", "300ms")
    found = json.loads(run("plan", "--chip", "mi300x", *load, "-o", "json")[1])["speed"]
    assert found["prefill_busy"]["value"] < 0.8 * found["ttft"]["value"]
    assert not found["ttft"]["waits_for_prefill"]
    ms = round(target * found["ttft"]["value"])
    status, out, _ = run("plan", "--chip", "mi300x", *load, "--target-ttft", f"{ms}ms")
    assert status == (told == "misses: ")
    line = next(line for line in out.splitlines() if line.startswith(f"{told}--target-ttft"))
    assert "within the band of" in line
    assert (ARRIVING in line) == (told == "misses: ")
