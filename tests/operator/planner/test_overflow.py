"""Refusals of a memory that is too small: all name the same line, by how much it is too large, and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kimi_operator.admission import judge, read_request
from kimi_operator.cli import main
from kimi_operator.desire import Profiles
from kimi_operator.planner.memory import GroupShape, MemoryLine
from kimi_operator.planner.overflow import Overflow, find_overflow, nearest_text
from kimi_operator.profiles import built_in_profiles

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
LINES = (
    MemoryLine("routed experts", 90, "", is_weights=True),
    MemoryLine("contexts", 20, ""),
    MemoryLine("heap", 7, ""),
)


@given(memory=st.integers(0, 200), sizes=st.lists(st.integers(0, 60), max_size=6))
def test_the_first_line_beyond_the_memory_is_found_and_no_other(memory: int, sizes: list[int]) -> None:
    lines = [MemoryLine(str(i), size, "") for i, size in enumerate(sizes)]
    overflow = find_overflow(memory, iter(lines))
    assert (overflow is None) == (sum(sizes) <= memory)
    if overflow is None:
        return
    before = sizes[: int(overflow.line.label)]
    assert sum(before) <= memory < sum(before) + overflow.line.bytes
    assert (overflow.left, overflow.missing) == (memory - sum(before), sum(sizes) - memory)


@pytest.mark.parametrize(
    ("memory", "label", "left", "missing"),
    [(80, "routed experts", 80, 37), (109, "contexts", 19, 8), (110, "heap", 0, 7)],
)
def test_the_line_is_named_with_what_is_left_for_it_and_with_what_is_missing_in_all(
    memory: int, label: str, left: int, missing: int
) -> None:
    line = next(line for line in LINES if line.label == label)
    assert find_overflow(memory, LINES) == Overflow(memory, line, left, missing)
    assert str(find_overflow(memory, LINES)) == (
        f"at most {memory} B, the memory of a GPU: the line '{label}' of {line.bytes} B does not fit into the {left} B "
        f"that are left, and {missing} B are missing in all"
    )
    assert find_overflow(117, LINES) is None


def test_the_way_out_is_the_nearest_layout_or_other_hardware() -> None:
    assert nearest_text(GroupShape(2, 8, 2)) == "use the nearest layout that fits: 2 x 8 GPUs with tensorParallel 2"
    assert "use GPUs with more memory, or lower the profile's reserves" in nearest_text(None)


def test_plan_search_and_admission_refuse_in_the_same_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    for role in ("prefill", "decode"):
        document["spec"][role]["tensorParallel"] = 1
    manifest = tmp_path / "tp1.yaml"
    manifest.write_text(yaml.safe_dump(document))
    told = [answer(capsys, "-f", str(manifest)), answer(capsys, "--chip", "mi300x", "--search", "2")]
    kind = {"group": "kimi-operator.io", "version": "v1alpha1", "kind": "KimiDeployment"}
    request = {"uid": "1", "operation": "CREATE", "kind": kind, "object": document}
    asked = read_request({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request})
    told.append(judge(asked, Profiles({"mi300x": built_in_profiles()["mi300x"]}, {}), ()).message)
    for text in told:
        words = " ".join(text.split())
        assert "at most 192.0 GiB, the memory of a GPU: the line 'contexts' of 11.2 GiB does not fit into" in words
        assert "the 998.4 MiB that are left, and" in words
        assert "use the nearest layout that fits: 2 x 8 GPUs with tensorParallel 2" in words


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(["plan", *arguments])
    return capsys.readouterr().out
