"""`kimictl plan` names a much faster tensorParallel, or groups, of the same nodes, and the command that shows it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.cli.better import WORTH_SAYING
from kimi_operator.planner.layout import MAX_NODES

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STATED, FOR_WORKLOAD = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi300x-workload.yaml"
LENGTHS = ("--prompt-tokens", 14_336, "--output-tokens", 2048)
REUSED = ("--prompt-tokens", 4000, "--output-tokens", 400, "--reuse", 0.9)
LINE = re.compile(
    r"better layout: (?:tensorParallel )?(\d+|prefill: .*), "
    r"predicted ([0-9.,]+) tokens/s \(.*?\) at ([0-9,]+) at once with maxNumSeqs "
    r"(.*?), TPOT ([0-9.]+) ms \(.*?\): ([0-9.]+) times the most of (?:these groups with )?"
    r"tensorParallel (\d+), ([0-9.,]+) tokens/s "
    r"\(.*?\) at ([0-9,]+) at once with maxNumSeqs (.*?), TPOT ([0-9.]+) ms \(.*?\); see (.*)"
)
NAMES = ("width", "rate", "load", "seqs", "tpot", "times", "own", "own_rate", "own_load", "own_seqs", "own_tpot", "see")
Run = Callable[..., tuple[int, str, str]]


def better_of(run: Run, *arguments: object) -> dict[str, str]:
    """The parts of the line, none without it."""
    lines = [line for line in run("plan", *arguments)[1].splitlines() if "better layout" in line]
    assert len(lines) <= 1
    return dict(zip(NAMES, LINE.fullmatch(lines[0]).groups(), strict=True)) if lines else {}


def manifest(folder: Path, tensor_parallel: int, seqs: int | None = None, groups: int = 1) -> Path:
    """The example with other lanes, whose longest request is left to the plan."""
    file = folder / "k3.yaml"
    text = STATED.read_text().replace("tensorParallel: 2", f"tensorParallel: {tensor_parallel}")
    text = text.replace("    maxNumSeqs: 8\n", "" if seqs is None else f"    maxNumSeqs: {seqs}\n")
    file.write_text(text.replace("    maxModelLen: 524288\n", "").replace("groups: 1", f"groups: {groups}"))
    return file


def searched(run: Run, *arguments: object) -> dict[int, dict[str, Any]]:
    """The best layout of groups of two nodes, by tensorParallel, as a search finds it."""
    ranked = json.loads(run("plan", "--search", 4, *arguments, "-o", "json")[1])["ranked"]
    twos = [each for each in ranked if each["prefill"]["nodes_per_group"] == each["decode"]["nodes_per_group"] == 2]
    return {each["decode"]["tensor_parallel"]: each for each in reversed(twos)}


def value(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_scripts_are_told_the_flag_that_ranks_all_layouts_instead(run: Run, form: str) -> None:
    """The search takes as long as the plan: who asks for it waits for it."""
    document = yaml.safe_load(run("plan", "-f", STATED, *LENGTHS, "-o", form)[1])
    ranked = yaml.safe_load(run("plan", "-f", STATED, *LENGTHS, *document["to_rank_layouts"].split(), "-o", form)[1])
    best = better_of(run, "-f", STATED, *LENGTHS)
    assert int(best["width"]) in {each["decode"]["tensor_parallel"] for each in ranked["ranked"]}
    large = ("--chip", "mi300x", "--nodes", 112, "-o", form)
    assert yaml.safe_load(run("plan", *large)[1])["to_rank_layouts"] is None


def test_it_says_what_a_search_finds_beside_the_most_of_its_own(run: Run) -> None:
    for flags in ((), REUSED, (*LENGTHS, "--concurrency", 150)):
        line, by_width = better_of(run, "-f", STATED, *flags), searched(run, "-f", STATED, *flags)
        best, own = max(by_width.values(), key=lambda each: each["tokens_per_second"]), by_width[2]
        assert int(line["width"]) == best["decode"]["tensor_parallel"] != int(line["own"]) == 2
        times = best["tokens_per_second"] / own["tokens_per_second"]
        assert (value(line["rate"]), value(line["own_rate"])) == pytest.approx(
            (best["tokens_per_second"], own["tokens_per_second"]), rel=1e-3
        )
        assert float(line["times"]) == pytest.approx(times, abs=0.05)
        assert times >= WORTH_SAYING
        if "--concurrency" in flags:
            assert line["load"] == line["own_load"] == "150"
        else:
            assert (value(line["load"]), value(line["own_load"])) == (best["capacity"], own["capacity"])


@pytest.mark.parametrize("which", ["", "own_"])
def test_its_load_and_times_are_those_of_a_plan_of_that_layout(run: Run, tmp_path: Path, which: str) -> None:
    line = better_of(run, "-f", STATED)
    file = tmp_path / "k3.yaml"
    width = line["own" if which else "width"]
    text = STATED.read_text().replace("tensorParallel: 2", f"tensorParallel: {width}")
    file.write_text(text.replace("maxNumSeqs: 8", f"maxNumSeqs: {line[f'{which}seqs']}"))
    speed = json.loads(run("plan", "-f", file, "-o", "json")[1])["speed"]
    assert value(line[f"{which}rate"]) == pytest.approx(speed["throughput"]["value"], rel=1e-3)
    assert value(line[f"{which}tpot"]) == pytest.approx(speed["tpot"]["value"], rel=1e-3)
    assert value(line[f"{which}load"]) == speed["concurrency"]
    assert bool(better_of(run, "-f", file)) == bool(which), "the best layout itself has no better one"


def test_more_running_requests_of_its_own_are_no_other_layout(run: Run, tmp_path: Path) -> None:
    """A plan says how many could run; it gives the most already, but for that."""
    left_open = searched(run, "-f", manifest(tmp_path, 2))
    best = max(left_open.items(), key=lambda each: each[1]["tokens_per_second"])[0]
    file = manifest(tmp_path, best, 1)
    assert re.search(r"maxNumSeqs a lane +1 \(.*\), \d+ could", run("plan", "-f", file)[1])
    assert better_of(run, "-f", file) == {}


def test_its_command_is_the_one_that_was_typed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(better_of(run, "-f", STATED, *REUSED)["see"])
    assert words == ["kimictl", "plan", "--search", "4", "-f", str(STATED), *map(str, REUSED)]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-kimi"])
    assert better_of(run, "-f", STATED)["see"] == f"kubectl kimi plan --search 4 -f {STATED}"


def test_no_more_nodes_than_a_search_takes(run: Run, tmp_path: Path) -> None:
    most = MAX_NODES // 4
    assert better_of(run, "-f", manifest(tmp_path, 8, 8, most))["see"].startswith(f"kimictl plan --search {MAX_NODES} ")
    assert better_of(run, "-f", manifest(tmp_path, 8, 8, most + 1)) == {}


def test_each_form_for_people_has_it_and_those_for_scripts_do_not(run: Run) -> None:
    for form in ("markdown", "html"):
        assert "times the most of tensorParallel 2" in run("plan", "-f", STATED, "-o", form)[1]
    for form in ("json", "yaml"):
        assert "times the most" not in run("plan", "-f", STATED, "-o", form)[1]


def test_nothing_is_said_where_little_is_to_gain(run: Run) -> None:
    assert better_of(run, "-f", FOR_WORKLOAD) == {}
    assert better_of(run, "--chip", "mi300x", "--nodes", 4) == {}


def test_without_lengths_it_is_what_a_plan_chooses(run: Run, tmp_path: Path) -> None:
    """A plan gives both roles the same context, a search for prompts alone would run more of them in prefill."""
    line = better_of(run, "-f", manifest(tmp_path, 8, 8))
    for width, seqs in ((line["width"], line["seqs"]), (line["own"], line["own_seqs"])):
        plan = json.loads(run("plan", "-f", manifest(tmp_path, int(width)), "-o", "json")[1])
        assert {plan[role]["max_num_seqs"] for role in ("prefill", "decode")} == {int(seqs)}
    line = better_of(run, "-f", manifest(tmp_path, 8, 8), *LENGTHS)
    assert re.fullmatch(r"\d+ in prefill and \d+ in decode", line["seqs"])


def test_a_target_that_the_plan_meets_is_met_by_what_is_better(run: Run, tmp_path: Path) -> None:
    """Lanes of 8 GPUs take the least time for a token, and give the least output."""
    file = manifest(tmp_path, 8, 1)
    alone_ms = json.loads(run("plan", "-f", file, *LENGTHS, "-o", "json")[1])["speed"]["tpot_alone"]["value"]
    assert better_of(run, "-f", file, *LENGTHS)
    target = ("--target-tpot", f"{1.06 * alone_ms:.1f}ms")
    found = searched(run, "-f", file, *LENGTHS, *target)
    assert {width for width, each in found.items() if not each["misses"]} == {8}
    assert better_of(run, "-f", file, *LENGTHS, *target) == {}


def test_no_layout_gives_more_than_the_rate_that_comes(run: Run) -> None:
    """Where the plan serves a stated rate, another layout has nothing to add."""
    load = ("--prompt-tokens", 400, "--output-tokens", 500, "--target-tpot", "2s", "--requests-per-second")
    assert "better layout" not in run("plan", "-f", STATED, *load, 0.3)[1]
    assert "better layout" in run("plan", "-f", STATED, *load, 1)[1]


GROUPS = re.compile(r"prefill: (\d+) x (\d+) nodes? \(TP(\d+) .*\), decode: (\d+) x (\d+) nodes? \(TP(\d+) .*\)")


def groups_of(line: dict[str, str]) -> tuple[object, ...]:
    """Flags of the layout that is named: both roles have one shape."""
    prefill, nodes, width, decode, decode_nodes, decode_width = GROUPS.fullmatch(line["width"]).groups()
    assert (nodes, width) == (decode_nodes, decode_width)
    shape = ("--nodes-per-group", nodes, "--tensor-parallel", width)
    return (*shape, "--prefill-groups", prefill, "--decode-groups", decode)


FEW_ANSWERS = ("--prompt-tokens", 14_336, "--output-tokens", 500)


@pytest.mark.parametrize(
    "load", [("--prompt-tokens", 20_000, "--output-tokens", 100), (*FEW_ANSWERS, "--concurrency", 1000)]
)
def test_flags_are_told_of_other_groups_and_of_the_search(run: Run, load: tuple[object, ...]) -> None:
    chip = ("--chip", "mi300x")
    line = better_of(run, *chip, "--nodes", 32, *load)
    flags = groups_of(line)
    assert line["see"] == " ".join(map(str, ("kimictl plan --search 32", *chip, *load)))
    rate, own = (
        json.loads(run("plan", *chip, *words, *load, "-o", "json")[1])["speed"]["throughput"]["value"]
        for words in (flags, ("--nodes", 32))
    )
    assert (value(line["rate"]), value(line["own_rate"])) == pytest.approx((rate, own), rel=1e-3)
    assert float(line["times"]) == pytest.approx(rate / own, abs=0.05)
    assert better_of(run, *chip, *flags, *load) == {}, "the better layout itself has no better one"


def test_the_search_for_flags_keeps_those_that_say_no_layout(run: Run) -> None:
    kept = ("--chip", "mi300x", "--kv-cache", "FP32")
    line = better_of(run, *kept, "--nodes", 8, "--prefill-groups", 2, "--decode-groups", 2)
    assert line["see"] == f"kimictl plan --search 8 {' '.join(kept)}"
    assert run(*line["see"].split()[1:])[0] == 0


def test_a_manifest_is_told_of_other_groups(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "k3.yaml"
    text = FOR_WORKLOAD.read_text().replace("nodesPerGroup: 2", "nodesPerGroup: 4")
    text = text.replace("{min: 200, max: 2000}", "{min: 20, max: 200}")
    file.write_text(text.replace("concurrency: 48", "concurrency: 2000"))
    line = better_of(run, "-f", file)
    first = json.loads(run("plan", "-f", file, "--search", 8, "-o", "json")[1])["ranked"][0]
    assert line["width"] == first["layout"]
    assert value(line["rate"]) == pytest.approx(first["tokens_per_second"], rel=1e-3)


def test_groups_stay_where_another_tensor_parallel_gives_about_as_much(run: Run) -> None:
    """Two groups of one node and one of two compute prompts in about the same time."""
    load = ("--prompt-tokens", 8000, "--output-tokens", 200, "--concurrency", 300)
    line = better_of(run, "--chip", "mi355x", "--nodes", 4, "--tensor-parallel", 8, *load)
    assert (
        not line
        or line["width"].isdigit()
        or value(line["rate"])
        > 1.05
        * max(
            json.loads(
                run("plan", "--chip", "mi355x", "--nodes", 4, "--tensor-parallel", width, *load, "-o", "json")[1]
            )["speed"]["throughput"]["value"]
            for width in (1, 2, 4)
        )
    )
