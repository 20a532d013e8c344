"""The plan as it stands in a deployment's status: limits, and the arithmetic behind them."""

from __future__ import annotations

import hashlib
import json

from kimi_operator.api.base import dump
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.api.status import MemoryLineStatus, PlanStatus, RolePlanStatus
from kimi_operator.planner.plan import Plan, RolePlan
from kimi_operator.planner.units import bytes_text


def plan_status(plan: Plan, profile: HardwareProfile) -> PlanStatus:
    """Everything about a plan that a person wants to see beside the deployment."""
    return PlanStatus(
        architecture=plan.architecture,
        profile=plan.profile,
        profile_version=profile_version(profile),
        gpus=plan.gpus,
        gpu_memory_bytes=profile.spec.gpu.memory,
        kv_cache_dtype=plan.kv_cache_dtype.value,
        experts=plan.experts.value,
        workload=plan.workload,
        transport=plan.transport.value,
        warnings=tuple(warning[:1024] for warning in plan.warnings[:16]),
        prefill=_role_status(plan.prefill),
        decode=_role_status(plan.decode),
    )


def profile_version(profile: HardwareProfile) -> str:
    """Eight hex digits over the profile's content, so that a change of a profile shows."""
    text = json.dumps(dump(profile.spec), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def weights_bytes(role: RolePlan) -> int:
    """Planned weights of a GPU, to compare with what a worker reports."""
    return sum(line.bytes for line in role.lines if line.is_weights)


def free_bytes(role: RolePlan) -> int:
    """What is to stay free on a GPU while the bundled worker runs, to compare with what one reports."""
    return sum(line.bytes for line in role.lines if line.stays_free)


def _role_status(role: RolePlan) -> RolePlanStatus:
    pool = role.num_pages * role.page_bytes + role.num_state_slots * role.slot_bytes
    return RolePlanStatus(
        ranks=role.ranks,
        lanes=role.lanes,
        experts_per_rank=role.experts_per_rank,
        max_num_seqs=role.max_num_seqs,
        max_num_batched_tokens=role.max_num_batched_tokens,
        max_model_len=role.max_model_len,
        num_pages=role.num_pages,
        page_size_tokens=role.page_size_tokens,
        num_state_slots=role.num_state_slots,
        weights_bytes=weights_bytes(role),
        free_bytes=free_bytes(role),
        kv_pool=bytes_text(pool),
        binds=role.binds,
        lines=tuple(MemoryLineStatus(label=line.label, bytes=line.bytes, how=line.how) for line in role.lines),
    )
