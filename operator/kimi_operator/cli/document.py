"""A plan as JSON or YAML, for scripts: the plan's own fields, then its outlook under the workload. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from typing import Any

import yaml
from msgspec import to_builtins

from kimi_operator.api.base import dump
from kimi_operator.cli.cost import Cost
from kimi_operator.cli.look_ahead import contexts
from kimi_operator.cli.outlook import DecodeSpeed, Outlook, RoleOutlook, Speed
from kimi_operator.cli.text import meets_workload, total_of
from kimi_operator.errors import Problem
from kimi_operator.planner.case import Solution
from kimi_operator.planner.designs import compare_designs
from kimi_operator.planner.layout import MAX_NODES
from kimi_operator.planner.predict import PREFILL, Prediction
from kimi_operator.planner.workload import Workload


def plan_document(outlook: Outlook, cost: Cost | None) -> dict[str, Any]:
    """Everything about a plan that fits. Sizes in bytes, times and rates with their band, unit and calibration.

    `to_rank_layouts` is what ranks every layout of so many nodes, in place of flags of one layout: a plan for people
    names one that is much better, by a search that takes as long as all the rest. Null for more nodes than it takes.
    `meets_workload` is null where neither a load nor a target was stated, or none could be checked;
    `not_sure` are targets that are met within the prediction's band alone.
    """
    document = {
        "feasible": True,
        "meets_workload": meets_workload(outlook),
        **to_builtins(outlook.plan),
        "nodes": outlook.nodes,
        "to_rank_layouts": f"--search {outlook.nodes}" if outlook.nodes <= MAX_NODES else None,
        "deployment": dump(outlook.planned.deployment),
        "workload": _workload(outlook),
        "misses": _problems(outlook.misses),
        "not_sure": _problems(outlook.doubts),
        "outlook": {"prefill": _role(outlook.prefill), "decode": _role(outlook.decode)},
        "speed": _speed(outlook),
        "contexts": [to_builtins(point) for point in contexts(outlook)],
        "designs": to_builtins(compare_designs(outlook.planned.architecture, outlook.plan, outlook.plan.decode)),
    }
    if cost is not None:
        document["cost"] = to_builtins(cost)
    return document


def refusal_document(problems: tuple[Problem, ...]) -> dict[str, Any]:
    """Why nothing fits."""
    return {"feasible": False, "problems": _problems(problems)}


def dumped(document: Mapping[str, Any], output: str) -> str:
    """JSON or YAML text, with a newline at its end."""
    # through JSON, so that both forms hold the same plain values
    text = json.dumps(document, indent=2, default=_plain)
    if output == "json":
        return f"{text}\n"
    return yaml.dump(json.loads(text), Dumper=yaml.CSafeDumper, sort_keys=False, width=120, allow_unicode=True)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return float(value) if isinstance(value, Fraction) else str(value)


def _problems(problems: tuple[Problem, ...]) -> list[dict[str, str]]:
    return [to_builtins(problem) for problem in problems]


def _workload(outlook: Outlook) -> dict[str, Any]:
    work: Workload = outlook.workload
    return {
        "assumed": outlook.is_assumed,
        "prompt": str(work.prompt),
        "output": str(work.output),
        "prompt_mean_tokens": float(work.prompt.mean),
        "output_mean_tokens": float(work.output.mean),
        "reuse": float(work.reuse),
        "concurrency": work.running,
        "targets": {"ttft_seconds": work.ttft_s, "tpot_seconds": work.tpot_s},
    }


def _role(each: RoleOutlook) -> dict[str, Any]:
    return {
        "groups": each.groups,
        "lanes": each.lanes,
        "memory_bytes": total_of(each.plan).bytes,
        "at_plan": _solution(each.at_plan),
        "best": _solution(each.best),
        "stretches": [to_builtins(stretch) for stretch in each.stretches],
        "unused": [to_builtins(line) for line in each.unused],
        "unused_bytes": sum(line.bytes for line in each.unused),
    }


def _solution(solution: Solution | Problem) -> dict[str, Any]:
    if isinstance(solution, Problem):
        return {"fits": False, "problem": to_builtins(solution)}
    return {"fits": True, **to_builtins(solution)}


def _speed(outlook: Outlook) -> dict[str, Any]:
    speed = outlook.speed
    if speed is None:
        partial = {} if outlook.decode_speed is None else _decode(outlook.decode_speed)
        return {"predicted": False, "reason": outlook.no_speed, **partial}
    return {
        "predicted": True,
        **_decode(speed),
        "prefill": to_builtins(speed.prefill),
        "prefill_busy": {"lanes": speed.busy_lanes, **to_builtins(speed.prefill_busy)},
        "ttft": {
            **_banded(speed.ttft),
            **(dict.fromkeys(("value", "low", "high")) if speed.grows else {}),
            **_waits(speed),
            "grows_without_end": speed.grows,
        },
        "throughput": _banded(speed.at.tokens_per_second),
        "concurrency": speed.at.concurrency,
        "binds": speed.at.binds,
        "knee": speed.knee.concurrency,
        "capacity": speed.capacity,
        "curve": [
            {
                "concurrency": point.concurrency,
                "held": point.held,
                "running": point.running,
                "tpot": _banded(point.tpot),
                "tokens_per_second": _banded(point.tokens_per_second),
                "binds": point.binds,
            }
            for point in speed.curve
        ],
    }


def _waits(speed: Speed) -> dict[str, bool]:
    """What the first token waits for."""
    is_fed, waits = speed.at.binds != PREFILL, speed.waiting_ttft is not None
    return {"waits_for_prefill": waits and not is_fed, "waits_for_memory": waits and is_fed}


def _decode(speed: Speed | DecodeSpeed) -> dict[str, Any]:
    """What needs no FLOPs."""
    return {
        "request": to_builtins(speed.request),
        "running": speed.running,
        "tpot": to_builtins(speed.tpot),
        "tpot_alone": to_builtins(speed.tpot_alone),
        "handoff": None if speed.handoff is None else to_builtins(speed.handoff),
    }


def _banded(prediction: Prediction) -> dict[str, Any]:
    return {
        "value": prediction.value,
        "low": prediction.low,
        "high": prediction.high,
        "unit": prediction.unit,
        "calibrated_on": prediction.calibrated_on,
    }
