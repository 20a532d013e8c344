"""`kimictl plan --check` as a user runs it."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest
import yaml
from kimi_operator.cli import check as check_module
from kimi_operator.cli import main
from kimi_operator.cli.held_out import summaries
from kimi_operator.planner.figures import Figure, Kind
from kimi_operator.planner.fit import Use, residuals
from kimi_operator.planner.predict import roofline_s
from kimi_operator.planner.roofline import ASSUMED, ASSUMED_RANGES, DecodeLoad, PrefillLoad
from kimi_operator.profiles.figures import published_figures
from kimi_operator.profiles.measurements import built_in_measurements
from msgspec.structs import replace

SAMPLES = built_in_measurements().samples
RATES = built_in_measurements().rates


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_every_row_is_shown_with_both_values_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--check")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    for figure in published_figures():
        assert figure.name in rows
    assert rows["pool_tokens_40e9_max_len_1e6"].split()[1:5] == ["2,836,158", "2,836,158", "exact", "met"]
    assert rows["weights_gib_per_gpu_measured_int4"].split()[1:8] == [
        "148.6",
        "148.192",
        "0.5",
        "%",
        "met",
        "-0.27",
        "%",
    ]
    note = out.splitlines()[out.splitlines().index(rows["mib_per_1024_token_request"]) + 1]
    assert note.startswith("    why: printed is 14,098 B x 1,024")
    assert "why: most likely what a token of the longest request costs the unified pool" in out
    assert "Decode alone gives 3.3 times as much" in out
    assert "Decode alone gains 1.4 times as much" in out
    counts = "42 met, 2 fitted, 3 met, inputs chosen, 3 by definition, 4 known not to reconcile"
    assert f"\n{len(published_figures())} rows: {counts}\n" in out


def test_json_holds_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--check", "-o", "json")
    document = json.loads(out)
    assert (status, document["ok"]) == (0, True)
    assert [f"{row['section']}.{row['name']}" for row in document["rows"]] == [f.path for f in published_figures()]
    caps = next(row for row in document["rows"] if row["name"] == "short_request_cap_mi300x_4e9_8_lanes")
    assert (caps["published"], caps["computed"], caps["verdict"], caps["deviation"]) == (96, 96, "met", 0.0)
    verdicts = {row["name"]: row["verdict"] for row in document["rows"]}
    assert set(verdicts.values()) == {"met", "fitted", "met, inputs chosen", "by definition", "known not to reconcile"}
    by_definition = {name for name, verdict in verdicts.items() if verdict == "by definition"}
    stated = {"mi300x_plateau_max_num_seqs_8", "mi325x_running_at_floor"}
    assert by_definition == {"needles"} | stated, "a sum, and what was set, cannot miss"
    fitted = {name for name, verdict in verdicts.items() if verdict == "fitted"}
    steps = {s.name for s in SAMPLES if s.use is Use.FITTED and isinstance(s.load, DecodeLoad)}
    assert fitted == steps, "a factor meets its own point"


def test_settings_of_the_report_say_which_inputs_were_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--check")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if "max_num_seqs_" in line}
    for name, (seqs, fits, tokens, first) in {
        "mi300x_max_num_seqs_13e9": (8, 8, "97,920", "40,321"),
        "mi325x_max_num_seqs_40e9": (32, 33, "69,120", "51,841"),
        "mi325x_max_num_seqs_40e9_at_floor": (64, 71, "23,040", "17,281"),
    }.items():
        binds = f"pages bind: {fits} requests of {tokens} tokens fit, a captured batch is {seqs}"
        assert rows[name].startswith(f"{seqs} {seqs} chosen met, inputs chosen {binds}")
        assert f"context chosen: {seqs} come out from {first} to {tokens} tokens" in rows[name]
        assert "bytes of a graph chosen by hand: 1/200 of the " in rows[name]


# Measured times


def test_every_measured_time_is_shown_with_its_use_error_and_band(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--check")
    table = out[out.index("measured time") :].splitlines()
    rows = {line.split()[0]: line.split() for line in table if re.match(r"  \S", line)}
    assert set(rows) == {sample.name for sample in SAMPLES} | {rate.name for rate in RATES}
    for sample in SAMPLES:
        assert ("held" in rows[sample.name]) == (sample.use is Use.HELD_OUT)
    step = next(r for r in residuals(SAMPLES) if r.sample.use is Use.FITTED and isinstance(r.sample.load, DecodeLoad))
    shown = [f"{1e3 * step.sample.measured_s:.2f}", f"{step.predicted.value:.2f}", f"{100 * step.error:+.1f}"]
    assert rows[step.sample.name][1:6] == ["fitted", *shown, "%"]
    assert rows["mi325x_20k"][1:4] == ["held", "out", "11,800"]
    outside = [sample.name for sample in SAMPLES if rows[sample.name][-1] == "NO"]
    assert outside == [each.sample.name for each in residuals(SAMPLES) if not each.is_in_band]
    assert {row[-1] for row in rows.values()} == {"yes", "NO"}


def held_out_errors(phase: type[DecodeLoad | PrefillLoad]) -> dict[str, float]:
    """By name: predicted over measured, less one."""
    held = [s for s in SAMPLES if s.use is Use.HELD_OUT and isinstance(s.load, phase)]
    errors = {
        each.sample.name: each.predicted.value / (1e3 * each.sample.measured_s) - 1 for each in residuals(SAMPLES)
    }
    return {sample.name: errors[sample.name] for sample in held}


def test_readme_claims_the_errors_that_held_out_times_have() -> None:
    """How far measured times lie from predicted ones, and which step is the farthest."""
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    steps, prompts = held_out_errors(DecodeLoad), held_out_errors(PrefillLoad)
    for words, errors in (("the eleven held-out steps", steps), ("the ten held-out prompts", prompts)):
        over = [100 * (1 / (1 + error) - 1) for error in errors.values()]
        assert f"{words} took from {-min(over):.0f} % less to {max(over):.0f} % longer than predicted" in readme
    assert (len(steps), len(prompts)) == (11, 10)
    farthest = max(steps, key=lambda name: abs(math.log1p(steps[name])))
    (load,) = (s.load for s in SAMPLES if s.name == farthest)
    assert isinstance(load, DecodeLoad)
    assert f"the farthest with {load.concurrency} at once" in readme


def test_the_bias_of_prompts_and_the_band_that_does_not_hold_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--check")
    decode, prefill = (next(x for x in out.splitlines() if x.startswith(f"{p}: ")) for p in ("decode", "prefill"))
    for line, phase in ((decode, DecodeLoad), (prefill, PrefillLoad)):
        errors = held_out_errors(phase)
        least, most = 100 * min(errors.values()), 100 * max(errors.values())
        outside = [e.sample.name for e in residuals(SAMPLES) if e.sample.name in errors and not e.is_in_band]
        words = [f"{len(errors)} held out, ", f"{least:+.1f} % to {most:+.1f} % off; "]
        words += [f"{len(errors) - len(outside)} in their bands" + (f", not {', '.join(outside)}" if outside else "")]
        assert all(each in line for each in words), line
    assert "on mi325x 623 ms to 50,000, 396 ms to 100,000, 671 ms to 200,000" in out
    assert "Where it falls, as on mi325x to 100,000 and 900,000, no sum" in out
    assert "was fitted: it is quick" not in out


def test_measured_throughput_is_held_out_and_shown_where_it_misses(capsys: pytest.CaptureFixture[str]) -> None:
    """All concurrencies of one source, not those that are met, and its warm run."""
    assert [(rate.concurrency, rate.tokens_per_second) for rate in RATES] == [
        (4, 50.4),
        (8, 218.5),
        (8, 269.7),
        (16, 429.0),
        (32, 747.8),
        (64, 1217.3),
    ]
    assert {rate.setup.engine.name for rate in RATES}.isdisjoint(
        sample.setup.engine.name for sample in SAMPLES if sample.use is Use.FITTED
    )
    _, out, _ = run(capsys, "--check")
    table = out[out.index("throughput, tokens/s") :].splitlines()
    rows = {line.split()[0]: line.split() for line in table if re.match(r"  \S", line)}
    shown = [rows[rate.name] for rate in RATES]
    assert shown[0][1:4] == ["held", "out", "50.40"]
    # what README says of them: two of six
    assert [row[-1] for row in shown] == ["NO", "NO", "yes", "yes", "yes", "yes"]
    assert "throughput: 6 held out, " in out
    assert "4 in their bands, not mi355x_1p1d_conc4, mi355x_1p1d_conc8\n" in out
    document = json.loads(run(capsys, "--check", "-o", "json")[1])
    for row, rate in zip(document["rates"], RATES, strict=True):
        assert row["measured"] == rate.tokens_per_second
        assert row["in_band"] == (row["low"] <= row["measured"] <= row["high"])
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


def seconds_to_first_token(concurrency: int, tokens_per_second: float, tpot_ms: float) -> float:
    """What of an answer's time is not its other 127 tokens, while so many clients wait for theirs."""
    return concurrency * 128 / tokens_per_second - 127 * tpot_ms / 1e3


def test_rates_outside_their_bands_say_what_would_explain_them(capsys: pytest.CaptureFixture[str]) -> None:
    """In seconds that follow from the measured rate and the measured step alone."""
    steps = {s.load.concurrency: 1e3 * s.measured_s for s in SAMPLES if s.name.startswith("mi355x_1p1d_tpot")}
    rates = {rate.name: rate for rate in RATES}
    first = {c: seconds_to_first_token(c, rates[f"mi355x_1p1d_conc{c}"].tokens_per_second, steps[c]) for c in steps}
    warm_s = seconds_to_first_token(8, rates["mi355x_1p1d_conc8_warm"].tokens_per_second, 25.70)
    least, most = min(first[c] for c in (8, 16, 32, 64)), max(first[c] for c in (8, 16, 32, 64))
    out = run(capsys, "--check")[1].splitlines()
    table = out[out.index("throughput, tokens/s") :]
    whys = {row.split()[0]: why for row, why in itertools.pairwise(table) if why.startswith("    why: ")}
    assert whys.keys() == {row.split()[0] for row in table if row.endswith(" NO")}
    cold, second = whys["mi355x_1p1d_conc4"], whys["mi355x_1p1d_conc8"]
    assert f"{first[4]:.1f} s of each answer's {4 * 128 / 50.4:.1f} s" in cold
    assert f"{least:.1f} to {most:.1f} s with 8 to 64 at once" in cold
    assert f"{first[8]:.1f} s passed before the first token, {warm_s:.1f} s in the warm run" in second
    assert all("the band does not cover it" in why for why in whys.values())
    document = json.loads(run(capsys, "--check", "-o", "json")[1])
    assert [row["reason"] for row in document["rates"]] == [rate.reason for rate in RATES]
    markdown = run(capsys, "--check", "-o", "markdown")[1]
    assert r"- mi355x\_1p1d\_conc4: The sweep began here" in markdown
    assert r"- mi355x\_tp8\_conc64: Met by chance" in markdown


def errors_over_ranges(phase: type[DecodeLoad | PrefillLoad], names: tuple[str, ...]) -> list[list[float]]:
    """Errors of held-out points for each combination, worked out from nothing but times of the roofline."""
    points = [sample for sample in SAMPLES if isinstance(sample.load, phase)]
    found = []
    for low_mid_high in itertools.product(range(3), repeat=len(names)):
        ends = {name: (*ASSUMED_RANGES[name], sum(ASSUMED_RANGES[name]) / 2) for name in names}
        constants = replace(ASSUMED, **{name: ends[name][i] for name, i in zip(names, low_mid_high, strict=True)})
        over = {point.name: point.measured_s / roofline_s(point.setup, point.load, constants) for point in points}
        errors = []
        for point in points:
            if point.use is Use.HELD_OUT:
                near = [p for p in points if p.use is Use.FITTED and p.setup.chip.isa == point.setup.chip.isa]
                own = [p for p in near if p.setup.chip.name == point.setup.chip.name] or near
                (fitted,) = own
                errors.append(over[fitted.name] / over[point.name] - 1)
        found.append(errors)
    return found


def test_the_errors_that_other_values_of_what_is_assumed_would_give_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run(capsys, "--check")
    decode = errors_over_ranges(DecodeLoad, ("hbm_share", "launch_s", "all_reduce_s", "exchange_per_node_s"))
    prefill = errors_over_ranges(PrefillLoad, ("gemm_share", "attention_share", "all_reduce_s", "launch_s"))
    for phase, errors in ("decode", decode), ("prefill", prefill):
        least, most = min(map(min, errors)), max(map(max, errors))
        line = next(x for x in out.splitlines() if x.startswith(f"{phase}, over "))
        assert f"{100 * least:+.1f} % to {100 * most:+.1f} %" in line
        within = sum(max(map(abs, each)) <= 0.1 for each in errors)
        assert line.endswith(f"all are within 10 % in {within} of {len(errors)}")
    assert min(map(min, decode)) < -0.2, "more than the errors at the values that were chosen"


def told(*times: tuple[int, float, Use]) -> str:
    """What is told of prompts that took so many seconds: tokens, seconds, use."""
    like = next(sample for sample in SAMPLES if sample.name == "mi325x_20k")
    prompts = (
        replace(like, name=f"of {tokens}", load=PrefillLoad(tokens), measured_s=seconds, use=use)
        for tokens, seconds, use in times
    )
    return list(summaries(residuals(tuple(prompts))))[-1]


def test_prompts_are_explained_by_what_the_data_show() -> None:
    """Texts about a fall, about the fitted time and about the side of errors each need data that show it."""
    growing = told((10_000, 5.0, Use.FITTED), (20_000, 11.0, Use.HELD_OUT), (40_000, 30.0, Use.HELD_OUT))
    assert "Where it falls" not in growing
    assert "is quick" not in growing
    assert "expect prompts to take longer" in growing
    at_fitted = told((10_000, 5.0, Use.HELD_OUT), (20_000, 11.0, Use.HELD_OUT), (40_000, 20.0, Use.FITTED))
    assert "Where it falls, as on mi325x to 40,000, no sum" in at_fitted
    assert "the time to 40,000 was fitted" in at_fitted
    elsewhere = told((10_000, 9.0, Use.FITTED), (20_000, 16.0, Use.HELD_OUT), (40_000, 20.0, Use.HELD_OUT))
    assert "Where it falls, as on mi325x to 40,000, no sum" in elsewhere
    assert "was fitted" not in elsewhere
    assert "expect prompts to take longer" not in elsewhere


def test_the_middle_length_of_each_chip_is_the_fitted_one() -> None:
    prompts: dict[str, list[tuple[int, Use]]] = {}
    for sample in SAMPLES:
        if isinstance(sample.load, PrefillLoad):
            prompts.setdefault(sample.setup.chip.name, []).append((sample.load.new_tokens, sample.use))
    for lengths in prompts.values():
        middle = statistics.median_low(tokens for tokens, _ in lengths)
        assert [tokens for tokens, use in lengths if use is Use.FITTED] == [middle]


def test_a_prompt_of_mi325x_costs_less_a_token_on_the_way_to_100_000() -> None:
    """Why no roofline meets its neighbours: a fixed part and work that grows faster than tokens go through neither."""
    s = {
        sample.load.new_tokens: sample.measured_s
        for sample in SAMPLES
        if sample.name.startswith("mi325x_") and isinstance(sample.load, PrefillLoad)
    }
    assert (s[50_000] - s[20_000]) / 30 > 1.5 * (s[100_000] - s[50_000]) / 50 < (s[200_000] - s[100_000]) / 100


@pytest.mark.parametrize("output", ["json", "yaml", "markdown"])
def test_all_forms_hold_the_measured_times(capsys: pytest.CaptureFixture[str], output: str) -> None:
    status, out, _ = run(capsys, "--check", "-o", output)
    assert status == 0
    if output == "markdown":
        assert r"| mi325x\_50k | held out | 30,500 |" in out
        assert "prefill: 10 held out, " in out
        return
    document = json.loads(out) if output == "json" else yaml.safe_load(out)
    times = {row["name"]: row for row in document["times"]}
    assert set(times) == {sample.name for sample in SAMPLES}
    for residual in residuals(SAMPLES):
        row, sample = times[residual.sample.name], residual.sample
        phase = "decode" if isinstance(sample.load, DecodeLoad) else "prefill"
        assert (row["phase"], row["use"]) == (phase, "fitted" if sample.use is Use.FITTED else "heldOut")
        assert row["measured_ms"] == pytest.approx(1e3 * sample.measured_s)
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
        assert row["low_ms"] < row["predicted_ms"] < row["high_ms"]
        assert row["in_band"] == (row["low_ms"] <= row["measured_ms"] <= row["high_ms"])
    assert any(text.startswith("prefill: 10 held out, ") for text in document["held_out"])


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (Figure("cache", "mla_bytes_per_token_fp8", 13_825, Kind.EXACT), "13,825 13,824 exact MISSED"),
        (Figure("cache", "kda_state_mib_per_rank_tp2", 215.0, Kind.WITHIN, 0.001), "215 214.277 0.1 % MISSED -0.34 %"),
        (Figure("cache", "a_new_row", 7, Kind.EXACT), "7 - exact not computed"),
    ],
)
@pytest.mark.parametrize("output", ["text", "json"])
def test_a_missed_row_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, row: Figure, shown: str, output: str
) -> None:
    monkeypatch.setattr(check_module, "published_figures", lambda: (row,))
    status, out, _ = run(capsys, "--check", "-o", output)
    assert status == 1
    if output == "json":
        assert json.loads(out)["ok"] is False
    else:
        assert shown in " ".join(out.split())


def test_without_a_file_and_without_check_the_way_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys)
    assert status != 0
    assert out == ""
    assert err.startswith("kimictl: --file: got nothing, expected a manifest")
    assert "--check; name one with -f" in err
