"""A replay as JSON or YAML, for scripts. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from kimi_operator.api.base import dump
from kimi_operator.cli.replay_rows import TPOT, TTFT, lanes_of, notes, warnings
from kimi_operator.cli.replayed import BandedRow, Outcome
from kimi_operator.planner.predict import Prediction


def replay_document(outcome: Outcome) -> dict[str, Any]:
    """For scripts: the figures of the text, unrounded. Times in the unit of their name, or with it beside them."""
    asked, service = outcome.asked, outcome.service
    lanes = lanes_of(service)
    return {
        "feasible": True,
        "predicted": True,
        "measured": False,
        "deployment": dump(outcome.planned.deployment),
        "profile": outcome.plan.profile,
        "warnings": list(warnings(outcome)),
        "sessions": {
            "source": asked.source,
            "count": len(asked.sessions),
            "reuse": asked.reuse,
            "assumed": list(asked.assumed),
            "from_workload": list(asked.manifest.taken),
            "unused_of_workload": list(asked.manifest.unused),
            **({"seed": asked.seed, **to_builtins(asked.agents)} if asked.agents else {}),
        },
        "service": {
            "lanes": lanes,
            "num_pages": lanes * service.lane.num_pages,
            "num_slots": lanes * service.lane.num_slots,
            "max_running": lanes * service.lane.max_running,
            "prefill_lanes": service.all_prefill_lanes,
            "prefill_groups": service.prefill_groups,
            "chunk_tokens": service.chunk_tokens,
            "lane": to_builtins(service.lane),
        },
        "summary": to_builtins(outcome.value.summary),
        "summary_low": to_builtins(outcome.fast.summary),
        "summary_high": to_builtins(outcome.slow.summary),
        **(_times(outcome) if outcome.value.summary.turns else dict.fromkeys(("ttft", "tpot", "duration"))),
        "targets": [to_builtins(met) for met in outcome.targets],
        "row_s": outcome.row_s,
        "over_time": [to_builtins(row) for row in outcome.rows],
        "by_turn": [_turn_document(each) for each in outcome.turns],
        "prefix_cache": {**to_builtins(outcome.cache), "reuse": outcome.cache.reuse},
        "handoff": _plain(outcome.handoff),
        "calibrated_on": {"decode": outcome.decode_on, "prefill": outcome.prefill_on},
        "notes": list(notes(outcome)),
    }


def _times(outcome: Outcome) -> dict[str, Any]:
    return {
        "ttft": {name: _plain(outcome.banded(of, "ms")) for name, of in zip(("p50", "p95"), TTFT, strict=True)},
        "tpot": {name: _plain(outcome.banded(of, "ms")) for name, of in zip(("p50", "p95"), TPOT, strict=True)},
        "duration": _plain(outcome.banded(lambda s: s.duration_s, "s")),
    }


def _turn_document(each: BandedRow) -> dict[str, Any]:
    row = each.row
    return {
        "first": row.first,
        "last": row.last,
        "served": row.served,
        "prompt_tokens": row.prompt_tokens,
        "computed_tokens": row.computed_tokens,
        "ttft_p50": _plain(each.ttft_p50),
        "ttft_p95": _plain(each.ttft_p95),
        "tpot_p50": _plain(each.tpot_p50),
        "tpot_p95": _plain(each.tpot_p95),
    }


def _plain(prediction: Prediction | None) -> dict[str, Any] | None:
    if prediction is None:
        return None
    return {"value": prediction.value, "low": prediction.low, "high": prediction.high, "unit": prediction.unit}
