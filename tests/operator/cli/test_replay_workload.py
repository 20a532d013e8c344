"""A manifest's workload as defaults of `kimictl replay`: what is taken, what a flag or a trace says, and targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.planner.agents import Agents, draw
from kimi_operator.planner.pressure import share_within

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SMALL = ("--agents", 3, "--turns", 4)

Run = Callable[..., tuple[int, str, str]]
Manifest = Callable[..., Path]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """The example with this workload."""

    def write(max_model_len: int | None = None, **workload: Any) -> Path:
        document = yaml.safe_load((EXAMPLES / "mi300x-workload.yaml").read_text())
        document["spec"]["workload"] = workload
        if max_model_len:
            document["spec"]["model"]["maxModelLen"] = max_model_len
        file = tmp_path / "k3.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    return write


def found(run: Run, *flags: object, status: int = 0) -> dict[str, Any]:
    got, out, err = run("replay", *flags, "-o", "json")
    assert (got, err) == (status, "")
    return json.loads(out)


def test_all_that_has_a_meaning_is_taken_and_said(run: Run, manifest: Manifest) -> None:
    file = manifest(
        prompt={"fixed": 5000}, output={"uniform": {"min": 100, "max": 140}}, reuse=0.5, concurrency=6,
        targets={"ttftSeconds": 4, "tpotSeconds": 0.2},
    )  # fmt: skip
    told = found(run, "-f", file)
    sessions, summary = told["sessions"], told["summary"]
    assert (sessions["count"], sessions["reuse"], sessions["first_prompt_tokens"]) == (6, 0.5, 5000)
    assert 100 * 60 < summary["output_tokens"] < 140 * 60
    assert told["by_turn"][0]["prompt_tokens"] == 5000
    assert sessions["assumed"] == ["--turns", "--turn-tokens", "--think-time", "--ramp"]
    taken = [
        "prompt as --first-prompt-tokens (of first turns alone: later prompts hold the session so far)",
        "output as --output-tokens", "reuse (of earlier turns alone)", "concurrency as --agents", "targets",
    ]  # fmt: skip
    assert (sessions["from_workload"], sessions["unused_of_workload"]) == (taken, [])
    text = run("replay", "-f", file)[1]
    assert f"from spec.workload: {', '.join(taken)}\n" in text
    assert "first prompt 5,000 tokens; answers 100 to 140 tokens; means of 3,000 added a turn, 15 s" in text
    assert "not used of spec.workload" not in text


def test_half_of_the_earlier_context_is_spared(run: Run, manifest: Manifest) -> None:
    """As --reuse 0.5 does, to the token."""
    told = found(run, "-f", manifest(prompt={"fixed": 5000}, output={"fixed": 100}, reuse=0.5), *SMALL)
    assert told["sessions"]["from_workload"][2] == "reuse (of earlier turns alone)"
    assert told["summary"]["recomputed_tokens"] > 0
    flag = found(run, "-f", manifest(prompt={"fixed": 5000}, output={"fixed": 100}), *SMALL, "--reuse", 0.5)
    assert told["summary"]["computed_tokens"] == flag["summary"]["computed_tokens"]


def test_reuse_that_the_worker_has_not_is_warned_of_once_and_as_it_is_replayed(run: Run, manifest: Manifest) -> None:
    file = manifest(prompt={"fixed": 5000}, output={"fixed": 100}, reuse=0.5)
    for flags, share in (((), "50%"), (("--reuse", 0.2), "20%")):
        (warning,) = [each for each in found(run, "-f", file, *SMALL, *flags)["warnings"] if "prefix cache" in each]
        assert f"with reuse of {share}; state 0 to see its own" in warning
    assert not found(run, "-f", file, *SMALL, "--reuse", 0)["warnings"]


def test_a_flag_wins_and_the_field_is_named_as_unused(run: Run, manifest: Manifest) -> None:
    file = manifest(prompt={"fixed": 5000}, output={"fixed": 100}, reuse=0.5, concurrency=6)
    flags = ("--agents", 2, "--reuse", 0, "--first-prompt-tokens", 700, "--output-tokens", 30, "--turns", 2)
    told = found(run, "-f", file, *flags)
    assert (told["sessions"]["count"], told["sessions"]["reuse"]) == (2, 0)
    assert told["by_turn"][0]["prompt_tokens"] == 700
    unused = [
        "prompt (--first-prompt-tokens says otherwise)", "output (--output-tokens says otherwise)",
        "reuse (--reuse says otherwise)", "concurrency (--agents says otherwise)",
    ]  # fmt: skip
    assert (told["sessions"]["from_workload"], told["sessions"]["unused_of_workload"]) == ([], unused)
    text = run("replay", "-f", file, *flags)[1]
    assert f"not used of spec.workload: {', '.join(unused)}\n" in text
    assert "from spec.workload" not in text


def test_a_trace_leaves_reuse_and_targets_alone(run: Run, manifest: Manifest) -> None:
    file = manifest(
        prompt={"fixed": 5000}, output={"fixed": 100}, reuse=0.5, requestsPerSecond=0.1, targets={"tpotSeconds": 1}
    )
    sessions = found(run, "-f", file, "--trace", EXAMPLES / "trace.jsonl")["sessions"]
    assert (sessions["count"], sessions["reuse"]) == (2, 0.5)
    assert sessions["from_workload"] == ["reuse (of earlier turns alone)", "targets"]
    assert sessions["unused_of_workload"] == [
        f"{field} (the trace has its own)" for field in ("prompt", "output", "requestsPerSecond")
    ]


def test_a_rate_is_named_as_unused_and_changes_nothing(run: Run, manifest: Manifest) -> None:
    """Sessions ask again when they are answered: how often turns come follows from that."""
    work = {"prompt": {"fixed": 5000}, "output": {"fixed": 100}, "targets": {"tpotSeconds": 1}}
    plain, rate = (found(run, "-f", manifest(**work, **more), *SMALL) for more in ({}, {"requestsPerSecond": 0.1}))
    pace = "sessions ask when they are answered, at no fixed rate; --agents and --ramp set the load"
    assert rate["sessions"].pop("unused_of_workload") == [f"requestsPerSecond ({pace})"]
    assert plain["sessions"].pop("unused_of_workload") == []
    assert (rate["sessions"], rate["by_turn"]) == (plain["sessions"], plain["by_turn"])
    assert "--ramp" in rate["sessions"]["assumed"]


@pytest.mark.parametrize("concurrency", [1001, 20_000])
def test_more_sessions_than_a_replay_has_are_refused_by_their_field(
    run: Run, manifest: Manifest, concurrency: int
) -> None:
    file = manifest(prompt={"fixed": 500}, output={"fixed": 100}, concurrency=concurrency)
    status, out, err = run("replay", "-f", file)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"kimictl: spec.workload.concurrency: got {concurrency:,}")
    assert "--agents" in err
    assert found(run, "-f", file, *SMALL)["sessions"]["count"] == 3


def test_the_share_of_turns_within_a_target(run: Run, manifest: Manifest) -> None:
    assert share_within([4.0, 1.0, 2.0, 3.0], 2.0) == 0.5, "a target that is just met is met"
    assert share_within([], 2.0) is None
    work = {"prompt": {"fixed": 5000}, "output": {"fixed": 100}}
    plain = found(run, "-f", manifest(**work), *SMALL)
    assert plain["targets"] == []
    halfway_s = plain["ttft"]["p50"]["value"] / 1e3
    file = manifest(**work, targets={"ttftSeconds": round(halfway_s + 1e-6, 6), "tpotSeconds": 1e-3})
    ttft, tpot = found(run, "-f", file, *SMALL)["targets"]
    # the median is the least time that half of the turns do not exceed
    assert (ttft["name"], ttft["share"]) == ("TTFT", 0.5)
    assert ttft["low"] <= ttft["share"] <= ttft["high"]
    assert ttft["low"] < ttft["high"], "all times at the high end meet less, at the low end more"
    assert (tpot["name"], tpot["share"], tpot["low"], tpot["high"]) == ("TPOT", 0, 0, 0)
    text = run("replay", "-f", file, *SMALL)[1]
    assert f"TTFT target      {ttft['target_s']:g} s, met by 50% of turns ({ttft['low']:.0%} to" in text
    assert "TPOT target      1 ms, met by 0% of turns (0% to 0%)" in text


def test_a_tail_that_the_deployment_ends_is_cut_and_not_refused(run: Run, manifest: Manifest) -> None:
    file = manifest(prompt={"logNormal": {"median": 8000, "p95": 60_000}}, output={"fixed": 10}, max_model_len=40_000)
    told = found(run, "-f", file, "--agents", 40, "--turns", 1, status=1)
    assert 0 < told["summary"]["cut_sessions"] < 20


def test_wrong_workloads_are_named_by_their_field(run: Run, manifest: Manifest) -> None:
    status, out, err = run("replay", "-f", manifest(prompt={}, output={"fixed": 10}))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kimictl: spec.workload.prompt: got nothing, expected exactly one of fixed")


def test_stated_lengths_are_drawn_equally_likely() -> None:
    agents = Agents(300, 10, 1, 50, 1, 0.0, first_prompts=(100, 200, 900), outputs=(7, 8))
    sessions = draw(agents, 0)
    firsts = [session.turns[0].new_tokens for session in sessions]
    outputs = [turn.output_tokens for session in sessions for turn in session.turns]
    # three standard errors of 300 draws at one third, and of 3,000 at one half
    assert all(firsts.count(each) == pytest.approx(100, abs=25) for each in (100, 200, 900))
    assert all(outputs.count(each) == pytest.approx(1500, abs=83) for each in (7, 8))
