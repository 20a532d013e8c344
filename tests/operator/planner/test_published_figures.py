"""The planner's sizes against published figures: checkpoint, layout and cache, row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api.profile import DType
from kimi_operator.planner.memory import (
    ExpertFormat,
    GroupShape,
    page_bytes,
    row_bytes,
    slot_bytes,
    weight_lines,
)
from kimi_operator.planner.tensors import Part, Placement, Stored, tensor_table, total_bytes
from kimi_operator.profiles import architecture

GIB, MIB = 2**30, 2**20
SECTIONS = ("checkpoint", "layout_2p2d_ep16_tp2_dp8", "cache")
FIGURES = yaml.safe_load((Path(__file__).parent / "published-figures.yaml").read_text())
K3 = architecture("kimi-k3")
TABLE = tensor_table(K3)
EP16_TP2 = GroupShape(nodes=2, gpus_per_node=8, tensor_parallel=2)


def part(which: Part) -> int:
    return total_bytes(TABLE, which)


def not_experts() -> int:
    return total_bytes(TABLE) - part(Part.ROUTED_EXPERTS)


def expert_gib_per_gpu(form: ExpertFormat) -> float:
    lines = weight_lines(K3, EP16_TP2, form, DType.BFLOAT16)
    return lines[0].bytes / GIB


def published_stack_gib_per_gpu(form: ExpertFormat) -> float:
    """The published stack keeps every tensor as in the files, the vision tower too; unlike the bundled worker."""
    in_files = dict.fromkeys(Placement, 0)
    for tensor in TABLE:
        in_files[tensor.placement] += tensor.bytes
    whole = in_files[Placement.REPLICATED] + in_files[Placement.UNLOADED]
    return expert_gib_per_gpu(form) + (in_files[Placement.TENSOR_PARALLEL] / 2 + whole) / GIB


def parameters() -> int:
    plain = sum(tensor.elements for tensor in TABLE if tensor.stored is not Stored.U8)
    return plain + K3.num_experts * K3.num_moe_layers * K3.expert_weights


def active_parameters() -> int:
    """What one token multiplies with: all but embedding, vision and the experts it is not sent to."""
    skipped = {Part.EMBEDDING, Part.VISION, Part.PROJECTOR, Part.ROUTED_EXPERTS}
    trunk = sum(tensor.elements for tensor in TABLE if tensor.part not in skipped)
    return trunk + K3.experts_per_token * K3.num_moe_layers * K3.expert_weights


COMPUTED: dict[str, Callable[[], float]] = {
    "payload_bytes": lambda: total_bytes(TABLE),
    "payload_gib": lambda: total_bytes(TABLE) / GIB,
    "tensors": lambda: sum(tensor.copies for tensor in TABLE),
    "routed_experts_bytes": lambda: part(Part.ROUTED_EXPERTS),
    "routed_experts_gib": lambda: part(Part.ROUTED_EXPERTS) / GIB,
    "kda_attention_bytes": lambda: part(Part.KDA),
    "mla_attention_bytes": lambda: part(Part.MLA),
    "shared_experts_bytes": lambda: part(Part.SHARED_EXPERTS),
    "latent_projections_bytes": lambda: part(Part.LATENT),
    "embedding_bytes": lambda: part(Part.EMBEDDING),
    "lm_head_bytes": lambda: part(Part.HEAD),
    "dense_layer0_bytes": lambda: part(Part.DENSE),
    "routers_bytes": lambda: part(Part.ROUTER),
    "parameters": parameters,
    "active_parameters_billion": lambda: active_parameters() / 1e9,
    "experts_per_rank": lambda: K3.num_experts // EP16_TP2.ranks,
    "experts_gib_per_gpu_mxfp4": lambda: expert_gib_per_gpu(ExpertFormat.MXFP4),
    "experts_gib_per_gpu_int4": lambda: expert_gib_per_gpu(ExpertFormat.INT4),
    "non_expert_gib_per_gpu_perfect_sharding": lambda: not_experts() / 2 / GIB,
    "weights_gib_per_gpu_draft": lambda: expert_gib_per_gpu(ExpertFormat.MXFP4) + not_experts() / 2 / GIB,
    "weights_gib_per_gpu_measured_int4": lambda: published_stack_gib_per_gpu(ExpertFormat.INT4),
    "free_gib_left_on_one_mi300x_node_after_weights": lambda: 8 * 188 - total_bytes(TABLE) / GIB,
    "mla_bytes_per_token_fp8": lambda: row_bytes(K3, itemsize=1),
    "mla_bytes_per_token_bf16": lambda: page_bytes(K3, 1, DType.BFLOAT16),
    "kda_state_bytes_per_request_tp1": lambda: slot_bytes(K3, 1, DType.BFLOAT16),
    "kda_state_mib_per_rank_tp2": lambda: slot_bytes(K3, 2, DType.BFLOAT16) / MIB,
}

ROWS = {name: row for section in SECTIONS for name, row in FIGURES[section].items() if row["kind"] != "note"}


@pytest.mark.parametrize("name", ROWS)
def test_published_figure_is_met(name: str) -> None:
    row, computed = ROWS[name], COMPUTED[name]()
    assert agrees(row, computed), f"{name}: computed {computed}, published {row['published']} ({row['kind']})"


def agrees(row: dict[str, Any], computed: float) -> bool:
    published = row["published"]
    if row["kind"] == "within":
        return abs(computed - published) <= row["tol"] * published
    decimals = len(str(published).partition(".")[2])
    return published == (computed if isinstance(published, int) else round(computed, decimals))


def test_a_figure_that_is_off_by_one_is_seen() -> None:
    assert not agrees({"published": 13824, "kind": "exact"}, 13825)
    assert not agrees({"published": 84.2, "kind": "exact"}, 84.26)
    assert not agrees({"published": 100.0, "kind": "within", "tol": 0.01}, 101.1)


def test_every_row_has_its_computation_and_the_other_way_round() -> None:
    assert set(COMPUTED) == set(ROWS)
