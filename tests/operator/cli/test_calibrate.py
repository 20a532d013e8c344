"""`kimictl profile calibrate`: runs in three shapes, what it prints, and errors that name the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from kimi_operator.api.base import dump, parse
from kimi_operator.api.calibration import CalibrationSpec
from kimi_operator.cli.ask import ANSWER_TOKENS, Answer
from kimi_operator.cli.calibrate import calibrate
from kimi_operator.cli.report import Level, Row, Run
from kimi_operator.cli.report import document as needle_document
from kimi_operator.cli.results import NEEDLE_ANSWER_TOKENS, DecodePoint, PrefillPoint, read_results
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.predict import roofline_s
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad, Setup
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.measurements import built_in_measurements, calibration_for, worker_engine
from kimi_worker.settings import LimitSettings
from msgspec.structs import replace
from pydantic.alias_generators import to_camel

MI300X = built_in_profiles()["mi300x"]
WORKER = Setup(
    architecture("kimi-k3"), built_in_measurements().chip(MI300X), GroupShape(2, 8, 2), worker_engine(MI300X)
)
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LAYOUT = {"nodes": 2, "gpusPerNode": 8, "tensorParallel": 2}


def step_ms(concurrency: int, context: int, factor: float) -> float:
    return 1e3 * factor * roofline_s(WORKER, DecodeLoad(concurrency, context))


def by_hand(factor: float = 2.5) -> dict[str, Any]:
    points = [{"concurrency": c, "contextTokens": 4096, "tpotMs": step_ms(c, 4096, factor)} for c in (1, 8, 64)]
    return {"chip": "mi300x", "layout": LAYOUT, "measuredOn": "cluster a", "decode": points}


def written(folder: Path, document: Mapping[str, Any], name: str = "run.yaml") -> Path:
    file = folder / name
    file.write_text(json.dumps(document) if name.endswith("json") else yaml.safe_dump(dict(document)))
    return file


def fragment(capsys: pytest.CaptureFixture[str], run: Path, **options: Any) -> dict[str, Any]:
    assert calibrate(run, output="yaml", **options) == 0
    loaded: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return loaded


def test_the_factor_that_made_the_run_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fragment(capsys, written(tmp_path, by_hand(2.5)))
    assert (found["kind"], found["metadata"]["name"]) == ("HardwareProfile", "mi300x")
    spec = parse(CalibrationSpec, found["spec"]["calibration"])
    assert spec.decode_factor == pytest.approx(2.5)
    assert spec.decode_band_percent == pytest.approx(0, abs=0.11)
    assert (spec.prefill_factor, spec.engine) == (None, "kimi-worker")
    assert "cluster a" in spec.measured_on
    assert dump(spec) == found["spec"]["calibration"]
    assert calibration_for(WORKER, DecodeLoad, spec).factor() == pytest.approx(2.5)


def test_the_text_shows_old_and_new_factor_and_errors_of_each_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(written(tmp_path, by_hand(2.5))) == 0
    lines = capsys.readouterr().out.splitlines()
    before = calibration_for(WORKER, DecodeLoad, None)
    assert f"decode factor {before.factor():.3f} -> 2.500 ({2.5 / before.factor() - 1:+.1%})" in lines
    points = [line.split() for line in lines if " at " in line and "request" in line]
    assert [point[-3:] for point in points] == [[f"{before.factor() / 2.5 - 1:+.1%}", "+0.0%", "+0.0%"]] * 3
    assert any("kubectl patch hardwareprofile mi300x --type merge" in line for line in lines)
    assert any(line.startswith(f"  before: {before.fitted_on}") for line in lines)


def test_json_holds_everything_the_text_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = by_hand(2.5) | {"prefill": [{"promptTokens": 50_000, "seconds": 90.0}]}
    calibrate(written(tmp_path, run, "run.json"), output="json")
    found = json.loads(capsys.readouterr().out)
    assert found["phases"]["decode"]["factorAfter"] == pytest.approx(2.5)
    assert found["phases"]["decode"]["points"][1]["errorBefore"] == pytest.approx(
        calibration_for(WORKER, DecodeLoad, None).factor() / 2.5 - 1
    )
    assert found["phases"]["prefill"]["points"][0]["errorLeftOut"] is None
    assert found["phases"]["prefill"]["factorAfter"] > found["phases"]["prefill"]["factorBefore"]
    assert found["fragment"]["spec"]["calibration"]["prefillFactor"] > 1


def test_a_whole_profile_of_its_own_name_plans_without_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Callable[..., tuple[int, str, str]]
) -> None:
    measured = written(tmp_path, by_hand(2.5))
    patch = fragment(capsys, measured)
    whole = fragment(capsys, measured, name="rented")
    assert whole["metadata"] == {"name": "rented"}
    assert whole["spec"] == dump(MI300X)["spec"] | {"calibration": patch["spec"]["calibration"]}
    profile = written(tmp_path, whole, "rented.yaml")
    _, out, err = run("plan", "-f", profile, "--chip", "rented", "--nodes", 4, "-o", "json")
    assert err == ""
    speed = json.loads(out)["speed"]
    known = json.loads(run("plan", "--chip", "mi300x", "--nodes", 4, "-o", "json")[1])["speed"]
    before = calibration_for(WORKER, DecodeLoad, None).factor()
    assert speed["tpot_alone"]["value"] / known["tpot_alone"]["value"] == pytest.approx(2.5 / before)
    manifest = yaml.safe_load((EXAMPLES / "mi300x-2p2d.yaml").read_text())
    manifest["spec"]["hardware"]["profile"] = "rented"
    _, out, _ = run("plan", "-f", written(tmp_path, manifest, "k3.yaml"), "-f", profile, "-o", "json")
    assert json.loads(out)["profile"] == "rented"


def test_the_text_says_how_to_plan_with_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = written(tmp_path, by_hand())
    calibrate(measured)
    lines = capsys.readouterr().out.splitlines()
    how = "without a cluster: --name mi300x-measured -o yaml gives the whole profile, then kimictl plan -f FILE --chip "
    assert any(line.startswith(f"{how}mi300x-measured, or -f MANIFEST -f FILE with spec.hardware") for line in lines)
    calibrate(measured, name="rented")
    out = capsys.readouterr().out
    assert "save it with -o yaml, then kimictl plan -f FILE --chip rented, or " in out
    assert "kubectl patch" not in out
    assert "perNode: 8" in out
    calibrate(measured, name="rented", output="json")
    found = json.loads(capsys.readouterr().out)
    assert found["wholeProfile"]["spec"]["calibration"] == found["fragment"]["spec"]["calibration"]


def test_an_earlier_factor_of_the_other_phase_is_kept_as_a_patch_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fragment(capsys, written(tmp_path, by_hand(2.5)), name="rented")
    prefill = {"chip": "rented", "layout": LAYOUT, "prefill": [{"promptTokens": 50_000, "seconds": 90.0}]}
    own = written(tmp_path, first, "rented.yaml")
    both = fragment(capsys, written(tmp_path, prefill, "prefill.yaml"), file=[own], name="rented")
    kept = both["spec"]["calibration"]
    assert kept["decodeFactor"] == first["spec"]["calibration"]["decodeFactor"]
    assert kept["prefillFactor"] > 1


@pytest.mark.parametrize("name", ["", "Rented", "a/b"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidSpec, match=r"^--name: got .*, expected a name of lower-case .*; write mi300x-measured"):
        calibrate(written(tmp_path, by_hand()), name=name)


def prompts_in_steps_of(step_tokens: int, factor: float) -> list[dict[str, Any]]:
    """What prompts take in steps of so many tokens."""
    return [
        {"promptTokens": n, "seconds": factor * roofline_s(WORKER, PrefillLoad(n, chunk_tokens=step_tokens))}
        for n in (8_192, 32_768)
    ]


@pytest.mark.parametrize("step_tokens", [256, 512, 8192])
def test_prompts_are_computed_in_the_steps_of_their_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step_tokens: int
) -> None:
    document = copy.deepcopy(dump(MI300X))
    document["spec"]["limits"] = {"prefillBatchedTokens": step_tokens}
    run = {"chip": "mi300x", "layout": LAYOUT, "prefill": prompts_in_steps_of(step_tokens, 1.5)}
    files = {"file": [written(tmp_path, document, "mine.yaml")]}
    found = fragment(capsys, written(tmp_path, run), **files)["spec"]["calibration"]
    assert found["prefillFactor"] == pytest.approx(1.5, rel=1e-4)
    run["prefill"] = prompts_in_steps_of(1024, 1.5)
    stated = fragment(capsys, written(tmp_path, run | {"prefillBatchedTokens": 1024}), **files)["spec"]["calibration"]
    assert stated["prefillFactor"] == pytest.approx(1.5, rel=1e-4)


def at_8_x_8192(*times_ms: float) -> dict[str, Any]:
    points = [{"concurrency": 8, "contextTokens": 8192, "tpotMs": time_ms} for time_ms in times_ms]
    return by_hand() | {"decode": points}


@pytest.mark.parametrize("times_ms", [(80.0, 8000.0), (80.0, 121.0), (100.0, 80.0, 8000.0, 90.0)])
def test_times_of_one_load_that_contradict_each_other_are_refused(tmp_path: Path, times_ms: tuple[float, ...]) -> None:
    words = rf"run\.yaml: decode: got 80 and {max(times_ms):.4g} ms for 8 requests at 8,192 tokens, .* a factor of 1\.5"
    with pytest.raises(InvalidSpec, match=words):
        calibrate(written(tmp_path, at_8_x_8192(*times_ms)))
    prefill = [{"promptTokens": 50_000, "seconds": time_ms} for time_ms in times_ms]
    with pytest.raises(InvalidSpec, match=r"run\.yaml: prefill: got .* ms for 50,000 tokens"):
        calibrate(written(tmp_path, by_hand() | {"prefill": prefill}))


def test_a_load_that_groups_share_is_one_load(tmp_path: Path) -> None:
    points = [{"concurrency": c, "contextTokens": 8192, "tpotMs": t} for c, t in ((15, 80.0), (16, 8000.0))]
    with pytest.raises(InvalidSpec, match="got 80 and 8000 ms"):
        calibrate(written(tmp_path, by_hand() | {"decode": points, "groups": 2}))


def test_repeats_count_as_one_point_and_narrow_no_band(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = fragment(capsys, written(tmp_path, at_8_x_8192(100.0)))["spec"]["calibration"]
    for times_ms in ((100.0,) * 2, (100.0,) * 5, (90.0, 1000.0 / 9)):
        assert calibrate(written(tmp_path, at_8_x_8192(*times_ms)), output="yaml") == 0
        printed = capsys.readouterr()
        assert yaml.safe_load(printed.out)["spec"]["calibration"] == once
        assert f"decode: {len(times_ms)} points of 1 loads; repeats count as one" in printed.err


@pytest.mark.parametrize("output", ["text", "json", "yaml"])
def test_points_that_no_factor_fits_are_shown_with_their_residuals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: Literal["text", "json", "yaml"]
) -> None:
    """Exit status 1, and nothing that could be applied."""
    nearly = at_8_x_8192(80.0, 8000.0)
    nearly["decode"][1]["contextTokens"] = 8193
    assert calibrate(written(tmp_path, nearly), output=output) == 1
    out, err = capsys.readouterr()
    assert "decode: the points contradict each other: one is 100.0 times off" in err
    assert "8 requests at 8,192 tokens: 80.00 ms, the others say 8,000" in err
    assert "8 requests at 8,193 tokens: 8,000.00 ms, the others say 80.0" in err
    assert "(-99.0%)" in err
    assert "kind: HardwareProfile" not in out
    if output == "json":
        assert json.loads(out)["fragment"] is None
    assert calibrate(written(tmp_path, by_hand()), output=output) == 0
    assert not capsys.readouterr().err


def needle_run(factor: float = 2.0) -> Run:
    """As the command makes it: 1 and 8 at once, answers of 20 tokens."""
    levels = []
    for concurrency in (1, 8):
        step_s = step_ms(concurrency, (1000 + 3000 + NEEDLE_ANSWER_TOKENS) // 2, factor) / 1e3
        rows = []
        for number in range(concurrency):
            answer = Answer(text="123456", token_ids=list(range(20)), ttft_s=1.0, last_s=1.0 + 19 * step_s)
            answer.prompt_tokens = 3000 if number else 1000
            rows.append(Row(number, answer.prompt_tokens, "key", "123456", answer))
        if concurrency == 1:
            rows[0].answer.prompt_tokens = 2000
        levels.append(Level(concurrency, 3.0, rows))
    return Run("http://k3", "kimi-k3", levels)


def test_a_needle_run_is_taken_as_it_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, needle_document(needle_run()), "needle.json")
    options = {"chip": "mi300x", "nodes": 2, "gpus_per_node": 8, "tensor_parallel": 2}
    found = fragment(capsys, file, **options)
    assert found["spec"]["calibration"]["decodeFactor"] == pytest.approx(2.0, rel=0.001)
    assert "needles at http://k3" in found["spec"]["calibration"]["measuredOn"]
    assert NEEDLE_ANSWER_TOKENS == ANSWER_TOKENS


@pytest.mark.parametrize("arrivals", ["together", "in a row", "two by two"])
def test_a_needle_run_counts_who_decodes_not_who_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrivals: str
) -> None:
    """Prefill feeds 32 requests as it can: those that wait for it share no step, yet came back as so many."""
    concurrency, at_once = 32, {"together": 32, "in a row": 1, "two by two": 2}[arrivals]
    step_s = step_ms(at_once, (2000 + 2000 + NEEDLE_ANSWER_TOKENS) // 2, 2.5) / 1e3
    rows = []
    for number in range(concurrency):
        began = 1.0 + 12 * step_s * (number // at_once)
        answer = Answer(text="123456", token_ids=list(range(12)), ttft_s=began, last_s=began + 11 * step_s)
        answer.prompt_tokens = 2000
        rows.append(Row(number, 2000, "key", "123456", answer))
    run = Run("http://k3", "kimi-k3", [Level(concurrency, rows[-1].answer.last_s, rows)])
    file = written(tmp_path, needle_document(run), "needle.json")
    found = fragment(capsys, file, chip="mi300x", nodes=2, gpus_per_node=8, tensor_parallel=2)
    assert found["spec"]["calibration"]["decodeFactor"] == pytest.approx(2.5, rel=0.001)


def test_a_needle_run_that_does_not_say_who_decoded_is_refused(tmp_path: Path) -> None:
    for wrong in (None, "all", float("nan"), float("inf"), 0):
        document = needle_document(needle_run())
        document["levels"][1]["decoding_mean"] = wrong  # type: ignore[index]
        with pytest.raises(InvalidSpec, match=r"levels\.1\.decoding_mean: got .*, expected the requests that decoded"):
            read_results(written(tmp_path, document, "needle.json"), {})


def test_a_needle_run_of_the_tiny_model_needs_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, needle_document(needle_run(0.05)), "needle.json")
    options = {"chip": "mi300x", "nodes": 1, "gpus_per_node": 1, "tensor_parallel": 1}
    with pytest.raises(InvalidSpec, match=r"needle\.json: decode: got 1 request at 2,032 tokens"):
        calibrate(file, **options)
    assert calibrate(file, architecture="kimi-k3-tiny", **options) == 0
    assert "says little about kimi-k3" in capsys.readouterr().err


def test_a_needle_run_with_a_wrong_answer_is_no_measurement(tmp_path: Path) -> None:
    run = needle_run()
    run.rows[3].answer.text = "654321"
    file = written(tmp_path, needle_document(replace(run)), "needle.json")
    with pytest.raises(InvalidSpec, match=r"needle\.json: right: got 8 of 9 needles, expected every needle"):
        calibrate(file, chip="mi300x")


def test_a_level_whose_answers_were_one_token_is_left_out(tmp_path: Path) -> None:
    document = needle_document(needle_run())
    levels = document["levels"]
    assert isinstance(levels, list)
    levels[0]["tpot_p50_ms"] = None
    assert len(read_results(written(tmp_path, document, "needle.json"), {}).decode) == 1


BENCH = {
    "machine": "2 x CPU",
    "commit": "abc1234",
    "engine": {
        "worker_start_s": 3.1,
        "decode_tokens_per_s_batch_1": 300.0,
        "decode_step_ms_batch_1": 3.3,
        "decode_step_ms_batch_8": 5.1,
        "prefill_tokens_per_s": 4000.0,
    },
}


def test_a_bench_run_is_of_the_tiny_model_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, BENCH, "bench.json")
    read = read_results(file, {})
    assert [(p.concurrency, p.context_tokens, p.tpot_ms) for p in read.decode] == [(1, 40, 3.3), (8, 40, 5.1)]
    assert [(p.prompt_tokens, p.seconds) for p in read.prefill] == [(4000, 1.0)]
    assert read.prefill_batched_tokens == LimitSettings.model_fields["max_num_batched_tokens"].default
    assert calibrate(file, chip="mi300x") == 0
    out, err = capsys.readouterr()
    assert "kimi-k3-tiny on 1 x 1 GPU" in out
    assert "make bench, commit abc1234" in out
    assert "its factor says little about kimi-k3" in err


def test_a_profile_of_ones_own_is_known_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = copy.deepcopy(dump(MI300X))
    document["metadata"]["name"] = "mine"
    mine = written(tmp_path, document, "mine.yaml")
    run = by_hand(2.5) | {"chip": "mine"}
    with pytest.raises(InvalidSpec, match=r"run\.yaml: chip: got 'mine', expected one of"):
        calibrate(written(tmp_path, run))
    assert fragment(capsys, tmp_path / "run.yaml", file=[mine])["metadata"]["name"] == "mine"


def test_groups_share_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = by_hand(2.5)
    run["decode"] = [{"concurrency": 128, "contextTokens": 4096, "tpotMs": step_ms(64, 4096, 2.5)}]
    found = fragment(capsys, written(tmp_path, run), groups=2)
    assert found["spec"]["calibration"]["decodeFactor"] == pytest.approx(2.5)


TOKEN_FIELDS = [
    (phase, to_camel(name))
    for phase, point in (("decode", DecodePoint), ("prefill", PrefillPoint))
    for name in point.model_fields
    if name.endswith("_tokens")
]


@pytest.mark.parametrize("model", ["kimi-k3", "kimi-k3-tiny"])
@pytest.mark.parametrize(("phase", "field"), TOKEN_FIELDS)
def test_tokens_beyond_the_model_are_refused(tmp_path: Path, model: str, phase: str, field: str) -> None:
    most = architecture(model).max_positions
    others = {"decode": {"concurrency": 1, "tpotMs": 1000.0}, "prefill": {"seconds": 1e4}}[phase]

    def read(tokens: int) -> None:
        points = [others | {field: 8}, others | {field: tokens}]
        read_results(written(tmp_path, {"chip": "mi300x", "architecture": model, phase: points}), {})

    read(most - 1)
    for tokens in (most + 1, 2 * most):
        words = (
            rf"run\.yaml\.{phase}\.1\.{field}: got {tokens:,}, expected .* {most:,}, the longest sequence of {model};"
        )
        with pytest.raises(InvalidSpec, match=words):
            read(tokens)


def test_a_prompt_leaves_a_place_for_its_answer(tmp_path: Path) -> None:
    assert len(TOKEN_FIELDS) == 2
    run = {"chip": "mi300x", "prefill": [{"promptTokens": 1_048_576, "seconds": 1e4}]}
    with pytest.raises(InvalidSpec, match="got 1,048,576, expected less than 1,048,576"):
        read_results(written(tmp_path, run), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": None}, r"run.yaml: chip: got nothing, expected one of \['mi300x'"),
        ({"chip": "h100"}, "run.yaml: chip: got 'h100', expected one of"),
        ({"engine": "tgi"}, r"run.yaml: engine: got 'tgi', expected one of \["),
        ({"layout": None}, "run.yaml: layout: got nothing, expected nodes, gpusPerNode and tensorParallel"),
        ({"layout": LAYOUT | {"nodes": 3}}, "run.yaml.layout: got 3 x 8 GPUs with tensorParallel 2"),
        ({"layout": LAYOUT | {"nodes": 0}}, "run.yaml.layout.nodes: got 0, expected greater than or equal to 1"),
        ({"decode": []}, "run.yaml: decode: got no point"),
        ({"decode": [{"concurrency": 1, "contextTokens": 1}]}, "run.yaml.decode.0.tpotMs: got nothing"),
        ({"decode": [{"concurrency": 1, "contextTokens": 1, "tpotMs": 1.0}]}, "decode: got 1 request .* 1 ms is less"),
        ({"prefill": [{"promptTokens": 100_000, "seconds": 0.5}]}, "prefill: got 100,000 tokens: 500 ms is less than"),
        (
            {"prefill": [{"promptTokens": 20_000, "seconds": 20_000}]},
            "prefill: got 20,000 tokens: 20,000,000 ms is .*times .*; check seconds, which are no milliseconds, model",
        ),
        (
            {"decode": [{"concurrency": 8, "contextTokens": 4096, "tpotMs": 96_400}]},
            "decode: got 8 requests .*: 96,400 ms is .*times .*; check tpotMs, which is in milliseconds, model",
        ),
        ({"speed": 3}, "run.yaml.speed: got 3, expected no such field"),
        ({"architecture": "gpt-2"}, "architecture.*'gpt-2'"),
    ],
)
def test_each_wrong_field_is_named_with_a_remedy(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run = {name: value for name, value in (by_hand() | change).items() if value is not None}
    with pytest.raises(InvalidSpec, match=message) as raised:
        calibrate(written(tmp_path, run))
    assert all(problem.remedy for problem in raised.value.problems)


def test_an_option_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, by_hand())
    with pytest.raises(InvalidSpec, match="chip: got 'mi300x', expected 'mi325x', as the option says"):
        calibrate(file, chip="mi325x")
    assert calibrate(file, chip="mi300x") == 0
    with pytest.raises(InvalidSpec, match="got no gpusPerNode, tensorParallel, expected all three"):
        calibrate(file, nodes=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "got list, expected an object"),
        ("a: [", "no YAML or JSON"),
        ('{"a": ', "no YAML or JSON"),
        ('{"right": true, "levels": 3}', "levels: got 3, expected a list"),
        ('{"right": true, "levels": [{"concurrency": 1}]}', "levels.0: got None and None"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x"
    file.write_text(text)
    with pytest.raises(InvalidSpec, match=message):
        calibrate(file, chip="mi300x")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"nowhere: got .*No such file"):
        calibrate(tmp_path / "nowhere")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(InvalidSpec, match=r"broken\.yaml: got"):
        calibrate(written(tmp_path, by_hand()), file=[broken])


def test_small_numbers_of_json_stay_numbers(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"prefill": [{"promptTokens": 1, "seconds": 1e-05}]}')
    assert read_results(file, {}).prefill[0].seconds == 1e-05
