"""`kimictl plan -f` names a much faster tensorParallel of the same groups, and the command that shows it."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kimi_operator.cli.asking import asked_for, make_plan, outlook_of
from kimi_operator.cli.better import better_layout
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STATED, FOR_WORKLOAD = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi300x-workload.yaml"
Run = Callable[..., tuple[int, str, str]]


def better_of(out: str) -> str:
    """The line, or nothing."""
    lines = [line for line in out.splitlines() if "better layout" in line]
    assert len(lines) <= 1
    return lines[0] if lines else ""


def rate_of(run: Run, *arguments: object) -> float:
    document = json.loads(run("plan", *arguments, "-o", "json")[1])
    return document["speed"]["throughput"]["value"]


def test_the_shipped_example_says_how_much_more_it_could_give(run: Run, tmp_path: Path) -> None:
    line = better_of(run("plan", "-f", STATED)[1])
    width, seqs, rate, times = re.search(
        r"tensorParallel (\d) with maxNumSeqs (\d+): ([0-9.,]+) tokens/s, ([0-9.]+) times as many", line
    ).groups()
    assert int(width) != 2
    file = tmp_path / "k3.yaml"
    text = STATED.read_text().replace("tensorParallel: 2", f"tensorParallel: {width}")
    file.write_text(text.replace("maxNumSeqs: 8", f"maxNumSeqs: {seqs}"))
    there, here = rate_of(run, "-f", file), rate_of(run, "-f", STATED)
    assert there == pytest.approx(float(rate.replace(",", "")), rel=1e-3)
    assert there / here == pytest.approx(float(times), abs=0.05)
    assert better_of(run("plan", "-f", file)[1]) == ""


def test_its_command_shows_that_layout(run: Run) -> None:
    flags = ("--prompt-tokens", 9000, "--output-tokens", 400, "--reuse", 0.5)
    line = better_of(run("plan", "-f", STATED, *flags)[1])
    width, rate = re.search(r"tensorParallel (\d) .*: ([0-9.,]+) tokens/s", line).groups()
    command = shlex.split(line.partition("; see ")[2])
    assert command[:4] == ["kimictl", "plan", "--search", "4"]
    first = json.loads(run(*command[1:], "-o", "json")[1])["ranked"][0]
    assert first["decode"]["tensor_parallel"] == int(width)
    assert first["tokens_per_second"] == pytest.approx(float(rate.replace(",", "")), rel=1e-3)


def test_each_form_for_people_has_it_and_those_for_scripts_do_not(run: Run) -> None:
    for form in ("markdown", "html"):
        assert "times as many; see kimictl plan --search 4 -f " in run("plan", "-f", STATED, "-o", form)[1]
    for form in ("json", "yaml"):
        assert "times as many" not in run("plan", "-f", STATED, "-o", form)[1]


def test_nothing_is_said_where_little_is_to_gain_or_a_target_would_be_missed(run: Run) -> None:
    assert better_of(run("plan", "-f", FOR_WORKLOAD)[1]) == ""
    assert better_of(run("plan", "--chip", "mi300x", "--nodes", 4, "--tensor-parallel", 8)[1]) == ""


def manifest(folder: Path, tensor_parallel: int, seqs: int) -> Path:
    """The example with other lanes, whose longest request is left to the plan."""
    file = folder / "k3.yaml"
    text = STATED.read_text().replace("tensorParallel: 2", f"tensorParallel: {tensor_parallel}")
    text = text.replace("maxNumSeqs: 8", f"maxNumSeqs: {seqs}").replace("    maxModelLen: 524288\n", "")
    file.write_text(text)
    return file


def test_without_lengths_it_is_what_a_plan_chooses(run: Run, tmp_path: Path) -> None:
    """A plan gives both roles the same context, a search for prompts alone would run more of them in prefill."""
    line = better_of(run("plan", "-f", manifest(tmp_path, 8, 8))[1])
    seqs = json.loads(run("plan", "--chip", "mi300x", "--nodes", 4, "-o", "json")[1])["prefill"]["max_num_seqs"]
    assert f"tensorParallel 2 with maxNumSeqs {seqs}: " in line
    line = better_of(run("plan", "-f", manifest(tmp_path, 8, 8), "--prompt-tokens", 14_336, "--output-tokens", 2048)[1])
    assert re.search(r"tensorParallel 2 with maxNumSeqs \d+ in prefill and \d+ in decode: ", line)


def test_a_target_that_the_plan_meets_is_met_by_what_is_better(run: Run, tmp_path: Path) -> None:
    """Lanes of 8 GPUs take the least time for a token, and give the least output."""
    file = manifest(tmp_path, 8, 1)
    lengths = ("--prompt-tokens", 14_336, "--output-tokens", 2048)
    alone_ms = json.loads(run("plan", "-f", file, *lengths, "-o", "json")[1])["speed"]["tpot_alone"]["value"]
    assert "tensorParallel 2 " in better_of(run("plan", "-f", file, *lengths)[1])
    line = better_of(run("plan", "-f", file, *lengths, "--target-tpot", f"{1.03 * alone_ms:.1f}ms")[1])
    assert "tensorParallel 2 " not in line
    assert "tensorParallel 4 " not in line


def test_it_costs_little() -> None:
    files = [STATED]
    asked = asked_for(files, DeploymentFlags(), WorkloadFlags())
    outlook = outlook_of(make_plan(asked), asked)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        assert better_layout(outlook, "")
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.03
