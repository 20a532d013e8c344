"""`kimictl plan`: what a deployment would run with, and the arithmetic behind it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kimi_operator.api.deployment import Role
from kimi_operator.cli.manifests import read_and_plan
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Infeasible, Plan, RolePlan
from kimi_operator.planner.designs import Designs, compare_designs
from kimi_operator.planner.units import bytes_text
from kimi_operator.profiles import architecture

Output = Literal["text", "json"]
LABEL_WIDTH = 28
DESIGN_WIDTH = 17


def plan(
    *,
    file: Annotated[list[Path] | None, Parameter(name=["--file", "-f"], allow_leading_hyphen=True, negative=())] = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
    check: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Plan a KimiDeployment without a cluster.

    Parameters
    ----------
    file
        YAML with one KimiDeployment, and your own HardwareProfiles if any; `-` is standard input. Can be repeated.
    output
        text or json.
    check
        Compare the planner with published figures of Kimi-K3 instead, row by row; exit 1 when one is missed.
    """
    if check:
        # The comparison loads the predictions and their measurements, which no plan needs.
        from kimi_operator.cli.check import check as check_published  # noqa: PLC0415

        return check_published(output)
    if not file:
        raise InvalidSpec((Problem("--file", "nothing", "a manifest or --check", "name one with -f"),))
    result = read_and_plan(file).plan
    if isinstance(result, Infeasible):
        sys.stdout.write(_json_of(result) if output == "json" else _refusal(result))
        return 1
    sys.stdout.write(_json_of(result) if output == "json" else "\n".join(_text(result)) + "\n")
    return 0


def _json_of(result: Plan | Infeasible) -> str:
    document = {"feasible": isinstance(result, Plan), **dataclasses.asdict(result)}
    if isinstance(result, Plan):
        designs = compare_designs(architecture(result.architecture), result, result.decode)
        document["designs"] = dataclasses.asdict(designs)
    return (
        json.dumps(document, indent=2, default=lambda value: value.value if isinstance(value, Enum) else str(value))
        + "\n"
    )


def _refusal(result: Infeasible) -> str:
    lines = ["does not fit:"]
    for problem in result.problems:
        lines += [
            f"  {problem.field}",
            f"    got       {problem.got}",
            f"    expected  {problem.expected}",
            f"    remedy    {problem.remedy}",
        ]
    return "\n".join(lines) + "\n"


def _text(plan: Plan) -> Iterator[str]:
    yield f"{plan.architecture} on {plan.profile}: {plan.gpus} GPUs, KV rows {plan.kv_cache_dtype}, " + (
        f"experts {plan.experts}, handoff {plan.transport}"
    )
    yield from (f"warning: {warning}" for warning in plan.warnings)
    for role in Role:
        yield ""
        yield from _role_text(plan.role(role))
    yield ""
    yield from _designs_text(compare_designs(architecture(plan.architecture), plan, plan.decode))


def _role_text(role: RolePlan) -> Iterator[str]:
    yield (
        f"{role.role}: a group is {role.ranks} ranks (EP{role.ranks}), {role.lanes} lanes, "
        f"{role.experts_per_rank} experts a rank"
    )
    pool_tokens = role.num_pages * role.page_size_tokens
    limits = {
        "maxNumSeqs a lane": f"{role.max_num_seqs:,}",
        "maxNumBatchedTokens": f"{role.max_num_batched_tokens:,}",
        "maxModelLen": f"{role.max_model_len:,} tokens",
        "KV pages a lane": f"{role.num_pages:,} x {role.page_size_tokens} tokens = {pool_tokens:,}",
        "state slots a lane": f"{role.num_state_slots:,}",
        "binds": role.binds,
    }
    yield from (f"  {label:<{LABEL_WIDTH}} {value}" for label, value in limits.items())
    yield f"  {'memory of a GPU':<{LABEL_WIDTH}} {'bytes':>18}"
    total = sum(line.bytes for line in role.lines)
    yield from (_line_text(line.label, line.bytes, line.how) for line in role.lines)
    yield _line_text("total", total, "")


def _line_text(label: str, amount: int, how: str) -> str:
    return f"    {label:<{LABEL_WIDTH - 2}} {amount:>18,} {bytes_text(amount):>11}  {how}".rstrip()


def _designs_text(designs: Designs) -> Iterator[str]:
    layout = designs.layout
    yield (
        f"{bytes_text(designs.pool_bytes)} of a decode GPU in two designs: requests a lane at once, bytes a request. "
        f"Unified: vLLM's blocks, {designs.num_blocks:,} of {layout.block_tokens:,} tokens = {layout.block_bytes:,} B; "
        f"a request takes {layout.state_groups} for its state"
    )
    heads = ("tokens a request", "planned", "pages and slots", "bytes", "unified blocks", "bytes", "with FP8 rows")
    yield _design_columns(heads)
    for row in designs.rows:
        apart, unified = bytes_text(row.apart_request_bytes), bytes_text(row.unified_request_bytes)
        counts = (row.context_tokens, row.planned, row.apart, apart, row.unified, unified, row.unified_fp8)
        yield _design_columns(tuple(cell if isinstance(cell, str) else f"{cell:,}" for cell in counts))
    longest = (designs.longest_apart, designs.longest_unified, designs.longest_unified_fp8)
    apart, unified, fp8 = (f"{tokens:,}" for tokens in longest)
    yield _design_columns(("longest, alone", "", apart, "", unified, "", fp8))


def _design_columns(cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"  {first:<{LABEL_WIDTH}}" + "".join(f"{cell:>{DESIGN_WIDTH}}" for cell in others).rstrip()
