"""Each line of a GPU's memory: what it counts, where it comes from, and what it says of the bundled worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kimi_operator.api import HardwareProfile
from kimi_operator.api.profile import DType, ReserveSpec
from kimi_operator.planner.memory import ExpertFormat, GroupShape, MemoryLine, reserve_lines, weight_lines
from kimi_operator.profiles import architecture, built_in_profiles

REPOSITORY = Path(__file__).resolve().parents[3]
K3 = architecture("kimi-k3")
EP16_TP2 = GroupShape(nodes=2, gpus_per_node=8, tensor_parallel=2)


def lines_of(**changes: Any) -> dict[str, MemoryLine]:
    """Reserves of the MI300X with some fields of its reserve changed, and of its sources where told."""
    sources = changes.pop("sources", None)
    spec = built_in_profiles()["mi300x"].spec
    update: dict[str, Any] = {"reserve": spec.reserve.model_copy(update=changes)}
    if sources is not None:
        update["sources"] = sources
    return {line.label: line for line in reserve_lines(spec.model_copy(update=update))}


@pytest.mark.parametrize(
    ("experts", "bits", "one"),
    [
        (ExpertFormat.MXFP4, 4.25, 17_547_264),
        (ExpertFormat.INT4, 4.5, 18_579_456),
        (ExpertFormat.BFLOAT16, 16, 66_060_288),
    ],
)
def test_experts_take_their_bits_and_their_share_of_a_scale(experts: ExpertFormat, bits: float, one: int) -> None:
    line = weight_lines(K3, EP16_TP2, experts, DType.BFLOAT16)[0]
    assert experts.bits_per_weight(K3) == bits
    assert one == 3 * 3072 * 3584 * bits / 8
    assert line.bytes == 56 * 92 * one
    assert line.how == f"56 of 896 experts x 92 layers x {one:,} B ({experts}, {bits:g} bits a weight)"


def test_the_remainder_is_told_by_what_it_is() -> None:
    split, whole = weight_lines(K3, EP16_TP2, ExpertFormat.MXFP4, DType.BFLOAT16)[1:]
    assert split.how.startswith(
        "102,011,381,632 B / tensorParallel 2: KDA attention 56.9 GiB + shared experts 22.6 GiB"
    )
    assert split.bytes == 102_011_381_632 // 2
    assert whole.how.startswith("latent projections and norm 9,454,620,672 B + routers 2,363,820,032 B + MLA")
    amounts = re.findall(r"([\d,]+) B", whole.how)
    assert whole.bytes == sum(int(amount.replace(",", "")) for amount in amounts)


def test_every_reserve_is_a_line_and_none_is_left_out_when_zero() -> None:
    labels = ["contexts", "symmetric heap", "activations", "captured graphs", "handoff staging", "reserve"]
    nothing: Any = dict.fromkeys(("contexts", "symmetric_heap", "activations", "graphs", "staging", "margin"), 0)
    for lines in (lines_of(), lines_of(**nothing, sources={})):
        assert list(lines) == labels
        assert all(line.how for line in lines.values())
    assert lines_of(**nothing, sources={})["captured graphs"].how == "no graphs are captured"


def test_a_line_of_a_reserve_knows_its_field_and_a_pool_has_none() -> None:
    fields = [f"reserve.{field.alias}" for field in ReserveSpec.model_fields.values()]
    assert [line.field for line in lines_of().values()] == fields
    assert not any(line.is_pool for line in lines_of().values())
    assert [line.field for line in lines_of().values() if line.is_margin] == ["reserve.margin"]
    assert MemoryLine("KV pages", 1, "").is_pool


def test_a_figure_without_a_source_is_not_taken_for_measured() -> None:
    assert "take it as not measured" in lines_of(sources={})["contexts"].how
    assert lines_of()["reserve"].how.endswith("(not measured)")
    assert "not measured" not in lines_of()["contexts"].how


def test_lines_say_what_the_worker_leaves_unused() -> None:
    """When the worker learns one of them, this fails: take its words out of the line."""
    source = "\n".join(path.read_text() for path in (REPOSITORY / "worker" / "kimi_worker").rglob("*.py"))
    lines = lines_of()
    for label, made_with in (("symmetric heap", r"shmem"), ("captured graphs", r"cudagraph|cuda\.graph|graphed_call")):
        assert bool(re.search(made_with, source, re.IGNORECASE)) != ("kept free" in lines[label].how), label
    assert "kept free" not in lines_of(graphs=0)["captured graphs"].how


@pytest.mark.parametrize("name", sorted(built_in_profiles()))
def test_built_in_profiles_state_every_reserve(name: str) -> None:
    profile: HardwareProfile = built_in_profiles()[name]
    assert not [line for line in reserve_lines(profile.spec) if "no source" in line.how]
