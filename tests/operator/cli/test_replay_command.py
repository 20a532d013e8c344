"""`kimictl replay`: figures by hand and against `kimictl plan`, text against JSON, and input that is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api.base import dump
from kimi_operator.api.deployment import Role
from kimi_operator.cli.asking import asked_for, make_plan
from kimi_operator.cli.figures import number, with_band
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags
from kimi_operator.cli.replayed import Pace, paces, replay_on, sides_of
from kimi_operator.cli.session_flags import SessionFlags
from kimi_operator.cli.sessions import asked_sessions
from kimi_operator.planner.predict import Prediction, Side, decode_step_ms, prefill_ms
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad
from kimi_operator.profiles import built_in_profiles
from msgspec.structs import replace

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X = ("--chip", "mi300x", "--nodes", 4)
AGENTS = ("--agents", 24, "--turns", 6, "--first-prompt-tokens", 12000, "--ramp", "30s")
Run = Callable[..., tuple[int, str, str]]
Document = Callable[..., dict[str, Any]]
Trace = Callable[..., Path]


@pytest.fixture
def document(run: Run) -> Document:
    """The JSON of a replay that exits 0 and says nothing on standard error."""

    def call(*arguments: object) -> dict[str, Any]:
        status, out, err = run("replay", *arguments, "-o", "json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """A file with a line for each turn."""

    def write(*turns: object) -> Path:
        file = tmp_path / "trace.jsonl"
        file.write_text("".join(f"{turn if isinstance(turn, str) else json.dumps(turn)}\n" for turn in turns))
        return file

    return write


def turn(session: str = "a", new: int = 1000, output: int = 100, **others: Any) -> dict[str, Any]:
    return {"session": session, "newTokens": new, "outputTokens": output, **others}


# figures


def test_an_example_by_hand(document: Document, trace: Trace) -> None:
    # Session a asks 1,000 tokens and is answered 100, thinks, adds 500 and is answered 50, thinks, adds 10 for 20.
    # Session b begins at 3 s, asks 64 and is answered 64.
    turns = (
        turn("a", 1000, 100, thinkSeconds=10), turn("b", 64, 64, startSeconds=3),
        turn("a", 500, 50, thinkSeconds=10), turn("a", 10, 20),
    )  # fmt: skip
    found = document(*MI300X, "--trace", trace(*turns), "--reuse", 0.5)
    summary, cache = found["summary"], found["prefix_cache"]
    # prompts of a: 1000, 1000 + 100 + 500 = 1600, 1600 + 50 + 10 = 1660; of b: 64
    assert summary["prompt_tokens"] == 1000 + 1600 + 1660 + 64
    # half of the earlier context is found: 1100 / 2 = 550 of 1600, and 1650 / 2 = 825 of 1660
    assert summary["computed_tokens"] == 1000 + (1600 - 550) + (1660 - 825) + 64
    # the other half is computed again: 550 and 825
    assert summary["recomputed_tokens"] == 550 + 825
    assert summary["output_tokens"] == 100 + 50 + 20 + 64
    # whole turns in pages of 64: 1100 -> 18, 1650 -> 26, 1680 -> 27 (27 x 64 = 1728), 128 -> 2.
    # b is served while a's first turn is, since 100 tokens take over 5 s: 18 + 2 = 20 < 27.
    assert summary["pages_peak"] == 27
    assert (summary["held_peak"], summary["turns"], summary["binds"]) == (2, 4, "nothing: no request waited")
    # A cache has prompts in whole pages: 15 x 64 = 960 of 1100 tokens, then 25 x 64 = 1600 of 1650.
    assert (cache["context_tokens"], cache["found_tokens"]) == (1100 + 1650, 960 + 1600)
    assert (cache["returning_turns"], cache["evicted_turns"]) == (2, 0)
    # prompts to come back to: 16 pages (1000), then 25 (1600), each with its state, 224,686,080 B of 1,769,472 B a page
    assert cache["wanted_pages"] == 25 + 127
    # thinking is no wait: a's three turns, each with its prefill and its answer, and 20 s between them. Prefill gives
    # the first token, so 50 tokens take 49 steps.
    a = [row for row in found["by_turn"] if row["last"] == row["first"] > 1]
    assert [(row["prompt_tokens"], row["computed_tokens"]) for row in a] == [(1600, 1050), (1660, 835)]
    last = sum(row["ttft_p50"]["value"] + row["tpot_p50"]["value"] * n for row, n in zip(a, (49, 19), strict=True))
    first = found["by_turn"][0]
    # the longer of the first turns is a's; b decodes beside it, and its TPOT is the shorter
    assert first["served"] == 2
    begun = found["duration"]["value"] - last / 1e3 - 20 - first["ttft_p95"]["value"] / 1e3
    steps = [99 * first[name]["value"] / 1e3 for name in ("tpot_p50", "tpot_p95")]
    assert any(begun == pytest.approx(each) for each in steps)


@pytest.mark.parametrize("chunk", [2048, 300])
def test_one_turn_alone_is_what_plan_predicts(
    run: Run, document: Document, trace: Trace, tmp_path: Path, chunk: int
) -> None:
    profile = dump(built_in_profiles()["mi300x"])
    profile["spec"]["limits"]["prefillBatchedTokens"] = chunk
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(profile))
    found = document("-f", file, *MI300X, "--trace", trace(turn(new=20_000)))
    work = ("--prompt-tokens", 20_000, "--output-tokens", 100, "--concurrency", 1)
    speed = json.loads(run("plan", "-f", file, *MI300X, *work, "-o", "json")[1])["speed"]
    for mine, its in ((found["ttft"]["p50"], speed["prefill"]), (found["tpot"]["p50"], speed["tpot_alone"])):
        for end in ("value", "low", "high"):
            assert mine[end] == pytest.approx(its[end], rel=1e-3), end
    assert found["handoff"]["value"] == speed["handoff"]["value"]
    assert found["calibrated_on"]["decode"] == speed["tpot"]["calibrated_on"]


def test_the_ninth_prompt_waits_for_the_first_of_eight_lanes(document: Document, trace: Trace) -> None:
    """All ask at once. The ninth is begun with what the first prompt on its lane leaves of its last chunk."""
    alone = document(*MI300X, "--trace", trace(turn(new=20_000)))["ttft"]["p50"]["value"] / 1e3
    found = document(*MI300X, "--trace", trace(*(turn(f"{i}", 20_000) for i in range(9))))
    assert found["service"]["prefill_lanes"] == 8
    planned = make_plan(asked_for([], DeploymentFlags(chip="mi300x", nodes=4), WorkloadFlags()))
    side = sides_of(planned)[Role.PREFILL]
    # 20,000 tokens are nine chunks and a part of the tenth; eight lanes compute at once
    nine = prefill_ms(side.setup, PrefillLoad(9 * 2048, 0, 2048, 8), side.calibration)
    assert found["summary"]["lane_wait_s"] == pytest.approx(nine.value / 1e3)
    assert found["summary"]["memory_wait_s"] == 0
    assert found["summary"]["binds"] == "prefill lanes (8 in all)"
    assert found["ttft"]["p95"]["value"] / 1e3 > 2 * alone, "it waits, and computes beside seven others"
    rows = found["over_time"]
    assert (rows[0]["binds"], rows[0]["waiting_peak"]) == ("prefill lanes", 1)
    assert rows[-1]["binds"] == ""


def test_a_place_in_the_batch_binds_after_prefill(document: Document, trace: Trace) -> None:
    """Four lanes of one running request and two slots each: all eight prompts are computed in two rounds of four."""
    flags = ("--chip", "mi300x", "--tensor-parallel", 4, "--max-num-seqs", 1)
    alone = document(*flags, "--trace", trace(turn(new=20_000)))["ttft"]["p50"]["value"]
    found = document(*flags, "--trace", trace(*(turn(f"{i}", 20_000, 300) for i in range(8))))
    service, summary = found["service"], found["summary"]
    assert (service["max_running"], service["num_slots"], service["prefill_lanes"]) == (4, 8, 4)
    assert (summary["held_peak"], summary["memory_wait_s"]) == (8, 0)
    # the second round is computed while the first decodes; 300 tokens take longer than a prompt
    assert 2 * alone < found["ttft"]["p95"]["value"] < 2.5 * alone
    assert summary["binds"] == "maxNumSeqs (1 a lane)"


def test_a_step_has_those_that_decode_in_it_and_no_others(document: Document, trace: Trace) -> None:
    """184 prompts on eight lanes of prefill: an answer of 100 tokens meets two rounds of eight, not all others."""
    found = document(*MI300X, "--trace", trace(*(turn(f"{i}", 20_000, 100) for i in range(184))))
    few = document(*MI300X, "--trace", trace(*(turn(f"{i}", 20_000, 100) for i in range(24))))
    assert found["summary"]["held_peak"] == 152, "a lane's pages hold 19 requests of 316"
    assert found["tpot"]["p50"]["value"] == pytest.approx(few["tpot"]["p50"]["value"], rel=0.05)


def test_a_lane_holds_one_request_of_more_than_half_its_pages(document: Document, trace: Trace) -> None:
    found = document(*MI300X, "--trace", trace(*(turn(f"{i}", 220_000, 20_000) for i in range(32))))
    assert (found["service"]["lane"]["num_pages"], found["service"]["lanes"]) == (6195, 8)
    # 240,000 tokens are 3,750 pages: thirteen would fit 49,560 pages in one
    assert (found["summary"]["held_peak"], found["summary"]["pages_peak"]) == (8, 8 * 3750)
    assert found["summary"]["binds"] == "KV pages (6,195 a lane)"


def test_kept_prompts_count_with_their_state(document: Document) -> None:
    """1,000 prompts of 2,000 tokens are 32,000 of 49,560 pages; with a state of 127 pages each only some 310 fit."""
    flags = (
        "--agents",
        1000,
        "--turns",
        2,
        "--first-prompt-tokens",
        2000,
        "--turn-tokens",
        200,
        "--output-tokens",
        100,
    )
    cache = document(*MI300X, *flags, "--think-time", "600s", "--ramp", "600s")["prefix_cache"]
    assert cache["wanted_pages"] > 500 * (32 + 127)
    assert 0.2 < cache["reuse"] < 0.6


def test_turns_that_a_worker_would_refuse_or_let_fail_are_warned_of(run: Run, tmp_path: Path, trace: Trace) -> None:
    """Four prompts a lane of two slots, where one may wait; and no prompt is computed in a second."""
    profile = dump(built_in_profiles()["mi300x"])
    profile["spec"]["limits"]["maxQueued"] = 1
    profile["spec"]["timeouts"]["reservationSeconds"] = 1
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(profile))
    flags = ("-f", file, "--chip", "mi300x", "--tensor-parallel", 4, "--max-num-seqs", 1)
    turns = trace(*(turn(f"{i}", 20_000) for i in range(16)))
    status, out, _ = run("replay", *flags, "--trace", turns)
    # of a lane's four two have slots, one may wait, and one is refused
    refused = "4 of 16 turns would be refused (429), and are counted as served: their lane has 1 request waiting"
    failed = "16 of 16 turns would fail, and are counted as served: prefill ends later than 1 s after decode made room"
    assert f"warning: {refused}" in out
    assert f"warning: {failed}" in out
    assert status == 1
    assert run("replay", *flags[2:], "--trace", turns)[0] == 0


def test_answers_of_one_token_have_no_time_between_tokens(run: Run, document: Document, trace: Trace) -> None:
    file = trace(turn(output=1))
    found = document(*MI300X, "--trace", file)
    assert found["tpot"] == {"p50": None, "p95": None}
    assert found["by_turn"][0]["tpot_p50"] is None
    assert found["duration"]["value"] * 1e3 == pytest.approx(found["ttft"]["p50"]["value"])
    assert "TPOT             none at the median, none at p95" in run("replay", *MI300X, "--trace", file)[1]


@pytest.mark.parametrize("source", [0.0, 0.9, "trace"])
def test_the_paces_cover_the_bands_of_every_turn(trace: Trace, source: float | str) -> None:
    flags = SessionFlags(agents=12, turns=6, first_prompt_tokens=12_000, ramp="30s", reuse=0.0)
    if source == "trace":
        # the band of 2,000 tokens after 300,000 cached ones is wider than those of the least and the most computed
        turns = (turn("a", 150_000, 10), turn("a", 150_000, 10), turn("a", 2000, 10), turn("b", 100, 10))
        flags = SessionFlags(trace=trace(*turns), reuse=1.0)
    else:
        flags = dataclasses.replace(flags, reuse=float(source))
    asked = asked_sessions(flags)
    planned = make_plan(asked_for([], DeploymentFlags(chip="mi300x", nodes=4), WorkloadFlags()))
    outcome = replay_on(planned, asked, 10)
    sides, served = sides_of(planned), outcome.value.replayed.turns
    of_prefill, of_decode = paces(served, outcome.service, sides, 2048)
    for each in served[:: 1 + len(served) // 12]:
        cached = each.prompt_tokens - each.computed_tokens
        for busy in (1, 4, 8):
            found = prefill_ms(
                sides[Role.PREFILL].setup,
                PrefillLoad(each.computed_tokens, cached, 2048, busy),
                sides[Role.PREFILL].calibration,
            )
            assert of_prefill.low <= found.low / found.value * (1 + 1e-9)
            assert found.high / found.value <= of_prefill.high * (1 + 1e-9)
        for decoding in range(1, 1 + len({turn.session for turn in served})):
            load = DecodeLoad(decoding, each.prompt_tokens + each.output_tokens // 2)
            found = decode_step_ms(sides[Role.DECODE].setup, load, sides[Role.DECODE].calibration)
            assert of_decode.low <= found.low / found.value * (1 + 1e-9)
            assert found.high / found.value <= of_decode.high * (1 + 1e-9)


def test_the_band_of_a_step_is_of_the_requests_of_one_group() -> None:
    """24 sessions on two groups of decode are 12 on one: fewer of them have a wider band."""
    planned = make_plan(asked_for([], DeploymentFlags(chip="mi300x", nodes=4), WorkloadFlags()))
    asked = asked_sessions(SessionFlags(agents=24, turns=1, first_prompt_tokens=4_000))
    outcome, sides = replay_on(planned, asked, 10), sides_of(planned)
    turns = outcome.value.replayed.turns
    assert {turn.prompt_tokens for turn in turns} == {4_000}
    of_two = {**sides, Role.DECODE: replace(sides[Role.DECODE], groups=2)}

    def pace(sessions: int, on: dict[Role, Side]) -> Pace:
        return paces(turns[:sessions], outcome.service, on, 2048)[1]

    assert pace(24, of_two) == pace(12, sides) != pace(24, sides)


def test_reuse_spares_recomputation_and_waiting(document: Document) -> None:
    none, most = (document(*MI300X, *AGENTS, "--reuse", share) for share in (0, 0.9))
    assert none["summary"]["computed_tokens"] == none["summary"]["prompt_tokens"]
    assert most["summary"]["recomputed_tokens"] < 0.11 * none["summary"]["recomputed_tokens"]
    assert most["ttft"]["p50"]["value"] < 0.5 * none["ttft"]["p50"]["value"]
    assert most["summary"]["prompt_tokens"] == none["summary"]["prompt_tokens"]


def test_bands_hold_the_value_and_are_replays_of_their_own(document: Document) -> None:
    found = document(*MI300X, *AGENTS)
    banded = [*found["ttft"].values(), *found["tpot"].values(), found["duration"]]
    banded += [row[name] for row in found["by_turn"] for name in ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")]
    # a percentile of faster turns need not be less: they come back sooner, and meet others
    assert all(each["low"] <= each["value"] <= each["high"] for each in banded)
    assert all(each["low"] < each["value"] < each["high"] for each in (found["duration"], found["tpot"]["p50"]))
    for end in ("low", "high"):
        assert found["duration"][end] == found[f"summary_{end}"]["duration_s"]
    tokens = {found[name]["computed_tokens"] for name in ("summary", "summary_low", "summary_high")}
    assert len(tokens) == 1, "only times differ"


def test_one_seed_gives_one_answer_and_another_a_different_one(run: Run) -> None:
    first, again, other = (run("replay", *MI300X, "--agents", 4, "--seed", seed)[1] for seed in (7, 7, 8))
    assert first == again != other


# text


def shown(each: dict[str, Any]) -> str:
    return with_band(Prediction(each["value"], each["low"], each["high"], each["unit"], ""))


def test_text_and_json_say_the_same(run: Run, document: Document) -> None:
    found = document(*MI300X, *AGENTS)
    status, out, err = run("replay", *MI300X, *AGENTS)
    assert (status, err) == (0, "")
    summary, cache = found["summary"], found["prefix_cache"]
    lasted_s = found["duration"]["value"]
    for expected in (
        f"{summary['binds']}; longest wait {summary['memory_wait_s']:,.1f} s",
        f"{shown(found['ttft']['p50'])} at the median, {shown(found['ttft']['p95'])} at p95",
        f"{shown(found['tpot']['p50'])} at the median, {shown(found['tpot']['p95'])} at p95",
        f"{shown(found['duration'])} for {summary['turns']:,} turns, {number(summary['turns'] / lasted_s)} a second; "
        f"answers {summary['output_tokens']:,} tokens, {number(summary['output_tokens'] / lasted_s)} a second",
        f"{summary['prefill_lockstep']:.0%} of that behind the slowest lane of a group; "
        f"computes {summary['computed_tokens']:,} of {summary['prompt_tokens']:,} prompt tokens",
        f"{summary['recomputed_tokens']:,} tokens that an earlier turn had",
        f"{summary['pages_peak']:,} of {found['service']['num_pages']:,} KV pages",
        f"{cache['wanted_pages']:,} of prefill's {cache['num_pages']:,} pages",
        f"{cache['evicted_turns']:,} of {cache['returning_turns']:,} returns",
        *found["notes"],
    ):
        assert expected in out
    lines = out.splitlines()
    start = lines.index(f"over time, a row for each {found['row_s']:,g} s") + 2
    for row, line in zip(found["over_time"], lines[start:], strict=False):
        cells = re.sub(r"\(\d+%\)", "", line).replace(",", "").split(maxsplit=7)
        assert cells[:3] == [f"{row[name]:.0f}" for name in ("start_s", "computed_per_s", "prompt_per_s")]
        assert cells[3:] == [
            f"{row['prefill_busy']:.0%}", f"{row['held']:.1f}", f"{row['pages_peak']}", f"{row['waiting_peak']}",
            row["binds"] or "-",
        ]  # fmt: skip
    start = lines.index("by turn, mean tokens") + 2
    for row, line in zip(found["by_turn"], lines[start:], strict=False):
        assert line.endswith(shown(row["tpot_p50"]))
        assert shown(row["ttft_p50"]) in line
        assert line.split()[:3] == [f"{row['first']}", f"{row['served']}", f"{row['prompt_tokens']:,.0f}"]


@pytest.mark.parametrize("agents", [("--agents", 2, "--turns", 2), ("--agents", 20, "--turns", 40)])
def test_the_text_is_one_screen(run: Run, agents: tuple[object, ...]) -> None:
    lines = run("replay", *MI300X, *agents)[1].splitlines()
    assert len(lines) <= 50
    assert max(len(line) for line in lines if "calibrated on" not in line) <= 140
    assert "predicted, not measured" in lines[4]


def test_rows_are_as_many_as_asked_at_most(document: Document) -> None:
    for rows in (1, 3, 40):
        found = document(*MI300X, "--agents", 4, "--turns", 5, "--rows", rows)
        assert 1 <= len(found["over_time"]) <= rows
        assert len(found["by_turn"]) == (5 if rows == 40 else rows)
        assert sum(row["served"] for row in found["by_turn"]) == 20


def test_yaml_holds_what_json_does(run: Run, document: Document) -> None:
    assert yaml.safe_load(run("replay", *MI300X, *AGENTS, "-o", "yaml")[1]) == document(*MI300X, *AGENTS)


def test_what_was_assumed_is_named(run: Run, document: Document) -> None:
    assumed = ["--turn-tokens", "--output-tokens", "--think-time"]
    assert document(*MI300X, *AGENTS)["sessions"]["assumed"] == assumed
    assert f"assumed, since not stated: {', '.join(assumed)}\n" in run("replay", *MI300X, *AGENTS)[1]


def test_a_manifest_is_replayed_on(document: Document) -> None:
    found = document("-f", EXAMPLES / "mi325x-2p2d.yaml", "--agents", 2, "--turns", 2)
    stated = yaml.safe_load((EXAMPLES / "mi325x-2p2d.yaml").read_text())["spec"]["decode"]["maxNumSeqs"]
    assert found["service"]["max_running"] == stated * 8
    assert found["profile"] == "mi325x"


def test_the_example_is_replayed_and_says_what_it_left_out(run: Run, document: Document) -> None:
    found = document("-f", EXAMPLES / "mi300x-2p2d.yaml", "--trace", EXAMPLES / "trace.jsonl")
    assert (found["sessions"]["count"], found["summary"]["turns"], found["sessions"]["assumed"]) == (2, 6, [])


def test_defaults_of_a_trace_are_named(run: Run, document: Document, trace: Trace) -> None:
    file = trace(turn(), turn("b"), turn(), turn())
    assumed = ["startSeconds 0 for 2 sessions", "thinkSeconds 0 for 2 turns"]
    assert document(*MI300X, "--trace", file)["sessions"]["assumed"] == assumed
    assert f"assumed, since not stated: {', '.join(assumed)}\n" in run("replay", *MI300X, "--trace", file)[1]


def test_a_trace_can_come_from_standard_input(
    run: Run, document: Document, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = trace(turn(), "", turn("b", startSeconds=2)).read_text()
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    found = document(*MI300X, "--trace", "-")
    assert (found["sessions"]["count"], found["summary"]["turns"]) == (2, 2)
    assert "seed" not in found["sessions"]


# what does not fit


def test_sessions_that_outgrow_the_longest_request_end_early_and_decide_the_exit_status(run: Run) -> None:
    flags = (*MI300X, "--max-model-len", 20_000, "--agents", 3, "--turns", 8)
    status, out, err = run("replay", *flags)
    assert (status, err) == (1, "")
    assert "warning: 3 of 3 sessions end early: their next turn would be longer than 20,000 tokens" in out
    status, out, _ = run("replay", *flags, "-o", "json")
    assert (status, json.loads(out)["summary"]["cut_sessions"]) == (1, 3)


def test_when_no_turn_is_served_there_are_no_times(run: Run) -> None:
    """The first answers are longer than what is left of the longest request."""
    flags = (*MI300X, "--max-model-len", 12_001, "--agents", 3, "--turns", 8, "--first-prompt-tokens", 12_000)
    status, out, _ = run("replay", *flags)
    assert (status, out.splitlines()[-1]) == (1, "no turn is served")
    assert "TTFT" not in out
    status, out, _ = run("replay", *flags, "-o", "json")
    found = json.loads(out)
    assert (status, found["summary"]["cut_sessions"]) == (1, 3)
    assert (found["ttft"], found["duration"], found["over_time"], found["by_turn"]) == (None, None, [], [])


def test_a_deployment_that_does_not_fit_exits_1_with_the_arithmetic(run: Run) -> None:
    flags = (*MI300X, "--tensor-parallel", 1)
    status, out, _ = run("replay", *flags)
    assert (status, "191.0 GiB of weights + 32.2 GiB reserved" in out) == (1, True)
    status, out, _ = run("replay", *flags, "-o", "json")
    assert (status, json.loads(out)["feasible"]) == (1, False)


def test_reuse_that_the_pool_cannot_keep_is_warned_of(document: Document) -> None:
    flags = ("--agents", 40, "--turns", 2, "--first-prompt-tokens", 150_000, "--ramp", "0s")
    found = document(*MI300X, *flags, "--reuse", 0.9)
    cache = found["prefix_cache"]
    # 40 prompts of 150,000 tokens are 40 x 2,344 pages; all lanes of prefill together have 49,560
    assert cache["num_pages"] == 49_560
    assert cache["evicted_turns"] >= 40 - 49_560 // 2344
    assert any(warning.startswith("reuse of 90.0% cannot be had") for warning in found["warnings"])
    assert not document(*MI300X, *flags)["warnings"]


# bad input


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--agents", 0), "--agents: got 0, expected from 1 to 10,000; correct it"),
        (("--agents", -3), "--agents: got -3, expected from 1 to 10,000; correct it"),
        (("--agents", 1.5), "--agents: got '1.5', expected a whole number; write 1 or 2"),
        (("--agents", 10**12), "--agents: got 1,000,000,000,000, expected from 1 to 10,000"),
        (("--agents", 500, "--turns", 50), "--agents: got 500 x 50 turns = 25,000, expected at most 10,000 turns"),
        (("--turns", 0), "--turns: got 0"),
        (("--first-prompt-tokens", 0), "--first-prompt-tokens: got 0"),
        (("--first-prompt-tokens", 10**9), "--first-prompt-tokens: got 1,000,000,000, expected from 1 to 16,777,216"),
        (("--first-prompt-tokens", 396_480), "--first-prompt-tokens: got 396,480, expected less than 396,480 tokens"),
        (("--turn-tokens", 0), "--turn-tokens: got 0"),
        (("--output-tokens", 0), "--output-tokens: got 0"),
        (("--think-time", "15"), "--think-time: got '15', expected a time with its unit; write 60ms or 0.06s"),
        (("--think-time", "2d"), "--think-time: got '2d', expected a time with its unit"),
        (("--think-time=-1s",), "--think-time: got '-1s', expected a time with its unit"),
        (("--think-time", "86401s"), "--think-time: got 86,401s, expected at most 86,400s, a day; lower it"),
        (("--ramp", "inf"), "--ramp: got 'inf', expected a time with its unit"),
        (("--ramp", f"{'9' * 400}s"), " and 361 characters more, expected a time with its unit"),
        (("--seed", -1), "--seed: got -1, expected a whole number from 0 to 4294967295"),
        (("--reuse", 1.1), "--reuse: got 1.1, expected a share from 0 to 1"),
        (("--reuse", "nan"), "--reuse: got nan, expected a share from 0 to 1"),
        (("--reuse", "most"), "--reuse"),
        (("--rows", 0), "--rows: got 0, expected from 1 to 200"),
        (("--rows", 201), "--rows: got 201, expected from 1 to 200"),
        (("--trace", "t.jsonl", "--turns", 3), "--turns: got a flag beside --trace, expected either of them"),
        (("--trace", "none.jsonl"), "none.jsonl: got No such file or directory, expected a readable file"),
        (("-o", "pdf"), "-o: got 'pdf', expected one of text, json, yaml, markdown, html; choose one of them"),
        (("--sessions", 3), "--sessions"),
    ],
)
def test_flags_that_cannot_be_are_refused(run: Run, flags: tuple[object, ...], expected: str) -> None:
    status, out, err = run("replay", *MI300X, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert expected in err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "--file: got nothing, expected a manifest, or flags such as --chip mi300x"),
        (("-f", "-", "--trace", "-"), "--file: got - beside --trace -, expected one of them to be standard input"),
        (("--chip", "h100"), "--chip: got 'h100'"),
        (("--nodes", 4), "--chip: got nothing"),
        (("-f", EXAMPLES / "mi300x-2p2d.yaml", "--nodes", 4), "--nodes: got a flag beside a manifest"),
        (("--chip", "mi308x"), "HardwareProfile mi308x: spec.gpu.bf16FlopsPerSecond: got nothing"),
    ],
)
def test_deployments_that_cannot_be_are_refused(run: Run, flags: tuple[object, ...], expected: str) -> None:
    status, out, err = run("replay", *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert expected in err


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((), ": got no turns, expected a line of JSON for each turn"),
        (("{",), ": line 1: got no JSON: Expecting property name"),
        (('{"session": "a", "newTokens": ' + "9" * 5000 + "}",), ": line 1: got no JSON: a number of too many digits"),
        (("[" * 100_000,), ": line 1: got no JSON: objects in objects without end"),
        (("[1]",), ": line 1: got list, expected an object with session, newTokens and outputTokens"),
        ((turn(), "", "true"), ": line 3: got bool"),
        ((turn(), {"session": "a", "newTokens": 5}), ": line 2.outputTokens: got nothing, expected a value; set it"),
        ((turn(), turn(new=0)), ": line 2.newTokens: got 0, expected greater than or equal to 1"),
        ((turn(new=1.5),), ": line 1.newTokens: got 1.5, expected a valid integer"),
        ((turn(new="9"),), ": line 1.newTokens: got '9', expected a valid integer"),
        ((turn(new=10**9),), ": line 1.newTokens: got 1000000000, expected less than or equal to 16777216"),
        ((turn(new=396_479), turn("b", 396_480)), ": line 2.newTokens: got 396,480, expected less than 396,480"),
        ((turn(session=""),), ": line 1.session: got ''"),
        ((turn(session=3),), ": line 1.session: got 3"),
        ((turn(think=3),), ": line 1.think: got 3, expected no such field; remove it or mend its spelling"),
        ((turn(thinkSeconds=-1),), ": line 1.thinkSeconds: got -1"),
        ((turn(thinkSeconds=90_000),), ": line 1.thinkSeconds: got 90000"),
        ((turn(startSeconds=float("nan")),), ": line 1.startSeconds: got nan"),
        ((turn(), turn(startSeconds=4)), ": line 2.startSeconds: got 4 on a later turn of 'a', expected it on the"),
        ((turn(),) * 10_001, ": got more turns, at "),
    ],
    ids=range(20),
)
def test_lines_of_a_trace_that_cannot_be_are_refused(
    run: Run, trace: Trace, turns: tuple[object, ...], expected: str
) -> None:
    file = trace(*turns)
    status, out, err = run("replay", *MI300X, "--trace", file)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"kimictl: {file}{expected}")


def test_a_trace_that_is_no_text_is_refused_by_its_name(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(bytes(range(255, 0, -1)))
    status, out, err = run("replay", *MI300X, "--trace", file)
    assert (status, out) == (2, "")
    assert err.startswith(f"kimictl: {file}: got no UTF-8")
