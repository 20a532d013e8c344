"""`kimictl plan --search -f`: what a manifest fixes is kept, what the search chooses is said; refusals by reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STATED, FOR_WORKLOAD = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi300x-workload.yaml"
Run = Callable[..., tuple[int, str, str]]


def search(run: Run, *arguments: object) -> dict[str, Any]:
    return json.loads(run("plan", *arguments, "-o", "json")[1])


def test_a_stated_longest_request_is_kept_and_held_by_each_layout(run: Run) -> None:
    found = search(run, "-f", STATED, "--search", 4)
    assert found["max_model_len"] == 524_288
    assert {each["decode"]["max_model_len"] for each in found["ranked"]} == {524_288}
    _, out, _ = run("plan", "-f", STATED, "--search", 4)
    assert "requests of up to 524,288 (maxModelLen); " in out.splitlines()[0]


@pytest.mark.parametrize("lengths", [(), ("--prompt-tokens", 14_336, "--output-tokens", 2048)])
@pytest.mark.parametrize("longest", [None, 8192, 200_000, 524_288, 1_048_576])
def test_layouts_are_planned_as_they_are_ranked(run: Run, longest: int | None, lengths: tuple[object, ...]) -> None:
    if longest == 8192 and lengths:
        lengths = ("--prompt-tokens", 4096, "--output-tokens", 500)
    stated = (*lengths, *(() if longest is None else ("--max-model-len", longest)))
    found = search(run, "--chip", "mi300x", "--search", 4, *stated)["ranked"]
    widths = {each["decode"]["tensor_parallel"]: each for each in found}
    assert (2 in widths) == ((longest or 1) < 600_000)  # two nodes of TP2 hold 615,872 tokens
    for width, each in widths.items():
        flags = ("--chip", "mi300x", "--nodes", 4, "--tensor-parallel", width, *stated)
        plan = json.loads(run("plan", *flags, "-o", "json")[1])
        for role in ("prefill", "decode"):
            assert plan[role]["max_num_seqs"] == each[role]["max_num_seqs"]
            assert plan[role]["max_model_len"] == each[role]["max_model_len"]
        assert plan["speed"]["throughput"]["value"] == pytest.approx(each["tokens_per_second"])


def test_both_roles_max_num_seqs_are_shown(run: Run) -> None:
    flags = ("--chip", "mi300x", "--search", 4, "--prompt-tokens", 14_336, "--output-tokens", 2048)
    first = search(run, *flags)["ranked"][0]
    seqs = [first[role]["max_num_seqs"] for role in ("prefill", "decode")]
    assert seqs[0] != seqs[1]
    out = run("plan", *flags)[1]
    assert f" {seqs[0]} / {seqs[1]} " in out
    assert "maxNumSeqs is of a lane, in prefill / in decode" in out


def test_lengths_that_nobody_stated_are_called_assumed(run: Run) -> None:
    flags = ("plan", "--chip", "mi300x", "--search", 4)
    assert "answers of 2,048 tokens (assumed: none was given); " in run(*flags)[1].splitlines()[0]
    assert "assumed" not in run(*flags, "--prompt-tokens", 9, "--output-tokens", 9)[1].splitlines()[0]


def test_what_is_not_kept_is_named_with_its_values(run: Run) -> None:
    _, out, _ = run("plan", "-f", STATED, "--search", 4)
    assert out.splitlines()[1] == (
        "chosen here, not kept from the manifest: groups, nodesPerGroup, gpusPerNode, tensorParallel, "
        "maxNumSeqs (8 in prefill, 8 in decode)"
    )
    assert "maxNumSeqs" not in run("plan", "-f", FOR_WORKLOAD, "--search", 4)[1].splitlines()[1]


def test_the_workload_of_a_manifest_is_searched_for(run: Run) -> None:
    found = search(run, "-f", FOR_WORKLOAD, "--search", 4)
    first = run("plan", "-f", FOR_WORKLOAD, "--search", 4)[1].splitlines()[0]
    assert "prompts of log-normal, median 8,000, p95 60,000 tokens" in first
    # 48 at once over the lanes
    seqs = {each["decode"]["tensor_parallel"]: each["decode"]["max_num_seqs"] for each in found["ranked"]}
    assert seqs == {2: 6, 4: 12, 8: 24}
    other = run("plan", "-f", FOR_WORKLOAD, "--search", 4, "--prompt-tokens", 9, "--output-tokens", 9)[1]
    assert "prompts of 9 tokens, answers of 9 tokens" in other.splitlines()[0]


def test_a_flag_beside_a_manifest_is_refused(run: Run) -> None:
    status, out, err = run("plan", "-f", STATED, "--search", 4, "--chip", "mi325x")
    assert (status, out) == (2, "")
    assert "--chip: got a flag beside a manifest" in err


def test_equal_reasons_are_one_line_with_the_number_of_shapes(run: Run) -> None:
    lengths = ("--prompt-tokens", 400_000, "--output-tokens", 300_000)
    _, out, _ = run("plan", "--chip", "mi300x", "--search", 5, *lengths)
    refused = [line for line in out.splitlines() if line.startswith("refused ")]
    heads = [line.partition(": ")[0] for line in refused]
    assert heads == [
        "refused 5 shapes of a group (2 x 8 GPUs TP1, 1 x 8 GPUs TP8, 1 x 8 GPUs TP4, 1 x 8 GPUs TP2, 1 x 8 GPUs TP1)",
        "refused 2 shapes of a group (2 x 8 GPUs TP2, 4 x 8 GPUs TP1)",
        "refused 2 shapes of a group (3 x 8 GPUs, 5 x 8 GPUs)",
    ]
    assert "too little memory a GPU: of the first expected at most 192.0 GiB" in refused[0]
    assert "31.2 GiB are missing in all; use the nearest layout that fits: 2 x 8 GPUs" in refused[0]
    # two nodes have room for the checkpoint, and their lanes of one GPU for too little of it; one node has no room
    assert refused[0].endswith(
        "; each of 16 GPUs would hold 191.0 GiB of weights"
        "; 8 x 192.0 GiB do not hold 1,453.7 GiB of checkpoint beside 257.6 GiB reserved"
    )
    assert "pages for less than the longest request" in refused[1]
    assert not any("hold 1" in each for each in refused[1:])
    assert "ranks that divide the 896 experts of kimi-k3; use groups of [1, 2, 4] nodes" in refused[2]
    shapes = {each["shape"] for each in search(run, "--chip", "mi300x", "--search", 5, *lengths)["refused"]}
    assert len(shapes) == 9
    assert "; 9 shapes of a group do not" in out.splitlines()[0]


def test_weights_of_several_shapes_are_said_from_least_to_most(run: Run) -> None:
    """JSON has the sums over the eight GPUs of each: what fits beside the checkpoint is not where the room ends."""
    _, out, _ = run("plan", "--chip", "mi325x", "--search", 1)
    (line,) = [line for line in out.splitlines() if line.startswith("refused ")]
    assert line.endswith("; a GPU would hold 227.7 GiB to 275.2 GiB of weights")
    sums = [each["got"] for each in search(run, "--chip", "mi325x", "--search", 1)["refused"]]
    weights = [float(re.search(r"([\d,.]+) GiB of weights", got)[1].replace(",", "")) / 8 for got in sums]
    assert sorted(weights) == pytest.approx([227.7, 275.2], abs=0.05)


def test_a_miss_names_the_flag_or_the_field_of_the_manifest(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "k3.yaml"
    file.write_text(FOR_WORKLOAD.read_text().replace("tpotSeconds: 0.5", "tpotSeconds: 0.01"))
    _, out, _ = run("plan", "-f", file, "--search", 4)
    assert "misses: spec.workload.targets.tpotSeconds: got 0.01 s, expected at least" in out
    flags = ("--prompt-tokens", 1000, "--output-tokens", 100, "--target-tpot", "10ms", "--concurrency", 5)
    _, out, _ = run("plan", "--chip", "mi300x", "--search", 4, *flags)
    assert "misses: --target-tpot: got 10ms, expected at least" in out
    assert "workload." not in out
