"""A deployment that states its workload: what `plan` and `render` make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFEST = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
WORKLOAD = {"prompt": {"fixed": 4096}, "output": {"fixed": 512}, "concurrency": 32}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Path]:
    """The example without maxNumSeqs, under a workload."""

    def write(**changes: Any) -> Path:
        document = yaml.safe_load(MANIFEST.read_text())
        for role in ("prefill", "decode"):
            document["spec"][role].pop("maxNumSeqs", None)
        document["spec"]["workload"] = WORKLOAD | changes
        file = tmp_path / "k3.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    return write


def test_the_stated_workload_is_planned_for_and_predicted(run: Run, manifest: Callable[..., Path]) -> None:
    status, out, err = run("plan", "-f", manifest(), "-o", "json")
    assert status == 0, err
    document = json.loads(out)
    assert document["decode"]["max_num_seqs"] == 4  # 32 over 8 lanes
    assert (document["workload"]["assumed"], document["workload"]["prompt"]) == (False, "4,096 tokens")
    assert document["speed"]["running"] == 32


def test_flags_ask_about_another_workload_of_the_same_plan(run: Run, manifest: Callable[..., Path]) -> None:
    _, out, _ = run("plan", "-f", manifest(), "--prompt-tokens", 100, "--output-tokens", 10, "-o", "json")
    document = json.loads(out)
    assert document["decode"]["max_num_seqs"] == 4
    assert document["workload"]["prompt"] == "100 tokens"


def test_what_the_workload_misses_is_told_and_decides_the_exit_status(run: Run, manifest: Callable[..., Path]) -> None:
    status, out, _ = run("plan", "-f", manifest(targets={"tpotSeconds": 0.001}))
    assert status == 1
    assert "\nmisses: spec.workload.targets.tpotSeconds: got 0.001 s, expected at least 0.1" in out
    assert "warning: " not in out


def test_the_pods_get_what_was_solved(run: Run, manifest: Callable[..., Path]) -> None:
    status, out, err = run("render", "-f", manifest())
    assert status == 0, err
    settings = [
        json.loads(document["data"]["worker.json"])
        for document in yaml.safe_load_all(out)
        if document["kind"] == "ConfigMap" and "worker.json" in document["data"]
    ]
    limits = {each["role"]: each["limits"] for each in settings}
    assert limits["decode"]["max_num_seqs"] == 4
    assert limits["decode"]["num_state_slots"] == 5
    assert limits["prefill"]["max_num_seqs"] > 4


def test_a_workload_that_contradicts_itself_is_refused(run: Run, manifest: Callable[..., Path]) -> None:
    status, out, err = run("plan", "-f", manifest(prompt={"uniform": {"min": 9, "max": 3}}))
    assert (status, out) == (2, "")
    assert "spec.workload.prompt.uniform.min: got 9" in err
    status, _, err = run("plan", "-f", manifest(prompt=5))
    assert status == 2
    assert "spec.workload.prompt: got 5" in err


def test_the_example_with_a_workload_is_planned_for_it(run: Run) -> None:
    status, out, err = run("plan", "-f", MANIFEST.parent / "mi300x-workload.yaml", "-o", "json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    stated = document["deployment"]["spec"]
    assert not any("maxNumSeqs" in stated[role] for role in ("prefill", "decode"))
    assert "maxModelLen" not in stated["model"]
    assert (document["meets_workload"], document["workload"]["assumed"]) == (True, False)
    # 48 over 8 lanes
    assert (document["workload"]["concurrency"], document["decode"]["max_num_seqs"]) == (48, 6)
    assert document["speed"]["tpot"]["value"] < 1e3 * document["workload"]["targets"]["tpot_seconds"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_reuse_is_warned_of_once(run: Run, manifest: Callable[..., Path], form: str) -> None:
    in_manifest = run("plan", "-f", manifest(reuse=0.5), "-o", form)[1]
    by_flag = run("plan", "-f", MANIFEST, "--reuse", 0.5, "-o", form)[1]
    assert [out.count("keeps no prefix cache") for out in (in_manifest, by_flag)] == [1, 1]


def test_flags_change_the_workload_of_a_manifest(run: Run, manifest: Callable[..., Path]) -> None:
    """What no flag states stays; a rate takes the place of a concurrency, a target stands beside the other."""
    file = manifest(reuse=0.5, concurrency=48, targets={"ttftSeconds": 50, "tpotSeconds": 5})

    def load(*flags: object) -> dict[str, Any]:
        return dict(json.loads(run("plan", "-f", file, *flags, "-o", "json")[1])["workload"])

    own = load()
    assert (own["assumed"], own["concurrency"], own["reuse"]) == (False, 48, 0.5)
    assert load("--reuse", 0.25) == own | {"reuse": 0.25}
    assert load("--output-tokens", 77) == own | {"output": "77 tokens", "output_mean_tokens": 77}
    slower = load("--target-tpot", "4s")
    assert slower["targets"] == own["targets"] | {"tpot_seconds": 4.0}
    # concurrency is what the rate makes of the target: 2 a second x 512 tokens x 5 s
    assert load("--requests-per-second", 2) == own | {"concurrency": 5120}


def test_a_load_by_flags_tells_what_is_still_cut_for_the_manifest(run: Run, manifest: Callable[..., Path]) -> None:
    assert "still cut for the manifest's spec.workload" in run("plan", "-f", manifest(), "--reuse", 0.25)[1]
    assert "still cut for" not in run("plan", "-f", manifest())[1]
    assert "still cut for" not in run("plan", "-f", MANIFEST, "--reuse", 0.25)[1]


def test_what_if_cuts_anew_beside_flags_too(run: Run, manifest: Callable[..., Path]) -> None:
    """The edit wins on its side; the manifest's own plan stays on the other."""
    file = manifest(concurrency=16)
    flags = ("-f", file, "--concurrency", 200, "--what-if", "workload.concurrency=80", "-o", "json")
    (seqs,) = (row for row in json.loads(run("plan", *flags)[1])["changes"] if row["key"] == "decode.maxNumSeqs")
    assert [seqs[side] for side in ("before", "after")] == ["2", "10"]
