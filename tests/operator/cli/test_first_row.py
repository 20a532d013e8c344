"""What a search says to type for its first layout plans that layout: running requests, longest request, tokens/s."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.cli.figures import number

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STATED, FOR_WORKLOAD = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi300x-workload.yaml"
CHIP = ("--chip", "mi300x", "--search")
SHORT = ("--prompt-tokens", "1000-8000", "--output-tokens", 500, "--concurrency", 50, "--reuse", 0.5)
UNEQUAL = ("--chip", "mi325x", "--search", 8)
ROLES = ("prefill", "decode")
Run = Callable[..., tuple[int, str, str]]


def searched(run: Run, *arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first layout, and how it is planned."""
    found = json.loads(run("plan", *arguments, "-o", "json")[1])
    return found["ranked"][0], found["to_plan_first"]


def words(command: str) -> list[str]:
    program, *rest = shlex.split(command)
    assert program == "kimictl"
    return rest


def check_plan(plan: dict[str, Any], first: dict[str, Any]) -> None:
    for role in ROLES:
        assert plan[role]["max_num_seqs"] == first[role]["max_num_seqs"]
    assert min(plan[role]["max_model_len"] for role in ROLES) == first["decode"]["max_model_len"]
    assert plan["speed"]["throughput"]["value"] == pytest.approx(first["tokens_per_second"])


@pytest.mark.parametrize(
    "asked",
    [
        (*CHIP, 4),
        ("--chip", "mi325x", "--search", 6),
        (*CHIP, 4, *SHORT),
        (*CHIP, 4, *SHORT, "--max-model-len", 200_000, "--kv-cache", "FP32"),
        (*CHIP, 4, *SHORT, "--target-tpot", "500 ms"),
        ("--chip", "mi325x", "--search", 2),
    ],
)
def test_flags_plan_the_first_layout_where_both_roles_have_one_shape(run: Run, asked: tuple[object, ...]) -> None:
    first, how = searched(run, *asked)
    _, out, err = run(*words(how["command"]), "-o", "json")
    assert err == ""
    check_plan(json.loads(out), first)


@pytest.mark.parametrize("longest", [524_288, None])
@pytest.mark.parametrize("seqs", [8, None])
@pytest.mark.parametrize("nodes", [4, 6])
@pytest.mark.parametrize("work", [(), SHORT])
def test_edits_of_a_manifest_plan_the_first_layout(  # noqa: PLR0917 - fixtures and parameters
    run: Run, tmp_path: Path, longest: int | None, seqs: int | None, nodes: int, work: tuple[object, ...]
) -> None:
    document = yaml.safe_load(STATED.read_text())
    document["spec"]["model"]["maxModelLen"] = longest
    for role in ROLES:
        document["spec"][role]["maxNumSeqs"] = seqs
    manifest = tmp_path / "manifest of k3.yaml"
    manifest.write_text(yaml.safe_dump(document))
    check_edits(run, manifest, nodes, work)


@pytest.mark.parametrize("nodes", [4, 8])
def test_edits_of_a_manifest_with_a_workload_plan_the_first_layout(run: Run, nodes: int) -> None:
    check_edits(run, FOR_WORKLOAD, nodes, ())


def check_edits(run: Run, manifest: Path, nodes: int, work: tuple[object, ...]) -> None:
    first, how = searched(run, "-f", manifest, "--search", nodes, *work)
    command = words(how["command"])
    before = json.loads(run("plan", "-f", manifest, *work, "-o", "json")[1])
    _, out, err = run(*command, "-o", "json")
    assert err == ""
    after = {each["key"]: each["after"] for each in json.loads(out)["changes"]}
    for role in ROLES:
        seqs = after.get(f"{role}.maxNumSeqs", f"{before[role]['max_num_seqs']}")
        assert seqs == f"{first[role]['max_num_seqs']}"
    longest = (after.get(f"{role}.maxModelLen", f"{before[role]['max_model_len']:,}") for role in ROLES)
    assert min(int(each.replace(",", "")) for each in longest) == first["decode"]["max_model_len"]
    throughput = after.get("throughput", f"{number(before['speed']['throughput']['value'])} tokens/s")
    assert throughput.startswith(f"{number(first['tokens_per_second'])} tokens/s")


def test_a_manifest_that_is_the_first_layout_needs_no_edit(run: Run, tmp_path: Path) -> None:
    document = yaml.safe_load(STATED.read_text())
    for role in ROLES:
        document["spec"][role] |= searched(run, "-f", STATED, "--search", 4)[1]["spec"][role]
    manifest = tmp_path / "first.yaml"
    manifest.write_text(yaml.safe_dump(document))
    assert searched(run, "-f", manifest, "--search", 4)[1]["command"] == f"kimictl plan -f {manifest}"


@pytest.mark.parametrize(
    ("asked", "target"),
    [(UNEQUAL, ()), ((*CHIP, 4), ("--target-tpot", "10ms")), ((*CHIP, 8), ("--target-tpot", "10ms"))],
)
def test_unequal_sizes_without_a_manifest_are_fields_of_one(
    run: Run, tmp_path: Path, asked: tuple[object, ...], target: tuple[object, ...]
) -> None:
    first, how = searched(run, *asked, *target)
    assert how["command"] is None
    (line,) = (each for each in run("plan", *asked, *target)[1].splitlines() if each.startswith("to plan row 1"))
    assert line.startswith("to plan row 1, write a manifest with spec.prefill: {groups: ")
    told = re.findall(r"spec\.(\w+): (\{.*?\})", line)
    document = yaml.safe_load((EXAMPLES / f"{asked[1]}-2p2d.yaml").read_text())
    del document["spec"]["model"]["maxModelLen"]
    for role, sizes in told:
        assert yaml.safe_load(sizes) == how["spec"][role]
        document["spec"][role] |= yaml.safe_load(sizes)
    manifest = tmp_path / "unequal.yaml"
    manifest.write_text(yaml.safe_dump(document))
    check_plan(json.loads(run("plan", "-f", manifest, *target, "-o", "json")[1]), first)


def test_each_form_says_it_under_the_table_and_nothing_where_nothing_fits(run: Run) -> None:
    line = "to plan row 1: kimictl plan -f"
    for form in ("text", "markdown", "html"):
        out = html.unescape(run("plan", "-f", STATED, "--search", 4, *SHORT, "-o", form)[1])
        assert out.count(f"{line} {STATED} --what-if prefill.tensorParallel=8") == 1
        assert "--prompt-tokens 1000-8000 --output-tokens 500 --reuse 0.5 --concurrency 50" in out
        assert "to plan row 1" not in run("plan", *CHIP, 2, "-o", form)[1]
    assert json.loads(run("plan", *CHIP, 2, "-o", "json")[1])["to_plan_first"] is None
