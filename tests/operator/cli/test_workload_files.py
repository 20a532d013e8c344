"""What is wrong with a workload of `--workload FILE`, and what a plan misses of it, is named by that file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X, WITH_OWN = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi300x-workload.yaml"
LENGTHS = {"prompt": 1000, "output": 100}
Run = Callable[..., tuple[int, str, str]]

PLANS: dict[str, tuple[object, ...]] = {
    "of flags": ("--chip", "mi300x"),
    "of a manifest": ("-f", MI300X),
    "of a manifest with a workload": ("-f", WITH_OWN),
    "searched": ("--chip", "mi300x", "--search", 4),
    "searched for a manifest": ("-f", WITH_OWN, "--search", 4),
    "compared": ("--compare", MI300X, WITH_OWN),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("workload", "field"),
    [
        ({"prompt": -5, "output": 100}, "prompt.fixed: got -5"),
        ({"prompt": 1000}, "output: got nothing"),
        ({**LENGTHS, "promt": 3}, "promt: got 3, expected no such field"),
        ({"prompt": {"fixed": 9, "uniform": {"min": 1, "max": 2}}, "output": 1}, "prompt: got fixed and uniform"),
        ({"prompt": 2_000_000, "output": 1}, "prompt: got 2,000,000 tokens"),
        ({**LENGTHS, "requestsPerSecond": 2}, "targets.tpotSeconds: got nothing"),
        ({**LENGTHS, "targets": {"tpotSeconds": 60}}, "targets.tpotSeconds: got 60, expected at most 10 s for each"),
    ],
)
def test_bad_input_of_a_file_is_named_by_it(
    run: Run, tmp_path: Path, plan: str, workload: dict[str, object], field: str
) -> None:
    file = tmp_path / "load.yaml"
    file.write_text(yaml.safe_dump(workload), encoding="utf-8")
    status, out, err = run("plan", *PLANS[plan], "--workload", file)
    assert (status, out) == (2, "")
    assert f"--workload {file}: {field}" in err


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("100k", "prompt.fixed: got '100k', expected a valid integer; write 100000"),
        (4096.0, "prompt.fixed: got 4096.0, expected a valid integer; write 4096"),
        ({"fixed": "1.5M"}, "prompt.fixed: got '1.5M', expected a valid integer; write 1500000"),
        ("1000-8000", "prompt: got '1000-8000', expected an object .*; write one such as {fixed: 4096} or {uniform: "),
        ([1, 2], "prompt: got [1, 2], expected an object .*; write {empirical: [...]} for lengths as they were"),
        ({"empirical": []}, "prompt.empirical: got [], expected 1 or more entries; "),
        ({"empirical": 5}, "prompt.empirical: got 5, expected a list; write [5]"),
    ],
)
def test_lengths_of_another_form_are_told_theirs(run: Run, tmp_path: Path, prompt: object, said: str) -> None:
    file = tmp_path / "load.yaml"
    file.write_text(yaml.safe_dump({**LENGTHS, "prompt": prompt}), encoding="utf-8")
    _, _, err = run("plan", "--chip", "mi300x", "--workload", file)
    got, _, rest = said.partition(".*")
    assert err.startswith(f"kimictl: --workload {file}: {got}")
    assert rest in err


@pytest.mark.parametrize(("prompt", "remedy"), [(14336, "{fixed: 14336}"), ("14k", "{fixed: 14000}")])
def test_a_plain_length_of_a_manifest_is_told_its_form(run: Run, tmp_path: Path, prompt: object, remedy: str) -> None:
    """The API server takes no plain number there."""
    manifest = yaml.safe_load(WITH_OWN.read_text())
    manifest["spec"]["workload"]["prompt"] = prompt
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(manifest), encoding="utf-8")
    status, _, err = run("plan", "-f", own)
    assert status == 2
    assert err.startswith(f"kimictl: {own}: spec.workload.prompt: got {prompt!r}, expected an object with any of fixed")
    assert err.endswith(f"; write {remedy}\n")


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_missed_of_a_file_is_named_by_it(run: Run, tmp_path: Path, plan: str) -> None:
    file = tmp_path / "load.yaml"
    file.write_text(yaml.safe_dump({**LENGTHS, "targets": {"tpotSeconds": 0.001}}), encoding="utf-8")
    status, out, _ = run("plan", *PLANS[plan], "--workload", file)
    assert status == 1
    assert f"misses --workload {file}: targets.tpotSeconds" in out.replace("misses:", "misses")
    assert "spec.workload." not in out


def test_a_flag_wins_over_the_file_and_is_named_instead(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "load.yaml"
    file.write_text(yaml.safe_dump({**LENGTHS, "targets": {"tpotSeconds": 0.5}}), encoding="utf-8")
    _, out, _ = run("plan", "--chip", "mi300x", "--workload", file, "--target-tpot", "2ms")
    assert "misses: --target-tpot: got 2ms" in out
    assert str(file) not in out


def test_a_manifests_own_workload_is_not_blamed_on_a_file(run: Run, tmp_path: Path) -> None:
    manifest = yaml.safe_load(WITH_OWN.read_text())
    manifest["spec"]["workload"]["targets"] = {"tpotSeconds": 0.001}
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(manifest), encoding="utf-8")
    file = tmp_path / "load.yaml"
    file.write_text(yaml.safe_dump(LENGTHS), encoding="utf-8")
    _, out, _ = run("plan", "-f", own, "--workload", file)
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert any(line.startswith("warning: spec.workload.targets.tpotSeconds") for line in warnings)
    assert not any(str(file) in line for line in warnings)
    manifest["spec"]["workload"] |= {"concurrency": None, "requestsPerSecond": 2, "targets": {}}
    own.write_text(yaml.safe_dump(manifest), encoding="utf-8")
    status, _, err = run("plan", "-f", own, "--workload", file)
    assert status == 2
    assert "spec.workload.targets.tpotSeconds: got nothing" in err
    assert str(file) not in err
