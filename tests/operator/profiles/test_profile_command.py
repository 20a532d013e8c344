"""`kimictl profile` as a user runs it: lists, figures with their sources, and drafts from nodes of many kinds."""

from __future__ import annotations

import io
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kimi_operator.api import HardwareProfile, parse
from kimi_operator.cli import main
from kimi_operator.errors import InvalidSpec
from kimi_operator.profiles import built_in_profiles
from kimi_operator.profiles.detect import Match, detect, misfit
from kimi_operator.profiles.draft import draft, read_node
from node_labels import labelled, node, older_labels

Run = Callable[..., tuple[int, str, str]]
WHOLE = labelled("74a1", "192G", 304, "spx_nps1")
CPX = labelled("74a1", "24G", 38, "cpx_nps4")
MEASURED_RESERVE = {"contexts": "2Gi", "activations": "4Gi"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line of `kimictl profile`: exit status, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["profile", *(str(argument) for argument in arguments)])
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call


def saved(tmp_path: Path, document: dict[str, Any], name: str = "node.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(document) if name.endswith(".json") else yaml.safe_dump(document))
    return path


def drafted(run: Run, tmp_path: Path, document: dict[str, Any], *arguments: object) -> tuple[str, dict[str, Any]]:
    """The text of a draft, and the document in it."""
    status, out, _ = run("from-node", saved(tmp_path, document), *arguments)
    assert status == 0
    return out, yaml.safe_load(out)


# list and show


def test_list_names_chips_and_what_nobody_measured(run: Run) -> None:
    status, out, err = run("list")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert (status, err) == (0, "")
    assert list(lines) == ["NAME", *built_in_profiles()]
    assert (
        "gfx942  spx_nps1   8     192.0 GiB  304  5.3       Target    16 figures  74a1,74a9,74b5,74bd"
        in lines["mi300x"]
    )
    assert "Untested" in lines["mi355x"]


@pytest.mark.parametrize(("output", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_list_and_show_for_scripts(run: Run, output: str, load: Callable[[str], Any]) -> None:
    rows = load(run("list", "-o", output)[1])
    assert [row["name"] for row in rows] == list(built_in_profiles())
    assert "reserve.activations" in rows[0]["unmeasured"]
    shown = load(run("show", "mi308x", "-o", output)[1])
    assert parse(HardwareProfile, shown) == built_in_profiles()["mi308x"]


def test_show_marks_what_nobody_measured(run: Run) -> None:
    out = run("show", "mi355x")[1]
    rows = {line[2:].split()[0]: line for line in out.splitlines() if line[:2] in ("* ", "  ") and "." in line}
    assert rows["gpu.hbmBytesPerSecond"].startswith("  gpu.hbm")
    assert "8,000,000,000,000  DataSheet  peak, 8 TB/s" in rows["gpu.hbmBytesPerSecond"]
    assert rows["reserve.contexts"].startswith("* reserve.contexts")
    assert "11.2 GiB  Carried    as derived for MI300X (not measured on this hardware)" in rows["reserve.contexts"]
    assert "warning: the bundled worker is untested on mi355x (gfx950)" in out


def markdown_rows(text: str) -> list[list[str]]:
    """Cells of the text's one table, without its line of dashes."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[re.sub(r"\\(.)", r"\1", cell).strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_a_list_as_markdown_has_the_cells_of_the_text(run: Run) -> None:
    head, *rows = markdown_rows(run("list", "-o", "markdown")[1])
    lines = [re.split(r"  +", line) for line in run("list")[1].splitlines()]
    assert [head, *rows] == lines
    assert [row[0] for row in rows] == list(built_in_profiles())


@pytest.mark.parametrize("name", ["mi300x", "mi355x"])
def test_a_profile_as_markdown_says_what_the_text_does(run: Run, name: str) -> None:
    _, *rows = markdown_rows(out := run("show", name, "-o", "markdown")[1])
    lines = run("show", name)[1].splitlines()
    figures = [re.split(r"  +", line[2:]) for line in lines if re.match(r"[* ] [a-z]+\.", line)]
    assert [row[1:] for row in rows] == figures
    assert [row[0] for row in rows] == [line[0].strip() for line in lines if re.match(r"[* ] [a-z]+\.", line)]
    plain = re.sub(r"\\(.)", r"\1", out)
    notes = [line for line in lines if re.match(r"  (works|lacks)  ", line)]
    assert len(notes) == len(re.findall("^- ", plain, re.MULTILINE)) > 0
    for line in notes:
        kind, note = line.split(maxsplit=1)
        assert f"- {kind}: {note}" in plain
    for line in lines:
        if line.startswith(("device ids", "bundled worker", "warning: ")) or "were not measured" in line:
            assert line in plain


def test_show_reads_your_own(run: Run, tmp_path: Path) -> None:
    own = yaml.safe_load(run("show", "mi300x", "-o", "yaml")[1])
    own["metadata"]["name"] = "site"
    own["spec"]["basis"] = {}
    path = saved(tmp_path, own, "own.yaml")
    status, out, _ = run("show", "site", "-f", path)
    assert status == 0
    assert "31 of 31 figures" in out
    assert "site" in run("list", "-f", path)[1]


def test_an_unknown_name_lists_the_known(run: Run) -> None:
    status, out, err = run("show", "mi400")
    assert (status, out) == (2, "")
    assert err.startswith("kimictl: profile: got 'mi400', expected one of ['mi300x', 'mi308x',")


def test_a_contradictory_file_is_refused(run: Run, tmp_path: Path) -> None:
    own = yaml.safe_load(run("show", "mi300x", "-o", "yaml")[1])
    own["spec"]["gpu"]["memory"] = "256Gi"
    status, _, err = run("list", "-f", saved(tmp_path, own, "own.yaml"))
    assert status == 2
    assert "spec.gpu.memory: got 256.00 GiB, expected at most match.vram 192.00 GiB" in err


# drafts


def test_a_whole_card_gets_its_chips_profile(run: Run, tmp_path: Path) -> None:
    status, out, err = run("from-node", saved(tmp_path, node(WHOLE, gpus=7)), "--name", "site-a")
    assert status == 0
    assert err == (
        "kimictl: profile mi300x matches the GPUs, but plans with 8 a node where this one has 7; use the draft on "
        "standard output, or set gpusPerNode to 7 in both roles\n"
    )
    assert "# Profile mi300x matches its GPUs but has 8 a node, this draft 7; with two that match, name one" in out
    assert "as it is" not in out
    profile = parse(HardwareProfile, yaml.safe_load(out))
    known = built_in_profiles()["mi300x"].spec
    assert profile.metadata.name == "site-a"
    assert profile.spec.gpu.per_node == 7
    assert profile.spec.source("gpu.perNode") == "node gpu-1"
    assert profile.spec.basis["gpu.perNode"] == "Reported"
    assert profile.spec.reserve == known.reserve
    assert profile.spec.gpu.memory == known.gpu.memory
    assert "not measured;" not in out


def test_a_node_of_as_many_gpus_is_matched_as_it_is(run: Run, tmp_path: Path) -> None:
    status, out, err = run("from-node", saved(tmp_path, node(WHOLE)))
    assert (status, err) == (0, "kimictl: profile mi300x matches\n")
    assert "# Profile mi300x matches it as it is; " in out
    assert "No label" not in out


@pytest.mark.parametrize("labels", [labelled("74a1", None, 304, "spx_nps1"), labelled("74a1", None, 38, "cpx_nps4")])
def test_memory_that_no_label_tells_says_where_it_is_from(run: Run, tmp_path: Path, labels: dict[str, str]) -> None:
    out, document = drafted(run, tmp_path, node(labels))
    document["spec"].setdefault("reserve", MEASURED_RESERVE)
    told = "# No label amd.com/gpu.vram of node gpu-1: match.vram and gpu.memory follow from profile mi300x; "
    assert sum(line.startswith(told) for line in out.splitlines()) == 1
    profile = parse(HardwareProfile, document)
    assert "mi300x" in profile.spec.source("match.vram")


def test_a_virtual_function_carries_memory_over(run: Run, tmp_path: Path) -> None:
    _, document = drafted(run, tmp_path, node(labelled("74b5", "192G", 304)))
    profile = parse(HardwareProfile, document)
    assert "gpu.memory" in profile.spec.unmeasured()
    assert "without virtualisation" in profile.spec.source("gpu.memory")


@pytest.mark.parametrize(
    ("labels", "gpus", "name", "expected"),
    [
        (CPX, 64, "mi300x-cpx-nps4", ("24574Mi", 38, 662_500_000_000)),
        # AMD's DRA driver shows 98,296 MiB and 152 compute units of this.
        (labelled("74a1", "96G", 152, "dpx_nps1"), 16, "mi300x-dpx-nps1", ("98296Mi", 152, 2_650_000_000_000)),
        (labelled("75a3", "144G", 128, "dpx_nps2"), 16, "mi355x-dpx-nps2", ("144Gi", 128, 4_000_000_000_000)),
    ],
)
def test_a_partition_is_drafted_as_what_it_is(  # noqa: PLR0917 - fixtures and parameters
    run: Run, tmp_path: Path, labels: dict[str, str], gpus: int, name: str, expected: tuple[str, int, int]
) -> None:
    text, document = drafted(run, tmp_path, node(labels, gpus))
    gpu = document["spec"]["gpu"]
    assert (document["metadata"]["name"], gpu["perNode"]) == (name, gpus)
    assert (gpu["memory"], gpu["computeUnits"], gpu["hbmBytesPerSecond"]) == expected
    assert "reserve" not in document["spec"]
    assert "  #   contexts: not measured; " in text
    with pytest.raises(InvalidSpec, match=r"spec\.reserve: got nothing, expected a value; set it"):
        parse(HardwareProfile, document)


@pytest.mark.parametrize(
    ("labels", "units", "tflops", "bandwidth"),
    [
        (labelled("74b5", "128G", 304), "304 of 304", 1307.4, ("128 of 192 GiB", 2 / 3)),
        (labelled("74b5", "128G", 152), "152 of 304", 653.7, ("152 of 304 compute units", 1 / 2)),
        (labelled("74b5", "96G", 228), "228 of 304", 980.55, ("96 of 192 GiB", 1 / 2)),
        (labelled("74a1", "96G", None, "dpx_nps1"), "152 of 304", 653.7, ("96 of 192 GiB", 1 / 2)),
    ],
)
def test_flops_of_a_part_go_with_its_compute_units(  # noqa: PLR0917 - fixtures and parameters
    run: Run, tmp_path: Path, labels: dict[str, str], units: str, tflops: float, bandwidth: tuple[str, float]
) -> None:
    _, document = drafted(run, tmp_path, node(labels, 8))
    gpu, sources = document["spec"]["gpu"], document["spec"]["sources"]
    assert f"{gpu['computeUnits']} of {gpu['card']['computeUnits']}" == units
    assert gpu["bf16FlopsPerSecond"] == pytest.approx(tflops * 1e12)
    assert sources["gpu.bf16FlopsPerSecond"] == f"share of mi300x, {units} compute units"
    why, share = bandwidth
    assert gpu["hbmBytesPerSecond"] == pytest.approx(5.3e12 * share)
    assert sources["gpu.hbmBytesPerSecond"] == f"share of mi300x, {why}"


@pytest.mark.parametrize("device", ["74b5", "74a1"])
def test_a_part_whose_compute_units_nobody_counted_leaves_flops_open(run: Run, tmp_path: Path, device: str) -> None:
    """Two thirds of the memory may come with all of them, or with two thirds."""
    text, document = drafted(run, tmp_path, node(labelled(device, "128G")))
    spec = document["spec"]
    assert "with 128 of 192 GiB and an unknown number of compute units of a card (mi300x)" in text
    assert spec["gpu"]["hbmBytesPerSecond"] == pytest.approx(5.3e12 * 2 / 3)
    for field in ("computeUnits", "bf16FlopsPerSecond"):
        assert field not in spec["gpu"]
        assert f"gpu.{field}" not in spec["sources"] | spec["basis"]
        assert f"    # {field}: not measured; " in text


@pytest.mark.parametrize(
    ("labels", "gpus"),
    [
        (CPX, 64),
        (labelled("74b5", "128G"), 8),
        (labelled("74a1", "192G", 38, "cpx_nps4"), 64),
        (labelled("74b5", "24G", 38), 64),
        (older_labels("74a1", "192G", 38, 64), 64),
        (older_labels("74a2", "192G", 10, 64), 64),
    ],
)
def test_a_draft_that_is_filled_in_matches_its_node(
    run: Run, tmp_path: Path, labels: dict[str, str], gpus: int
) -> None:
    _, document = drafted(run, tmp_path, node(labels, gpus))
    document["spec"]["reserve"] = MEASURED_RESERVE
    profile = parse(HardwareProfile, document)
    assert profile.spec.basis_of("reserve.contexts") is None
    profiles = {**built_in_profiles(), profile.metadata.name: profile}
    verdict = detect("gpu-1", labels, profiles)
    assert isinstance(verdict, Match), str(verdict)
    assert verdict.profile == profile.metadata.name
    carried = {path for path, basis in profile.spec.basis.items() if basis == "Carried"}
    assert "limits.maxNumSeqs" in carried
    assert not {path for path, basis in profile.spec.basis.items() if basis == "Measured"}


def test_an_unknown_chip_is_left_open(run: Run, tmp_path: Path) -> None:
    status, out, err = run("from-node", saved(tmp_path, node(labelled("74e1", "64G", 80))))
    spec = yaml.safe_load(out)["spec"]
    assert status == 0
    assert "got 74e1, expected a device id in match.deviceIds" in err
    assert '- "74e1"' in out, "other parsers of YAML would read a number"
    assert spec["gpu"] == {"resource": "amd.com/gpu", "perNode": 8, "computeUnits": 80}
    for field in ("architecture", "memory", "hbmBytesPerSecond", "card"):
        assert f"    # {field}: not measured; " in out
    assert set(spec["basis"].values()) == {"Reported"}
    with pytest.raises(InvalidSpec) as error:
        parse(HardwareProfile, yaml.safe_load(out))
    assert [problem.field for problem in error.value.problems] == [
        "spec.gpu.architecture",
        "spec.gpu.memory",
        "spec.reserve",
    ]


def test_older_labels_and_mixed_resource_names_are_read(run: Run, tmp_path: Path) -> None:
    _, document = drafted(run, tmp_path, node(older_labels("74a1", "192G", 304, 8)))
    assert document["spec"]["gpu"]["perNode"] == 8
    _, document = drafted(run, tmp_path, node(CPX, 64, "amd.com/cpx_nps4"))
    assert document["spec"]["gpu"]["resource"] == "amd.com/cpx_nps4"
    _, document = drafted(run, tmp_path, node(WHOLE, 8, "amd.com/spx_nps1"))
    assert document["spec"]["gpu"]["resource"] == "amd.com/spx_nps1"


def test_yaml_lists_and_standard_input_are_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = {"apiVersion": "v1", "kind": "List", "items": [node(WHOLE)]}
    assert run("from-node", saved(tmp_path, listing, "node.yaml"))[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(node(WHOLE))))
    assert run("from-node", "-")[0] == 0


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (node({}), "label amd.com/gpu.device-id of node gpu-1: got nothing"),
        (node(WHOLE, 0), "status.capacity of node gpu-1: got amd.com/gpu, cpu, memory, expected a number of"),
        (node(WHOLE, 8, "nvidia.com/gpu"), "check that AMD's device plugin runs"),
        (node(WHOLE, name="Bad Name"), "metadata.name: got 'Bad Name'"),
        ({"kind": "Pod", "metadata": {"name": "p"}}, "kind: got 'Pod', expected a Node"),
        ({"kind": "Node"}, "metadata.name: got ''"),
        ({"kind": "List", "items": []}, "got 0 documents, expected one Node"),
        ({"kind": "List", "items": [node(WHOLE), node(CPX)]}, "got 2 documents"),
        ({"kind": "List", "items": 3}, "kind: got 'List', expected a Node"),
        ({"kind": "Node", "metadata": {"name": "n", "labels": []}, "status": {}}, "metadata.labels: got []"),
        ({"kind": "Node", "metadata": [WHOLE]}, "metadata: got [{'amd.com/gpu.device-id': '74a1',"),
        ({"kind": "Node", "metadata": "gpu-1"}, "metadata: got 'gpu-1', expected a table"),
        (node(WHOLE) | {"status": [8]}, "status: got [8], expected a table"),
        (node(WHOLE) | {"status": None}, "status: got None, expected a table"),
        (node(WHOLE) | {"status": {"capacity": [8]}}, "status.capacity: got [8], expected a table"),
        (node(WHOLE) | {"status": {"capacity": {"amd.com/gpu": [8]}}}, "status.capacity.amd.com/gpu: got [8]"),
        (node({"amd.com/gpu.device-id": ["74a1"]}), "metadata.labels.amd.com/gpu.device-id: got ['74a1'], expected a"),
        ({"kind": ["Node"] * 100, "metadata": {}}, "..., expected a Node"),
    ],
)  # fmt: skip
def test_what_is_no_gpu_node_is_refused(run: Run, tmp_path: Path, document: dict[str, Any], words: str) -> None:
    status, out, err = run("from-node", saved(tmp_path, document))
    assert (status, out) == (2, "")
    assert words in err


@pytest.mark.parametrize("amount", [65, 10**30, "9" * 5000, -1, "8.0", "8k", "\u0668", "eight", 8.5, True, "0x8"])
def test_a_number_of_gpus_that_no_profile_takes_is_refused(run: Run, tmp_path: Path, amount: object) -> None:
    document = node(WHOLE)
    document["status"]["capacity"]["amd.com/gpu"] = amount
    status, out, err = run("from-node", saved(tmp_path, document))
    assert (status, out) == (2, "")
    assert "status.capacity.amd.com/gpu of node gpu-1: got " in err
    assert "expected a number of GPUs from 1 to 64" in err
    assert len(err) < 400


@pytest.mark.parametrize(
    "mend",
    [
        lambda document: document.update(kind="Pod"),
        lambda document: document["metadata"].update(labels=3),
        lambda document: document["status"].update(capacity=[]),
        lambda document: document["status"]["capacity"].update({"amd.com/gpu": "x"}),
        lambda document: document["metadata"]["labels"].update({"amd.com/gpu.vram": "x"}),
    ],
)
def test_what_is_wrong_with_a_node_is_named_by_its_file(
    run: Run, tmp_path: Path, mend: Callable[[dict[str, Any]], None]
) -> None:
    document = node(dict(WHOLE))
    mend(document)
    path = saved(tmp_path, document)
    status, out, err = run("from-node", path)
    assert (status, out) == (2, "")
    assert all(line.startswith(f"kimictl: {path}: ") for line in err.splitlines())


@pytest.mark.parametrize("name", ["MI300X", "Mi325x", "mI355X"])
def test_a_profile_is_known_in_capitals_too(run: Run, name: str) -> None:
    assert run("show", name) == run("show", name.lower())
    assert run("show", name)[0] == 0


def test_a_number_that_has_no_decimal_digits_in_python_is_refused(run: Run, tmp_path: Path) -> None:
    path = saved(tmp_path, node(WHOLE), "node.yaml")
    path.write_text(path.read_text().replace("amd.com/gpu: '8'", f"amd.com/gpu: 0x{'f' * 5000}"))
    status, out, err = run("from-node", path)
    assert (status, out) == (2, "")
    assert err.startswith(f"kimictl: {path}: status.capacity.amd.com/gpu: got a whole number of about 6,021 digits")


@pytest.mark.parametrize(
    ("label", "value"),
    [("vram", "9" * 400 + "G"), ("vram", f"{2**30 + 1}G"), ("vram", "9" * 5000), ("cu-count", "9" * 5000),
     ("cu-count", "4097"), ("device-id", "7" * 400), ("compute-memory-partition", "spx_" * 400)],
)  # fmt: skip
@pytest.mark.parametrize("device", ["74a1", "7777"])
def test_a_label_that_no_profile_takes_is_refused_in_a_line(
    run: Run, tmp_path: Path, label: str, value: str, device: str
) -> None:
    labels = labelled(device) | {f"amd.com/gpu.{label}": value}
    status, out, err = run("from-node", saved(tmp_path, node(labels)))
    assert (status, out) == (2, "")
    assert f"label amd.com/gpu.{label} of node gpu-1: got '" in err
    assert len(err) < 400


def test_nobody_is_told_to_run_what_was_just_run(run: Run, tmp_path: Path) -> None:
    """The same problem, told by the operator, does name the command."""
    virtual = labelled("74b5", "96G", 152)
    for labels in (labelled("7777", "64G", 80), CPX, virtual, labelled("74a1", "191G", 304, "spx_nps1")):
        status, out, err = run("from-node", saved(tmp_path, node(labels)))
        assert (status, bool(out)) == (0, True)
        assert "from-node" not in err
        assert "the draft on standard output is one" in err
        refused = detect("gpu-1", labels, built_in_profiles())
        assert "`kimictl profile from-node gpu-1` drafts it" in str(refused)


def test_more_or_fewer_gpus_than_whole_cards_make_are_refused(run: Run, tmp_path: Path) -> None:
    status, out, err = run("from-node", saved(tmp_path, node(CPX, 9)))
    assert (status, out) == (2, "")
    assert "status.capacity of node gpu-1: got 9 amd.com/gpu, expected a multiple of 8: each is a GPU with 24 of" in err
    assert "restart AMD's node labeller and device plugin on the node" in err


def test_a_partition_that_no_label_names_is_told_by_its_count(run: Run, tmp_path: Path) -> None:
    text, document = drafted(run, tmp_path, node(older_labels("74a1", "192G", 152, 16), 16))
    assert document["metadata"]["name"] == "mi300x-dpx-nps1"
    assert document["spec"]["gpu"]["partition"] == {"compute": "DPX", "memory": "NPS1"}
    assert "# No label names their partition: dpx_nps1 makes so many; check gpu.partition." in text


@pytest.mark.parametrize(("text", "words"), [("{", "no YAML or JSON"), ("- 1\n", "got list"), ("", "got 0 documents")])
def test_what_is_no_document_is_refused(run: Run, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(text)
    status, _, err = run("from-node", path)
    assert status == 2
    assert words in err
    assert str(path) in err


def test_a_bad_name_and_a_missing_file_are_refused(run: Run, tmp_path: Path) -> None:
    status, _, err = run("from-node", saved(tmp_path, node(WHOLE)), "--name", "My Profile")
    assert status == 2
    assert "--name: got 'My Profile'" in err
    for missing in (tmp_path / "nowhere.json", tmp_path / "nowhere"):
        status, _, err = run("from-node", missing)
        assert status == 2
        assert "No such file" in err


def test_a_folder_is_not_asked_of_kubectl(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nodes").mkdir()
    monkeypatch.chdir(tmp_path)
    status, _, err = run("from-node", "nodes")
    assert status == 2
    assert "nodes: got Is a directory, expected a readable file" in err


@pytest.mark.parametrize(
    ("labels", "gpus", "told"),
    [
        (labelled("75a3"), 64, (8, "they may be 8 cards in CPX, as `amd-smi static --partition` would show; restart")),
        (labelled("75a3", "288G"), 64, (8, "they may be 8 cards in CPX, as")),
        (labelled("75a3", "288G", 256, "spx_nps1"), 16, (8, "they may be 8 cards in DPX, as")),
        (labelled("74a2", "192G"), 32, (8, "they may be 8 cards in CPX, as")),
        (labelled("74a1", "192G", 304), 12, (8, "restart AMD's node labeller and device plugin")),
        (labelled("74a1", "96G", 152, "dpx_nps1"), 32, (16, "they may be 8 cards in QPX, as")),
        (labelled("74b5", "192G", 304), 9, (8, "restart AMD's node labeller and device plugin")),
    ],
)
def test_more_gpus_than_a_nodes_cards_make_are_refused(
    run: Run, tmp_path: Path, labels: dict[str, str], gpus: int, told: tuple[int, str]
) -> None:
    """Each would be given all of a card that it is a part of."""
    most, suspected = told
    status, out, err = run("from-node", saved(tmp_path, node(labels, gpus)))
    assert (status, out) == (2, "")
    assert (
        f"status.capacity of node gpu-1: got {gpus} amd.com/gpu, expected at most {most} of a node's 8 cards: " in err
    )
    assert f"; {suspected}" in err
    # a node of more cards is known by a profile that says so
    own = yaml.safe_load(run("show", "mi300x", "-o", "yaml")[1])
    own["metadata"]["name"] = "large"
    own["spec"]["match"]["deviceIds"], own["spec"]["match"]["virtualDeviceIds"] = ["74a1", "75a3", "74a2", "74b5"], []
    own["spec"]["gpu"]["perNode"] = 64
    assert run("from-node", saved(tmp_path, node(labels, gpus)), "-f", saved(tmp_path, own, "own.yaml"))[0] == 0


def test_more_gpus_than_a_profile_has_are_no_fewer_of_them(run: Run, tmp_path: Path) -> None:
    own = yaml.safe_load(run("show", "mi300x", "-o", "yaml")[1])
    own["metadata"]["name"], own["spec"]["gpu"]["perNode"] = "large", 16
    own["spec"]["match"] |= {"deviceIds": ["0001"], "virtualDeviceIds": []}
    file = saved(tmp_path, own, "own.yaml")
    small = run("from-node", saved(tmp_path, node(labelled("0001", "192G", 304, "spx_nps1"), 12)), "-f", file)
    assert "or set gpusPerNode to 12 in both roles" in small[2]


DEVICES = st.sampled_from(["74a1", "74b5", "74a2", "74b6", "75a3", "7777", "0000"])
PARTITIONS = st.sampled_from(["spx_nps1", "dpx_nps1", "dpx_nps2", "tpx_nps1", "qpx_nps1", "cpx_nps4", "cpx_nps1", None])
SIZES = st.sampled_from(["1G", "23G", "24G", "48G", "96G", "144G", "192G", "193G", "256G", "288G", None])
UNITS = st.sampled_from([1, 10, 20, 38, 76, 80, 101, 128, 152, 256, 300, 304, None])


@settings(max_examples=200)
@given(DEVICES, SIZES, UNITS, PARTITIONS, st.sampled_from([1, 8, 63, 64]))
@example("74a2", "24G", 128, None, 64).via("more compute units than the card has, and no partition")
@example("74b6", "192G", 304, None, 64).via("the same of a virtual function")
@example("74a2", "256G", 80, None, 64).via("more memory than the card has")
@example("74a2", "256G", 20, "cpx_nps1", 64).via("the same with a partition")
@example("74a2", "193G", None, None, 64).via("a little more, which no rounding explains")
@example("74a1", "192G", 76, None, 64).via("a partition that only its compute units tell")
@example("74a2", "24G", 10, None, 64).via("the same of more dies than the card is said to have")
@example("75a3", "96G", None, None, 63).via("a partition that only its memory tells")
@example("74a1", "24G", 38, "cpx_nps4", 1).via("fewer GPUs than a card is split into")
@example("74a1", None, 1, "cpx_nps1", 64).via("more dies than a card can have")
@example("74b5", "192G", 1, None, 8).via("so small a part that its bandwidth is none of a GPU")
def test_every_draft_says_only_what_is_known(
    device: str, vram: str | None, units: int | None, partition: str | None, gpus: int
) -> None:
    """A draft is a profile that its node has, or what it lacks stands in it as not measured."""
    labels = labelled(device, vram, units, partition)
    facts = read_node(node(labels, gpus))
    try:
        text = draft(facts, built_in_profiles())
    except InvalidSpec as error:
        (problem,) = error.problems
        assert problem.field.startswith(
            "label amd.com/gpu." if "GPUs only" not in problem.remedy else "status.capacity"
        )
        assert "restart AMD's node labeller" in problem.remedy
        return
    document = yaml.load(text, yaml.CSafeLoader)
    spec = document["spec"]
    assert (spec["gpu"]["perNode"], spec["basis"]["gpu.perNode"]) == (gpus, "Reported")
    for field in ("contexts", "activations"):
        assert ("reserve" in spec) != (f"{field}: not measured" in text)
    spec.setdefault("reserve", {"contexts": "1Mi", "activations": "1Mi"})
    open_fields = [field for field in ("architecture", "memory") if field not in spec["gpu"]]
    assert all(f"# {field}: not measured" in text for field in open_fields)
    if not open_fields:
        profile = parse(HardwareProfile, document)
        assert misfit("gpu-1", labels, profile, {**built_in_profiles(), profile.metadata.name: profile}) is None


TEXTS = st.text(max_size=8) | st.integers(-1, 10**40).map(str) | st.integers(0, 10**20).map("{}G".format)


@settings(max_examples=300)
@given(st.sampled_from(["74a1", "74b5", "75a3", "7777"]), TEXTS, TEXTS, TEXTS)
@example("7777", "192G", "304", str(10**30)).via("capacity of another dimension")
@example("7777", "9" * 400 + "G", "304", "8").via("memory of another dimension")
@example("7777", "1073741824G", "4096", "64").via("the most that a profile takes")
def test_no_label_or_capacity_whatever_is_drafted_into_what_no_profile_takes(
    device: str, vram: str, units: str, gpus: str
) -> None:
    labels = labelled(device) | {"amd.com/gpu.vram": vram, "amd.com/gpu.cu-count": units}
    document = node(labels)
    document["status"]["capacity"]["amd.com/gpu"] = gpus
    try:
        text = draft(read_node(document), built_in_profiles())
    except InvalidSpec:
        return
    drafted_one = yaml.load(text, yaml.CSafeLoader)
    spec = drafted_one["spec"]
    spec["gpu"] = {"architecture": "gfx942", "memory": "1Gi"} | spec["gpu"]
    spec.setdefault("reserve", {"contexts": "1Mi", "activations": "1Mi"})
    parse(HardwareProfile, drafted_one)


def test_dies_that_a_partitioned_node_counts_are_the_cards(tmp_path: Path, run: Run) -> None:
    """The number of dies of some chips is hearsay; in CPX the compute units of one are not."""
    labels = labelled("75a3", "144G", 128, "cpx_nps2")
    status, out, _ = run("from-node", saved(tmp_path, node(labels, gpus=16)))
    assert status == 0
    spec = yaml.safe_load(out)["spec"]
    assert spec["gpu"]["card"]["computeDies"] == 2
    assert spec["sources"]["gpu.card.computeDies"] == "node gpu-1"
    reserve = {"contexts": "1Gi", "activations": "1Gi"}
    document = yaml.safe_load(out) | {"spec": spec | {"reserve": reserve}}
    assert parse(HardwareProfile, document).spec.gpu.memory == 144 * 2**30


# kubectl


def script(tmp_path: Path, text: str) -> Path:
    """A folder with a kubectl that is this shell script."""
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def test_a_node_of_the_cluster_is_asked_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = saved(tmp_path, node(WHOLE), "answer")
    answer.write_text(json.dumps(node(WHOLE)))
    folder = script(tmp_path, f'[ "$*" = "get node -o json -- gpu-1" ] && cat {answer}')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("from-node", "gpu-1")
    assert status == 0
    assert yaml.safe_load(out)["metadata"]["name"] == "mi300x-site"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo 'E1 retrying' >&2; echo 'Error from server (NotFound): nodes \"gpu-9\" not found' >&2; exit 1",
         'node gpu-9: got from kubectl: Error from server (NotFound): nodes "gpu-9" not found, expected a node'),
        ("exit 3", "got from kubectl: exit status 3"),
        ("echo nonsense", "no JSON from kubectl"),
    ],
)  # fmt: skip
def test_what_kubectl_says_is_passed_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setenv("PATH", f"{script(tmp_path, text)}{os.pathsep}{os.environ['PATH']}")
    status, out, err = run("from-node", "gpu-9")
    assert (status, out) == (2, "")
    assert words in err
    assert "retrying" not in err


def test_a_kubectl_that_hangs_is_given_up(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{script(tmp_path, 'exec sleep 60')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("kimi_operator.cli.profile.KUBECTL_TIMEOUT_S", 0.2)
    status, _, err = run("from-node", "gpu-1")
    assert status == 1
    assert "check that the API server answers" in err


def test_without_kubectl_a_file_is_asked_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = run("from-node", "gpu-1")
    assert status == 2
    assert "gpu-1: got no kubectl on PATH" in err
    assert "pass the output of `kubectl get node NODE -o json` as a file" in err
