"""Views of a plan: what-if, comparison, cost, explanations and the search, with figures that are computed here anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.cli.changes import deployment_inputs, edited, read_edited
from kimi_operator.cli.manifests import deployment_of, read_documents
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import forecast_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X, MI325X = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi325x-2p2d.yaml"
GPU_BYTES = 206_141_652_992

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def document(run: Run) -> Callable[..., dict[str, Any]]:
    """The JSON of a view that exits 0."""

    def call(*arguments: object) -> dict[str, Any]:
        status, out, err = run("plan", *arguments, "-o", "json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return call


Document = Callable[..., dict[str, Any]]


def changes_of(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["key"]: (row["before"], row["after"]) for row in found["changes"]}


def all_of(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Of a comparison, what is equal too."""
    return {row["key"]: (row["before"], row["after"]) for row in (*found["changes"], *found["equal"])}


# --what-if


def test_what_if_shows_what_changes_and_nothing_else(document: Document) -> None:
    found = changes_of(document("-f", MI300X, "--what-if", "profile.reserve.symmetricHeap=4Gi"))
    assert found["decode.symmetric heap"] == ("8,589,934,592 B = 8.0 GiB", "4,294,967,296 B = 4.0 GiB")
    pages = int(found["decode.numPages"][1].replace(",", "")) - int(found["decode.numPages"][0].replace(",", ""))
    assert pages in (2**32 // 1_769_472, 2**32 // 1_769_472 + 1)
    assert "decode.routed experts" not in found
    assert "gpus" not in found


def test_what_if_gives_the_plan_of_a_manifest_that_was_edited(run: Run, document: Document, tmp_path: Path) -> None:
    edits = {"model.maxModelLen": 262_144, "decode.maxNumSeqs": 16, "prefill.maxNumSeqs": 12}
    manifest = yaml.safe_load(MI300X.read_text())
    for path, value in edits.items():
        section, field = path.split(".")
        manifest["spec"][section][field] = value
    file = tmp_path / "edited.yaml"
    file.write_text(yaml.safe_dump(manifest))
    flags = [flag for path, value in edits.items() for flag in ("--what-if", f"{path}={value}")]
    what_if = changes_of(document("-f", MI300X, *flags))
    compared = all_of(document("--compare", MI300X, file))
    assert what_if == {key: pair for key, pair in compared.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("edits", [("decode.maxNumSeqs=8",), ("chip=mi300x",), ("nodes=4",)])
def test_an_edit_that_says_what_is_so_changes_nothing(run: Run, edits: tuple[str, ...]) -> None:
    assert run("plan", "-f", MI300X, "--what-if", *edits) == (0, "nothing changes\n", "")


def test_another_chip_brings_its_own_profile(document: Document) -> None:
    found = changes_of(document("-f", MI300X, "--what-if", "chip=mi325x", "--cost", "2"))
    assert found["decode.total"][1] == "274,877,906,944 B = 256.0 GiB"
    assert found["decode.symmetric heap"][1] == "17,179,869,184 B = 16.0 GiB"
    assert "cost.output" in found


def test_what_does_not_fit_after_an_edit_exits_1_with_the_arithmetic(run: Run) -> None:
    status, out, _ = run("plan", "-f", MI300X, "--what-if", "tensorParallel=1")
    assert status == 1
    assert "191.0 GiB of weights + 32.2 GiB reserved" in out
    assert "decode.numPages" not in out


@pytest.mark.parametrize("order", [1, -1])
def test_an_edit_of_the_profile_is_of_the_chip_that_is_planned_with(document: Document, order: int) -> None:
    edits = ["chip=mi325x", "profile.reserve.symmetricHeap=20Gi"][::order]
    found = changes_of(document("-f", MI300X, "--what-if", edits[0], "--what-if", edits[1]))
    assert found["decode.total"][1] == "274,877,906,944 B = 256.0 GiB"
    assert found["decode.symmetric heap"][1] == "21,474,836,480 B = 20.0 GiB"


def test_an_edited_figure_no_longer_names_its_old_source() -> None:
    profiles = built_in_profiles()
    inputs = deployment_inputs(deployment_of(read_documents([MI300X]), [MI300X]), profiles["mi300x"], {})
    _, profile = read_edited(edited(inputs, ["profile.reserve.symmetricHeap=4Gi"], profiles))
    assert profile.spec.source("reserve.symmetricHeap") == "stated by --what-if (not measured)"
    assert profile.spec.source("reserve.contexts") == profiles["mi300x"].spec.source("reserve.contexts")


def test_a_load_changes_what_is_predicted_for_it(document: Document) -> None:
    found = changes_of(document("-f", MI300X, "--what-if", "workload.concurrency=16"))
    assert found["throughput"][0] != found["throughput"][1]


# --compare


def test_compare_shows_what_differs_and_counts_the_rest(run: Run, document: Document) -> None:
    compared = document("--compare", MI300X, MI325X)
    found, equal = all_of(compared), {"fits", *(row["key"] for row in compared["equal"])}
    assert equal == {key for key, (before, after) in found.items() if before == after}
    assert {"gpus", "fits", "decode.routed experts"} <= equal, "scripts get all"
    status, out, _ = run("plan", "--compare", MI300X, MI325X)
    shown, _, count = out.strip().split("\n\n")
    head, *rows = shown.splitlines()
    assert (status, head.split()) == (0, [str(MI300X), str(MI325X)])
    assert [row.split("  ")[0] for row in rows] == ["fits", *(key for key in found if key not in equal)]
    assert count == f"{len(equal) - 1} other figures are equal; -o json lists them"


@pytest.mark.parametrize("view", [("--compare", MI300X, MI325X), ("-f", MI300X, "--what-if", "chip=mi325x")])
def test_two_plans_are_numbers_for_scripts_as_each_alone(document: Document, view: tuple[object, ...]) -> None:
    """With their units, and the bands of predictions; what is words has none."""
    load = ("--cost", 2.5, "--output-tokens", 500, "--prompt-tokens", 14_336)
    rows = {row["key"]: row for row in document(*view, *load)["changes"]}
    alone = document("-f", MI300X, *load)
    tpot, heap = rows["tpot"]["before_amount"], rows["decode.symmetric heap"]["before_amount"]
    assert tpot == {name: alone["speed"]["tpot"][name] for name in ("value", "unit", "low", "high")}
    assert heap == {"value": 2**33, "unit": "B"}
    assert rows["decode.numPages"]["before_amount"]["value"] == alone["decode"]["num_pages"]
    assert rows["knee"]["before_amount"]["value"] == alone["speed"]["knee"]
    assert rows["prefill"]["after_amount"]["unit"] == "ms", "whatever the text shows it in"
    assert rows["calibration.prefill"]["before_amount"]["value"] == pytest.approx(1.032, abs=0.001)
    assert rows["cost.allIn"]["before_amount"]["value"] == alone["cost"]["all_in"]["value"]
    words = [key for key, row in rows.items() if row["after_amount"] is None]
    assert {*words} <= {"fits", "prefill.binds", "decode.binds", "cost.binds"}


def test_compare_of_equal_plans_says_so(run: Run) -> None:
    status, out, _ = run("plan", "--compare", MI300X, MI300X)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:2]] == ["fits"]
    assert re.fullmatch(r"[0-9]{2} other figures are equal; -o json lists them", out.splitlines()[-1])
    assert out.splitlines()[2:-1] == ["", "both are the same file", ""]


def test_a_manifest_beside_the_two_compared_ones_is_refused(run: Run, tmp_path: Path) -> None:
    for beside in (MI300X, MI325X):
        status, out, err = run("plan", "--compare", MI300X, MI300X, "--file", beside)
        assert (status, out) == (2, "")
        assert err.startswith(f"kimictl: --file: got {beside} with a KimiDeployment, expected HardwareProfiles alone")
        assert err.endswith(f"leave out --file {beside}\n")
    status, _, err = run("plan", "--compare", tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert (status, err.partition(": got ")[0]) == (2, f"kimictl: {tmp_path / 'a.yaml'}")


def factor(text: str) -> float:
    return float(text.removeprefix("factor "))


def prompts_fitted_on(chip: str) -> str:
    profile = built_in_profiles()[chip]
    work = Workload(fixed(1000), fixed(100))
    return forecast_of(architecture("kimi-k3"), profile, profile.spec.runtime.kv_cache_dtype, work).prefill.fitted_on


@pytest.mark.parametrize("chip", ["mi325x", "mi355x"])
def test_factors_of_other_measurements_are_told_with_what_one_factor_would_give(
    run: Run, document: Document, chip: str
) -> None:
    """MI325X, of more bandwidth and the same FLOPs, looks slower in prefill by what its own run took."""
    for key in ("chip", "profile"):
        edit = f"{key}={chip}"
        whole = document("-f", MI300X, "--what-if", edit)
        found, notes = changes_of(whole), {note.partition(",")[0]: note for note in whole["notes"]}
        phases = {key.removeprefix("calibration.") for key in found if key.startswith("calibration.")}
        assert notes.keys() == phases
        assert all(note in run("plan", "-f", MI300X, "--what-if", edit)[1] for note in whole["notes"])
        before, after = found["prefill"]
        one, other = map(factor, found["calibration.prefill"])
        said = re.search(
            r"With one factor, ([0-9.]+): (.*) in the first, ([0-9.]+) s .* in the second", notes["prefill"]
        )
        assert said is not None
        assert (float(said[1]), said[2]) == (one, before)
        assert float(said[3]) == pytest.approx(float(after.split()[0]) * one / other, rel=0.002)
        assert f"{prompts_fitted_on('mi300x')} in the first plan, {prompts_fitted_on(chip)} in the" in notes["prefill"]
        assert not any(word in note for note in notes.values() for word in ("borrowed", "held-out", "nothing measured"))
    assert document("-f", MI300X, "--what-if", "decode.maxNumSeqs=4")["notes"] == []


def test_compare_with_one_that_does_not_fit_exits_1(run: Run, tmp_path: Path) -> None:
    manifest = yaml.safe_load(MI300X.read_text())
    for role in ("prefill", "decode"):
        manifest["spec"][role]["tensorParallel"] = 1
    file = tmp_path / "narrow.yaml"
    file.write_text(yaml.safe_dump(manifest))
    status, out, _ = run("plan", "--compare", MI300X, file)
    assert status == 1
    assert "191.0 GiB of weights" in out


def test_compare_as_markdown_is_a_table(run: Run) -> None:
    _, out, _ = run("plan", "--compare", MI300X, MI325X, "-o", "markdown")
    table, note, count = out.strip().split("\n\n")
    assert {line.count("|") for line in table.splitlines()} == {4}
    assert note.startswith(f"prefill, one prompt: {prompts_fitted_on('mi300x')} in the first plan, ")
    assert "other figures are equal" in count


# --cost


def test_cost_is_price_over_predicted_throughput(document: Document) -> None:
    found = document("-f", MI300X, "--prompt-tokens", 2000, "--output-tokens", 500, "--concurrency", 32, "--cost", 3)
    rate, cost = found["speed"]["throughput"], found["cost"]
    # 16 GPUs a role at 3 an hour
    assert cost["output"]["value"] == pytest.approx(16 * 3 / 3600 / rate["value"] * 1e6)
    assert cost["output"]["high"] == pytest.approx(16 * 3 / 3600 / rate["low"] * 1e6)
    assert cost["output"]["low"] == pytest.approx(16 * 3 / 3600 / rate["high"] * 1e6)
    assert cost["prompt"]["value"] == pytest.approx(cost["output"]["value"] * 500 / 2000)
    assert cost["all_in"]["value"] == pytest.approx(2 * cost["output"]["value"])
    assert cost["per_request"]["value"] == pytest.approx(cost["all_in"]["value"] * 500 / 1e6)
    assert (cost["hour"], cost["concurrency"]) == (96, 32)


# --explain


def test_every_line_of_memory_explains_itself(run: Run, document: Document) -> None:
    plan = document("-f", MI300X)
    for line in plan["decode"]["lines"]:
        (figure,) = document("-f", MI300X, "--explain", f"decode.{line['label']}")["figures"]
        assert figure["text"].startswith(f"{line['bytes']:,} B")
        assert figure["formula"]
        assert figure["source"]


def test_running_requests_say_where_they_come_from(document: Document) -> None:
    def source(*flags: object) -> str:
        (figure,) = document(*flags, "--explain", "decode.maxNumSeqs")["figures"]
        return figure["source"]

    assert source("-f", MI300X) == "spec.decode.maxNumSeqs"
    assert source("--chip", "mi300x") == "profile mi300x: 32 is the most that was tried on MI300X"
    assert source("--chip", "mi300x", "--prompt-tokens", 9, "--output-tokens", 9) == "spec.workload"


def test_a_name_without_its_role_explains_both(run: Run) -> None:
    status, out, _ = run("plan", "-f", MI300X, "--explain", "kv PAGES")
    assert status == 0
    assert [line.split(" = ")[0] for line in out.splitlines() if " = " in line] == [
        "prefill.KV pages",
        "decode.KV pages",
    ]


def test_an_unknown_name_lists_the_nearest(run: Run) -> None:
    _, _, err = run("plan", "-f", MI300X, "--explain", "routed expert")
    assert err.rstrip().endswith("name one of: routed experts")


def test_costs_explain_themselves(document: Document) -> None:
    (figure,) = document("-f", MI300X, "--cost", 2, "--explain", "cost.allIn")["figures"]
    assert figure["formula"] == "GPUs x price / 3,600 s / output tokens/s x 1,000,000"
    assert figure["values"].startswith("32 GPUs x 2 / 3,600")


# --search


def test_search_ranks_by_predicted_throughput_and_names_settings_that_plan(run: Run, document: Document) -> None:
    flags = ("--prompt-tokens", 2048, "--output-tokens", 128)
    found = document("--chip", "mi325x", "--search", 4, *flags)
    rates = [layout["tokens_per_second"] for layout in found["ranked"]]
    assert rates == sorted(rates, reverse=True)
    best = found["ranked"][0]
    assert best["nodes"] <= 4
    shape = best["decode"]
    plan = document(
        "--chip", "mi325x", "--nodes-per-group", shape["nodes_per_group"],
        "--tensor-parallel", shape["tensor_parallel"],
        "--prefill-groups", best["prefill"]["groups"], "--decode-groups", shape["groups"], *flags,
    )  # fmt: skip
    assert best["prefill"]["nodes_per_group"] == shape["nodes_per_group"]
    assert plan["decode"]["max_num_seqs"] == shape["max_num_seqs"]
    assert plan["nodes"] == best["nodes"]


def test_one_node_of_mi300x_is_refused_with_the_arithmetic(run: Run) -> None:
    status, out, _ = run("plan", "--chip", "mi300x", "--search", 1)
    assert status == 1
    assert "use the nearest layout that fits: 2 x 8 GPUs with tensorParallel 8" in out
    assert "expected  at least 4: one prefill group of 2 x 8 GPUs" in out
    refused = json.loads(run("plan", "--chip", "mi300x", "--search", 1, "-o", "json")[1])["refused"]
    assert all("(checkpoint 1,453.7 GiB)" in each["got"] for each in refused)
    assert all("8 x 192.0 GiB = 1,535.9 GiB" in each["got"] for each in refused)


def test_search_takes_hardware_and_precision_of_a_manifest(document: Document) -> None:
    by_flags = document("--chip", "mi300x", "--search", 4, "--max-model-len", 524_288)
    by_file = document("-f", MI300X, "--search", 4)
    not_kept = by_file.pop("not_kept")
    assert by_flags.pop("not_kept") == []
    # what to type is not the same
    assert by_file.pop("to_plan_first")["spec"] == by_flags.pop("to_plan_first")["spec"]
    assert by_file == by_flags
    assert "maxNumSeqs (8 in prefill, 8 in decode)" in not_kept


def test_search_without_rates_says_so_and_ranks_by_capacity(run: Run) -> None:
    status, out, _ = run("plan", "-f", EXAMPLES / "local" / "2p2d.yaml", "--search", 4)
    assert status == 0
    assert "not ranked by throughput: HardwareProfile local-cpu" in out


def test_search_that_misses_a_target_exits_1(run: Run) -> None:
    flags = ("--prompt-tokens", 2048, "--output-tokens", 128, "--target-tpot", "1ms")
    status, out, _ = run("plan", "--chip", "mi300x", "--search", 4, *flags)
    assert status == 1
    assert "misses: --target-tpot: got 1ms, expected at least" in out


def test_search_costs_a_layout_as_its_own_plan_does(run: Run, document: Document) -> None:
    work = ("--prompt-tokens", 4000, "--output-tokens", 500, "--cost", 2.5)
    found = document("--chip", "mi300x", "--search", 4, *work)
    best = found["ranked"][0]
    gpus = sum(
        best[role]["groups"] * best[role]["nodes_per_group"] * best[role]["gpus_per_node"]
        for role in ("prefill", "decode")
    )
    hour = 2.5 * gpus
    expected = hour / 3600 / best["tokens_per_second"] * 1_000_000
    assert best["cost_per_million_output_tokens"] == pytest.approx(expected)
    assert {each["cost_per_million_output_tokens"] > 0 for each in found["ranked"]} == {True}
    text = run("plan", "--chip", "mi300x", "--search", 4, *work)[1]
    assert f"{expected:,.2f}" in next(line for line in text.splitlines() if line.startswith("  1."))


def test_search_without_rates_has_no_cost(run: Run) -> None:
    status, _, err = run("plan", "-f", EXAMPLES / "local" / "2p2d.yaml", "--search", 4, "--cost", 2.5)
    assert status == 2
    assert "--cost: got no throughput: HardwareProfile local-cpu" in err


def test_compare_costs_both_plans(document: Document) -> None:
    rows = {row["key"]: row for row in document("--compare", MI300X, MI325X, "--cost", 2.5)["changes"]}
    for side, manifest in (("before", MI300X), ("after", MI325X)):
        alone = document("-f", manifest, "--cost", 2.5)["cost"]["all_in"]["value"]
        assert rows["cost.allIn"][side].startswith(f"{alone:,.2f} (")
