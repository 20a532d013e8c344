"""`kimictl plan` on a chip whose FLOPs nobody stated: bytes give decode and handoff, prefill is not made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api import KimiDeployment
from kimi_operator.api.base import dump, parse
from kimi_operator.cli import main
from kimi_operator.planner import Plan
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import plan_on

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

REASON = "HardwareProfile mi308x: spec.gpu.bf16FlopsPerSecond: got nothing"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def speed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "-o", "json")
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)["speed"]
    return found


def test_decode_and_handoff_are_those_of_a_chip_of_the_same_bandwidths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With FLOPs stated the same times come out, and the rest too; of a load that prefill feeds."""
    document = dump(built_in_profiles()["mi308x"])
    document["metadata"]["name"] = "with-flops"
    document["spec"]["gpu"]["bf16FlopsPerSecond"] = 300_000_000_000_000
    profile = tmp_path / "own.yaml"
    profile.write_text(yaml.safe_dump(document), encoding="utf-8")
    load = ("--concurrency", "8")
    bare = speed(capsys, "--chip", "mi308x", *load)
    whole = speed(capsys, "-f", str(profile), "--chip", "with-flops", *load)
    assert (bare["predicted"], whole["predicted"]) == (False, True)
    assert bare["reason"].startswith(REASON)
    assert bare.keys() == {"predicted", "reason", "request", "running", "tpot", "tpot_alone", "handoff"}
    for name in bare.keys() - {"predicted", "reason"}:
        assert bare[name] == whole[name], name
    assert 0 < bare["tpot_alone"]["low"] < bare["tpot_alone"]["value"] < bare["tpot"]["value"] < bare["tpot"]["high"]


@pytest.mark.parametrize("output", ["text", "markdown", "html"])
def test_every_form_shows_what_is_predicted_and_why_the_rest_is_not(
    capsys: pytest.CaptureFixture[str], output: str
) -> None:
    status, out, _ = run(capsys, "--chip", "mi308x", "-o", output)
    assert status == 0
    assert "TPOT" in out
    assert f"not predicted: {REASON}" in out
    assert "FLOPs taken not to bind" in out
    assert "no predictions" not in out
    if output != "html":
        assert "handoff" in out
        assert "fitted on 1 point, fit" in out.replace("\\", "")


def test_prefill_is_explained_as_not_predicted_and_nothing_has_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--chip", "mi308x", "--explain", "prefill")
    assert out.startswith("prefill = not predicted\n")
    assert REASON in out
    _, tpot, _ = run(capsys, "--chip", "mi308x", "--explain", "tpot")
    assert "weights" in tpot
    status, out, err = run(capsys, "--chip", "mi308x", "--cost", "2")
    assert (status, out) == (2, "")
    assert "no throughput" in err


def test_a_chip_without_bandwidth_has_no_predictions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = dump(built_in_profiles()["mi308x"])
    document["metadata"]["name"] = "bare"
    for part, name in (("gpu", "hbmBytesPerSecond"), *((p, "gpu.hbmBytesPerSecond") for p in ("basis", "sources"))):
        del document["spec"][part][name]
    profile = tmp_path / "own.yaml"
    profile.write_text(yaml.safe_dump(document), encoding="utf-8")
    found = speed(capsys, "-f", str(profile), "--chip", "bare")
    assert found.keys() == {"predicted", "reason"}
    assert "spec.gpu.hbmBytesPerSecond" in found["reason"]


@pytest.mark.parametrize("times", [0.3, 0.99, 1.01, 2.0])
def test_a_target_of_a_step_is_judged_by_bytes(capsys: pytest.CaptureFixture[str], times: float) -> None:
    """And within the band not for sure; in the warnings of a manifest's plan too."""
    load = ("--chip", "mi308x", "--prompt-tokens", "4000", "--output-tokens", "500", "--max-num-seqs", "16")
    step = speed(capsys, *load)["tpot"]["value"]
    status, out, _ = run(capsys, *load, "--target-tpot", f"{times * step:.3f}ms")
    assert status == (times < 1)
    assert ("misses: --target-tpot" in out) == (times < 1)
    assert ("warning: --target-tpot" in out) == (times == 1.01)
    assert ("not sure" in out or "to be sure" in out) == (abs(times - 1) < 0.1)
    document = yaml.safe_load((EXAMPLES / "mi300x-2p2d.yaml").read_text())
    document["spec"]["hardware"]["profile"] = "mi308x"
    document["spec"]["workload"] = {
        "prompt": {"fixed": 4000}, "output": {"fixed": 500},
        "targets": {"tpotSeconds": round(times * step / 1e3, 6), "ttftSeconds": 1},
    }  # fmt: skip
    for role in ("prefill", "decode"):
        document["spec"][role]["maxNumSeqs"] = 8
    plan = plan_on(architecture("kimi-k3"), parse(KimiDeployment, document).spec, built_in_profiles()["mi308x"])
    assert isinstance(plan, Plan), str(plan)
    assert any(each.startswith("spec.workload.targets.tpotSeconds: ") for each in plan.warnings) == (times < 1.5)
    (left,) = [each for each in plan.warnings if each.startswith("spec.workload.targets.ttftSeconds: ")]
    assert "bf16FlopsPerSecond" in left
