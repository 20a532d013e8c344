"""`kimictl plan` and `kimictl render` as a user runs them: output, exit status, words of a refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.cli import COMMANDS, program_name

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X = EXAMPLES / "mi300x-2p2d.yaml"
LOCAL = EXAMPLES / "local" / "2p2d.yaml"

Run = Callable[..., tuple[int, str, str]]


def edited(tmp_path: Path, source: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a manifest with a change."""
    document = yaml.safe_load(source.read_text())
    edit(document)
    path = tmp_path / source.name
    path.write_text(yaml.safe_dump(document))
    return path


def test_plan_shows_limits_lines_and_totals(run: Run) -> None:
    status, out, err = run("plan", "-f", MI300X)
    assert (status, err) == (0, "")
    assert out.startswith("kimi-k3 on mi300x: 32 GPUs, KV rows bfloat16, experts MXFP4, handoff MoRIIO\n")
    lines = {line.strip().split("  ")[0]: line for line in out.splitlines()}
    assert "90,403,504,128    84.2 GiB  56 of 896 experts x 92 layers" in lines["routed experts"]
    assert "206,141,652,992   192.0 GiB" in lines["total"]
    assert "8,607 x 64 tokens = 550,848" in lines["KV pages a lane"]


def test_plan_as_json_holds_the_same_numbers(run: Run) -> None:
    status, out, _ = run("plan", "-f", MI300X, "-o", "json")
    document = json.loads(out)
    assert status == 0
    assert document["feasible"] is True
    assert (document["decode"]["num_pages"], document["transport"], document["experts"]) == (8_607, "MoRIIO", "MXFP4")
    assert sum(line["bytes"] for line in document["decode"]["lines"]) == 206_141_652_992


def test_a_profile_beside_the_manifest_is_found(run: Run) -> None:
    profile = LOCAL.parent / "profile.yaml"
    for command in ("plan", "render"):
        status, _, err = run(command, "-f", LOCAL)
        assert (status, err) == (0, f"kimictl: {profile} is read too, since it lies beside the manifest\n")
        status, _, err = run(command, "-f", profile, "-f", LOCAL)
        assert (status, err) == (0, "")


@pytest.mark.parametrize("output", ["text", "json"])
def test_what_does_not_fit_exits_1_with_the_arithmetic(run: Run, tmp_path: Path, output: str) -> None:
    def one_gpu_a_lane(document: dict[str, Any]) -> None:
        for role in ("prefill", "decode"):
            document["spec"][role]["tensorParallel"] = 1

    status, out, _ = run("plan", "-f", edited(tmp_path, MI300X, one_gpu_a_lane), "-o", output)
    assert status == 1
    assert "191.0 GiB of weights + 32.2 GiB reserved" in out
    assert "use the nearest layout that fits: 2 x 8 GPUs with tensorParallel 2" in out
    if output == "json":
        assert json.loads(out)["feasible"] is False


def test_render_prints_what_the_operator_would_apply(run: Run) -> None:
    status, out, _ = run("render", "-f", LOCAL, "--worker-image", "me/worker:3", "-n", "serving")
    documents = list(yaml.safe_load_all(out))
    assert status == 0
    assert {document["metadata"]["namespace"] for document in documents} == {"serving"}
    (group,) = (d for d in documents if d["metadata"]["name"] == "k3-decode-0")
    assert group["spec"]["template"]["spec"]["containers"][0]["image"] == "me/worker:3"


@pytest.mark.parametrize("example", ["mi300x-2p2d.yaml", "mi325x-2p2d.yaml"])
def test_another_version_of_the_operator_leaves_a_named_image_at_its_revision(
    run: Run, tmp_path: Path, example: str
) -> None:
    """The default image's tag is the operator's version: a manifest that names its image never follows it."""

    def name_image(document: dict[str, Any]) -> None:
        for role in ("prefill", "decode", "router"):
            document["spec"][role].setdefault("template", {})["image"] = "mine/worker:7"

    file = edited(tmp_path, EXAMPLES / example, name_image)
    old, new = (run("render", "-f", file, "--worker-image", f"any/worker:{tag}")[1] for tag in "12")
    assert old == new
    assert "any/worker" not in new
    assert "mine/worker:7" in new


def test_without_a_named_image_another_version_is_another_revision(run: Run) -> None:
    old, new = (run("render", "-f", LOCAL, "--worker-image", f"any/worker:{tag}")[1] for tag in "12")
    revisions = [{line.strip() for line in text.splitlines() if "/revision:" in line} for text in (old, new)]
    assert len(revisions[0]) == 3
    assert not revisions[0] & revisions[1]


def test_render_refuses_what_does_not_fit(run: Run, tmp_path: Path) -> None:
    path = edited(tmp_path, MI300X, lambda document: document["spec"]["decode"].update(nodesPerGroup=1))
    status, out, err = run("render", "-f", path)
    assert (status, out) == (1, "")
    assert "use the nearest layout that fits: 2 x 8 GPUs" in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "no YAML"),
        ("- a\n", "got list, expected an object"),
        ("", "got 0 KimiDeployments, expected exactly one"),
        (
            "kind: KimiDeployment\nmetadata: {name: k3}\nspec: {prefil: {}}\n",
            "spec.prefil: got {}, expected no such field",
        ),
        ("kind: HardwareProfile\nmetadata: {name: x}\nspec: {}\n", "spec.gpu: got nothing, expected a value"),
        ("kind: KimiDeployment\n---\nkind: KimiDeployment\n", "got 2 KimiDeployments"),
    ],
)
def test_a_broken_file_is_named_with_its_field(run: Run, tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    status, out, err = run("plan", "-f", path)
    assert (status, out) == (2, "")
    assert err.startswith(f"kimictl: {path}")
    assert expected in err


def test_a_file_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    status, _, err = run("plan", "-f", tmp_path / "none.yaml")
    assert status == 2
    assert "none.yaml: got No such file or directory" in err


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model.architecture", "kimi-k2", "spec.model.architecture: got 'kimi-k2', expected one of ['kimi-k3', "),
        ("hardware.profile", "mi999", "spec.hardware.profile: got 'mi999', expected the name of a HardwareProfile"),
        ("decode.groups", "two", "spec.decode.groups: got 'two', expected a valid integer"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(run: Run, tmp_path: Path, path: str, value: str, expected: str) -> None:
    section, field = path.split(".")
    file = edited(tmp_path, MI300X, lambda document: document["spec"][section].update({field: value}))
    status, _, err = run("plan", "-f", file)
    assert status == 2
    assert expected in err


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    with MI300X.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run("plan", "-f", "-")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("plan", "--bogus"), "Unknown option: --bogus"),
        (("plan", "-o", "xml"), "-o: got 'xml', expected one of text, json, "),
        (("dance",), 'Unknown command "dance"'),
        (("render",), "--file"),
    ],
)
def test_a_command_line_that_cannot_be_read_exits_2(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kimictl: ")
    assert expected in err
    command = f"kimictl {arguments[0]}" if arguments[0] in COMMANDS else "kimictl"
    assert err.endswith(f"; see `{command} --help`\n")


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help")])
def test_help_says_what_an_exit_status_means(run: Run, arguments: tuple[str, ...]) -> None:
    status, out, _ = run(*arguments)
    words = " ".join(out.split())
    assert status == 0
    assert "0 it fits" in words
    assert "1 it does not fit" in words
    assert "2 bad input" in words


def test_the_plugin_of_kubectl_is_the_same_program() -> None:
    plugin = Path(sys.executable).parent / "kubectl-kimi"
    assert plugin.is_file(), "installed with the operator's package"
    done = subprocess.run([plugin, "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("Usage: kubectl kimi COMMAND")
    done = subprocess.run([plugin, "plan", "--nodes", "x"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("kubectl kimi: ")


@pytest.mark.parametrize("path", ["/usr/bin/kubectl-kimi", "kubectl-kimi", "kubectl-kimi.exe"])
def test_a_plugin_is_known_by_its_file(path: str) -> None:
    assert program_name(path) == "kubectl kimi"
    assert program_name("/usr/bin/kimictl") == "kimictl"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("-n", "Bad_NS"), "--namespace: got 'Bad_NS', expected at most 63 small letters"),
        (("-n", ""), "--namespace: got ''"),
        (("--worker-image", ""), "--worker-image: got ''"),
        (("--worker-image", "a b"), "--worker-image: got 'a b', expected REGISTRY/NAME:TAG"),
    ],
)
def test_names_that_no_api_server_takes_are_refused(run: Run, flags: tuple[str, str], expected: str) -> None:
    status, out, err = run("render", "-f", MI300X, *flags)
    assert (status, out) == (2, "")
    assert expected in err
