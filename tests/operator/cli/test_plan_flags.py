"""`kimictl plan` from flags and under a workload: what comes out, and what is refused by the name of its flag."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

MI300X = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
LOCAL = MI300X.parent / "local" / "2p2d.yaml"
FIRST_SCREEN = 12

Run = Callable[..., tuple[int, str, str]]
Plan = Callable[..., dict]


@pytest.fixture
def plan(run: Run) -> Plan:
    """The JSON of a plan that fits."""

    def call(*arguments: object) -> dict:
        status, out, err = run("plan", *arguments, "-o", "json")
        assert status == 0, err
        return json.loads(out)

    return call


def test_flags_give_the_plan_of_the_manifest_that_says_the_same(plan: Plan) -> None:
    by_flags = plan("--chip", "mi300x", "--nodes", 4, "--max-num-seqs", 8, "--max-model-len", 524_288)
    by_file = plan("-f", MI300X)
    for role in ("prefill", "decode"):
        assert by_flags[role] == by_file[role]
    assert by_flags["speed"] == by_file["speed"]


def test_the_published_settings_of_mi325x_come_out_of_its_workload(plan: Plan) -> None:
    found = plan(
        "--chip", "mi325x", "--nodes", 4, "--prompt-tokens", 2048, "--output-tokens", 128, "--concurrency", 512
    )
    assert found["decode"]["max_num_seqs"] == 64
    assert found["outlook"]["decode"]["best"]["running"] == 512
    stated = {"prompt": {"fixed": 2048}, "output": {"fixed": 128}, "concurrency": 512}
    assert stated.items() <= found["deployment"]["spec"]["workload"].items()


def test_the_deployment_of_the_flags_can_be_applied_and_plans_the_same(plan: Plan, tmp_path: Path) -> None:
    flags = ("--chip", "mi300x", "--nodes", 6, "--decode-groups", 2, "--prompt-tokens", "100-9000")
    flags += ("--output-tokens", 700, "--concurrency", 30, "--target-tpot", "0.3s")
    by_flags = plan(*flags)
    file = tmp_path / "k3.yaml"
    file.write_text(yaml.safe_dump(by_flags["deployment"]))
    by_file = plan("-f", file)
    assert by_file == by_flags


def test_a_workload_asks_for_no_more_than_it_needs(plan: Plan) -> None:
    flags = ("--chip", "mi300x", "--nodes", 4, "--prompt-tokens", 4000, "--output-tokens", 96)
    assert plan(*flags, "--concurrency", 20)["decode"]["max_num_seqs"] == 3
    assert plan(*flags)["decode"]["max_num_seqs"] == 32


def test_nodes_are_spread_over_the_groups(plan: Plan) -> None:
    found = plan("--chip", "mi300x", "--nodes", 8, "--decode-groups", 3)
    assert (found["gpus"], found["nodes"]) == (64, 8)
    assert found["outlook"]["decode"]["groups"] == 3
    assert found["prefill"]["ranks"] == 16


def test_the_first_lines_answer(run: Run) -> None:
    status, out, _ = run("plan", "-f", MI300X, "--prompt-tokens", 4096, "--output-tokens", 512)
    first = "\n".join(out.splitlines()[:FIRST_SCREEN])
    assert status == 0
    for part in (
        "fits; no target stated",
        "maxNumSeqs a lane",
        "550,848",
        "524,288 tokens",
        "TPOT",
        "TTFT",
        "tokens/s",
    ):
        assert part in first
    assert out.splitlines()[FIRST_SCREEN] == ""


def test_the_bar_is_as_wide_as_the_memory_it_stands_for(run: Run) -> None:
    _, out, _ = run("plan", "-f", MI300X)
    (bar,) = (line.strip() for line in out.splitlines() if line.strip().startswith("[#"))
    assert len(bar) == 62
    # 143.5 of 192 GiB are weights
    assert bar.count("#") == round(60 * 154_089_090_496 / 206_141_652_992)
    assert bar.count("k") in (4, 5)


def test_stretches_cover_every_context_without_a_gap(plan: Plan) -> None:
    found = plan("-f", MI300X)
    for role in ("prefill", "decode"):
        stretches = found["outlook"][role]["stretches"]
        assert stretches[0]["first_tokens"] == 1
        assert stretches[-1]["last_tokens"] == 524_288
        for before, after in itertools.pairwise(stretches):
            assert after["first_tokens"] == before["last_tokens"] + 1
            assert after["binds"] != before["binds"]


def test_predictions_carry_band_and_calibration(plan: Plan) -> None:
    speed = plan("-f", MI300X)["speed"]
    for name in ("tpot", "tpot_alone", "prefill", "handoff", "throughput"):
        assert speed[name]["low"] <= speed[name]["value"] <= speed[name]["high"], name
        assert speed[name]["calibrated_on"], name
    rates = [point["tokens_per_second"]["value"] for point in speed["curve"]]
    assert speed["curve"][0]["concurrency"] == 1
    assert max(rates) == pytest.approx(rates[-1])


def test_what_is_at_once_counts_the_lanes_of_all_groups(plan: Plan) -> None:
    flags = ("--chip", "mi300x", "--nodes-per-group", 2, "--max-num-seqs", 8)
    for groups in (1, 3):
        found = plan(*flags, "--decode-groups", groups)
        assert found["speed"]["concurrency"] == 8 * 8 * groups
        assert found["contexts"][0]["planned"] == 8 * 8 * groups
        # the profile's limit
        assert found["contexts"][0]["cut_for_it"] == 32 * 8 * groups


def test_a_profile_without_rates_plans_without_predictions(plan: Plan, run: Run) -> None:
    assert plan("-f", LOCAL)["speed"]["predicted"] is False
    _, out, _ = run("plan", "-f", LOCAL)
    assert "no predictions       HardwareProfile local-cpu: spec.gpu.hbmBytesPerSecond" in out


def test_unused_memory_shrinks_with_longer_requests(plan: Plan) -> None:
    def unused(prompt: int) -> int:
        return plan("-f", MI300X, "--prompt-tokens", prompt, "--output-tokens", 100)["outlook"]["decode"][
            "unused_bytes"
        ]

    assert unused(1_000) > unused(10_000) > unused(60_000)


def test_a_workload_file_and_flags_together(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "work.yaml"
    file.write_text(yaml.safe_dump({"prompt": {"uniform": {"min": 1000, "max": 3000}}, "output": 500, "reuse": 0.5}))
    found = plan("-f", MI300X, "--workload", file, "--output-tokens", "100-300", "--concurrency", 5)["workload"]
    assert (found["prompt"], found["output"]) == ("1,000 to 3,000 tokens", "100 to 300 tokens")
    assert (found["reuse"], found["concurrency"], found["assumed"]) == (0.5, 5, False)


def test_a_target_without_lengths_is_for_the_assumed_ones(plan: Plan) -> None:
    found = plan("-f", MI300X, "--target-tpot", "500ms")["workload"]
    assert found["assumed"] is True
    assert found["targets"]["tpot_seconds"] == 0.5
    assert found["prompt_mean_tokens"] + found["output_mean_tokens"] == 16_384


def test_a_rate_becomes_running_requests_by_its_target(plan: Plan) -> None:
    found = plan(
        "--chip", "mi325x", "--prompt-tokens", 2048, "--output-tokens", 100, "--requests-per-second", 0.2,
        "--target-tpot", "2s",
    )  # fmt: skip
    assert found["workload"]["concurrency"] == 40
    assert found["decode"]["max_num_seqs"] == 5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--target-tpot", "20ms"), "--target-tpot"),
        (("--concurrency", "5000"), "--concurrency"),
        (("--target-ttft", "1ms"), "--target-ttft"),
    ],
)
def test_a_missed_target_exits_1_and_says_what_would_do(run: Run, flags: tuple[str, str], expected: str) -> None:
    status, out, _ = run("plan", "-f", MI300X, "--prompt-tokens", 2048, "--output-tokens", 128, *flags)
    assert status == 1
    assert f"fits, but misses the workload: {expected} (see below)" in out
    assert f"misses: {expected}: got" in out


def test_requests_longer_than_the_plan_are_a_miss(run: Run) -> None:
    status, out, _ = run("plan", "-f", MI300X, "--prompt-tokens", 600_000, "--output-tokens", 100)
    assert status == 1
    assert "misses: --prompt-tokens: got 600,000 tokens, expected less than 524,288 tokens" in out


@pytest.mark.parametrize(
    ("written", "exact"),
    [
        (("-o", "JSON"), ("-o", "json")),
        (("-o", "json", "--kv-cache", "bf16"), ("-o", "json", "--kv-cache", "BF16")),
        (("-o", "json", "--architecture", "Kimi-K3"), ("-o", "json", "--architecture", "kimi-k3")),
    ],
)
def test_names_are_known_in_capitals_or_not(run: Run, written: tuple[str, ...], exact: tuple[str, ...]) -> None:
    assert run("plan", "--chip", "mi300x", *written) == run("plan", "--chip", "MI300X", *exact)


CHIP = ("--chip", "mi300x")
LENGTHS = ("--prompt-tokens", "2048", "--output-tokens", "128")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "--file: got nothing, expected a manifest, flags such as --chip mi300x, or --check; name one with -f"),
        (("--nodes", "4"), "--chip: got nothing, expected one of ['mi300x', "),
        (("--chip", "mi999"), "--chip: got 'mi999', expected one of ['mi300x', "),
        ((*CHIP, "--nodes", "0"), "--nodes: got 0, expected a multiple of 2"),
        ((*CHIP, "--nodes", "-4"), "--nodes: got -4, expected a multiple of 2"),
        ((*CHIP, "--nodes", "5"), "--nodes: got 5, expected a multiple of 2"),
        ((*CHIP, "--nodes", "100000"), "--nodes: got 100000, expected at most 128: prefill and decode have 2 groups"),
        ((*CHIP, "--nodes", "4", "--nodes-per-group", "4"), "--nodes: got 4, expected 2 groups x 4 nodes = 8"),
        ((*CHIP, "--nodes-per-group", "0"), "--nodes-per-group: got 0, expected greater than or equal to 1"),
        ((*CHIP, "--gpus-per-node", "65"), "--gpus-per-node: got 65, expected less than or equal to 64"),
        ((*CHIP, "--tensor-parallel", "-2"), "--tensor-parallel: got -2, expected greater than or equal to 1"),
        ((*CHIP, "--prefill-groups", "0"), "--prefill-groups: got 0, expected greater than or equal to 1"),
        ((*CHIP, "--decode-groups", "1000"), "--decode-groups: got 1000, expected less than or equal to 64"),
        ((*CHIP, "--max-num-seqs", "0"), "--max-num-seqs: got 0, expected greater than or equal to 1"),
        ((*CHIP, "--max-model-len", "0"), "--max-model-len: got 0, expected greater than or equal to 1"),
        ((*CHIP, "--max-model-len", "1M"), "--max-model-len: got '1M', expected a whole number; write 1000000\n"),
        ((*CHIP, "--max-model-len", "1e4"), "--max-model-len: got '1e4', expected a whole number; write 10000\n"),
        ((*CHIP, "--max-model-len", "long"), "--max-model-len: got 'long', expected a whole number; write one such"),
        ((*CHIP, "--kv-cache", "FP4"), "--kv-cache: got 'FP4', expected 'Auto', 'BF16' or 'FP32'"),
        ((*CHIP, "--architecture", "kimi-k9"), "--architecture: got 'kimi-k9', expected one of ['kimi-k3'"),
        ((*CHIP, "--prompt-tokens", "x"), "--prompt-tokens: got 'x', expected a number of tokens, or MIN-MAX"),
        ((*CHIP, "--prompt-tokens", "-5"), "--prompt-tokens"),
        (
            (*CHIP, "--prompt-tokens", "2048"),
            "--prompt-tokens: got 2048 alone, expected --output-tokens too; add it, such as --output-tokens 500",
        ),
        (
            (*CHIP, "--output-tokens", "9"),
            "--output-tokens: got 9 alone, expected --prompt-tokens too; add it, such as --prompt-tokens 4096",
        ),
        ((*CHIP, "--search", "4", "--prompt-tokens", "9"), "--prompt-tokens: got 9 alone, expected --output-tokens"),
        ((*CHIP, "--prompt-tokens", "9-3"), "--prompt-tokens: got 9-3, expected at most max, 3; swap min and max"),
        ((*CHIP, "--prompt-tokens", "2000000"), "--prompt-tokens: got 2,000,000 tokens, expected less than 1,048,576"),
        (
            (*CHIP, "--prompt-tokens", "9-3", "--output-tokens", "1"),
            "--prompt-tokens: got 9-3, expected at most max, 3",
        ),
        ((*CHIP, "--prompt-tokens", "20k"), "--prompt-tokens: got '20k', expected a number of tokens, or MIN-MAX; wr"),
        ((*CHIP, "--prompt-tokens", "20k"), "; write 20000\n"),
        ((*CHIP, "--prompt-tokens", "1.5K-2m"), "; write 1500-2000000\n"),
        ((*CHIP, "--prompt-tokens", "1k-2k-3k"), "; write 4096 or 1000-8000; others in --workload\n"),
        ((*CHIP, *LENGTHS, "--reuse", "1"), "--reuse: got 1, expected a number from 0 to below 1; write the share"),
        ((*CHIP, *LENGTHS, "--reuse", "-0.1"), "--reuse: got -0.1, expected a number from 0 to below 1"),
        ((*CHIP, *LENGTHS, "--reuse", "nan"), "--reuse: got nan, expected a number from 0 to below 1"),
        ((*CHIP, *LENGTHS, "--reuse", "90%"), "--reuse: got '90%', expected a number; write 0.9\n"),
        ((*CHIP, *LENGTHS, "--concurrency", "0"), "--concurrency: got 0, expected greater than or equal to 1"),
        ((*CHIP, *LENGTHS, "--requests-per-second", "0"), "--requests-per-second: got 0.0, expected greater than"),
        (
            (*CHIP, *LENGTHS, "--requests-per-second", "2"),
            "--target-tpot: got nothing, expected a value",
        ),
        ((*CHIP, *LENGTHS, "--target-tpot", "60"), "--target-tpot: got '60', expected a time with its unit"),
        (
            (*CHIP, *LENGTHS, "--target-tpot", "0ms"),
            "--target-tpot: got 0ms, expected greater than or equal to 0.000001 s",
        ),
        ((*CHIP, *LENGTHS, "--target-ttft", "fast"), "--target-ttft: got 'fast', expected a time with its unit"),
        ((*CHIP, "--prompt-tokens", "2000000", "--output-tokens", "1"), "--prompt-tokens: got 2,000,000 tokens"),
        ((*CHIP, "--workload", "/none.yaml"), "/none.yaml: got No such file or directory"),
        ((*CHIP, "--cost", "$2.5"), "--cost: got '$2.5', expected a number; write 2.5\n"),
        ((*CHIP, "--cost", "cheap"), "--cost: got 'cheap', expected a number; write one such as 0.9 or 2.5\n"),
        ((*CHIP, "--cost", "0"), "--cost: got 0, expected a price of a GPU-hour from 1e-06 to 1,000,000"),
        ((*CHIP, "--cost", "nan"), "--cost: got nan, expected a price of a GPU-hour from 1e-06 to 1,000,000"),
        ((*CHIP, "--cost", "-2"), "--cost: got -2, expected a price of a GPU-hour from 1e-06 to 1,000,000"),
        ((*CHIP, "--search", "0"), "--search: got 0, expected at least 4"),
        ((*CHIP, "--search", "65"), "--search: got 65, expected at most 64"),
        ((*CHIP, "--nodes", "4", "--search", "4"), "--nodes: got a flag of one layout, expected --chip, --arch"),
        ((*CHIP, "--check", "--search", "4"), "--search: got --search and --check at once, expected one of them"),
        (
            (*CHIP, "--explain", "tpot", "-o", "html"),
            "--output: got html, expected one of text, json, yaml, markdown with",
        ),
        (("--check", "--cost", "2"), "--cost: got --cost and --check at once, expected either of them"),
        ((*CHIP, "--search", "4", "--cost", "nan"), "--cost: got nan, expected a price of a GPU-hour"),
        ((*CHIP, "--nodes", "1.5"), "--nodes: got '1.5', expected a whole number; write 1 or 2"),
        ((*CHIP, "--what-if", "decode.maxNumSeqs=&a [*a]"), "--what-if decode.maxNumSeqs: got more values"),
        ((*CHIP, "--what-if", "decode.maxNumSeqs=2026-13-45"), "--what-if decode.maxNumSeqs: got '2026-13-45'"),
        ((*CHIP, "--explain", "nothing"), "--explain: got 'nothing', expected a line, a column or a figure of"),
        (("-f", str(MI300X), "--nodes", "4"), "--nodes: got a flag beside a manifest, expected either of them"),
        (("-f", str(LOCAL), "--cost", "2"), "--cost: got no throughput: HardwareProfile local-cpu"),
        (("-f", str(MI300X), "--what-if", "x"), "--what-if: got 'x', expected KEY=VALUE"),
        (("-f", str(MI300X), "--what-if", "nodes=5"), "--what-if nodes: got 5, expected a multiple of 4: whole"),
        (("-f", str(MI300X), "--what-if", "nodes=two"), "--what-if nodes: got 'two', expected a multiple of 4"),
        (("-f", str(MI300X), "--what-if", "chip=mi9"), "--what-if chip: got 'mi9', expected the name of a Hardw"),
        (("-f", str(MI300X), "--what-if", "hardware=3"), "--what-if: spec.hardware: got 3, expected an object"),
        (("-f", str(MI300X), "--what-if", "chip=[a]"), "--what-if chip: got ['a'], expected the name of a Hardw"),
        (("-f", str(MI300X), "--what-if", "profile.sources=3"), "--what-if: profile.spec.sources: got 3, expected"),
        (("-f", str(MI300X), "--what-if", "prefill=3", "--what-if", "nodes=6"), "--what-if: spec.prefill: got 3"),
        (("-f", str(MI300X), "--what-if", "decode.lanes=3"), "--what-if: spec.decode.lanes: got 3, expected no such"),
        (("-f", str(MI300X), "--what-if", "decode=3"), "--what-if: spec.decode: got 3, expected"),
        (("-f", str(MI300X), "--what-if", "decode.maxNumSeqs.x=3"), "--what-if: got 'decode.maxNumSeqs.x=3'"),
        (("-f", str(MI300X), "--what-if", "profile.gpu.memory=big"), "--what-if: profile.spec.gpu.memory: got 'big'"),
        (("-f", str(MI300X), "--what-if", "workload.concurrency=0"), "--what-if: workload.concurrency: got 0"),
        (("-f", str(MI300X), "--what-if", "decode.maxNumSeqs=[1"), "--what-if decode.maxNumSeqs: got '[1'"),
        (("--compare", str(MI300X), "/none.yaml"), "/none.yaml: got No such file or directory"),
        (("--compare", str(MI300X)), "--compare"),
    ],
)
def test_bad_input_exits_2_and_names_flag_value_and_remedy(run: Run, flags: tuple[str, ...], expected: str) -> None:
    status, out, err = run("plan", *flags)
    assert (status, out) == (2, "")
    assert expected in err


def test_a_layout_that_does_not_fit_names_its_flag(run: Run) -> None:
    status, out, _ = run("plan", *CHIP, "--nodes", 4, "--tensor-parallel", 1)
    assert status == 1
    assert out.startswith("does not fit:\n")
    assert "use the nearest layout that fits: 2 x 8 GPUs with tensorParallel 2" in out
    status, out, err = run("plan", *CHIP, "--nodes", 6)
    assert (status, out) == (2, "")
    assert "--nodes: got 6: 2 groups of 3 (x gpusPerNode 8 = 24 ranks), expected" in err
    assert "set it to one of [2, 4, 8, 14, " in err
    assert err.count("\n") == 1
    _, _, err = run("plan", *CHIP, "--nodes-per-group", 3)
    assert "--nodes-per-group: got 3 (x gpusPerNode 8 = 24 ranks), expected" in err


def test_numbers_of_nodes_that_a_refusal_names_are_taken(run: Run, plan: Plan) -> None:
    _, _, err = run("plan", *CHIP, "--nodes", 6)
    numbers = json.loads(re.search(r"set it to one of (\[.*\])", err)[1])
    assert plan(*CHIP, "--nodes", numbers[-1])["nodes"] == numbers[-1]
    status, out, _ = run("plan", *CHIP, "--nodes", 2, "--tensor-parallel", 4)
    assert (status, out.splitlines()[1]) == (1, "  --nodes")
    flags = re.search(r"a group: (--nodes \d+ --tensor-parallel \d+)$", out, re.MULTILINE)[1].split()
    assert plan(*CHIP, *flags)["nodes"] == int(flags[1])


@pytest.mark.parametrize("name", ["MI300X", "Mi300x"])
def test_a_chip_is_known_in_capitals_too(plan: Plan, name: str) -> None:
    assert plan("--chip", name) == plan(*CHIP)
    assert plan("--chip", name)["deployment"]["spec"]["hardware"]["profile"] == "mi300x"


@pytest.mark.parametrize(("flag", "text"), [("--target-ttft", "5s"), ("--target-tpot", "60ms")])
def test_a_missed_target_is_told_as_it_was_typed(run: Run, flag: str, text: str) -> None:
    status, out, _ = run("plan", *CHIP, "--prompt-tokens", 20_000, "--output-tokens", 500, flag, text)
    assert status == 1
    assert re.search(rf"^misses: {flag}: got {text}, expected at least [0-9.]+ s, ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "verdict", "is_met"),
    [
        ((*CHIP,), "fits", None),
        ((*CHIP, *LENGTHS), "fits; no target stated", None),
        ((*CHIP, *LENGTHS, "--concurrency", "8"), "fits, and meets the workload", True),
        ((*CHIP, *LENGTHS, "--target-tpot", "2s"), "fits, and meets the workload", True),
        ((*CHIP, "--target-tpot", "2s"), "fits, and meets what is stated, at assumed lengths", True),
        (
            ("--chip", "mi308x", *LENGTHS, "--target-ttft", "1s"),
            "fits; target TTFT not checked: nothing predicts it",
            None,
        ),
        (("--chip", "mi308x", *LENGTHS, "--target-tpot", "2s"), "fits, and meets the workload", True),
        (
            ("--chip", "mi308x", *LENGTHS, "--target-tpot", "2s", "--requests-per-second", "0.25"),
            "fits; whether prefill feeds the rate not checked: nothing predicts it",
            None,
        ),
    ],
)
def test_only_what_was_checked_is_said_to_be_met(
    run: Run, plan: Plan, flags: tuple[str, ...], verdict: str, is_met: bool | None
) -> None:
    status, out, _ = run("plan", *flags)
    assert (status, out.splitlines()[1]) == (0, verdict)
    assert plan(*flags)["meets_workload"] is is_met


def test_yaml_and_json_say_the_same(run: Run) -> None:
    by_json, by_yaml = (run("plan", "-f", MI300X, "-o", output)[1] for output in ("json", "yaml"))
    assert yaml.safe_load(by_yaml) == json.loads(by_json)


def test_a_warning_of_the_plan_is_on_the_first_screen(run: Run) -> None:
    _, out, _ = run("plan", "--chip", "mi355x", "--nodes", 4)
    assert any(line.startswith("warning: ") for line in out.splitlines()[:FIRST_SCREEN])
