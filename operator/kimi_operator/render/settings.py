"""The settings files of worker and router: exactly the keys that they accept."""

from __future__ import annotations

from typing import Any

from kimi_operator.api.deployment import KimiDeploymentSpec, Role
from kimi_operator.api.profile import HardwareProfileSpec
from kimi_operator.planner.plan import Plan
from kimi_operator.render.inputs import RenderInputs
from kimi_operator.render.names import (
    API_PORT,
    COORDINATOR_PORT,
    HANDOFF_PORT,
    RENDEZVOUS_PORT,
    headless_name,
)

CHECKPOINT_PATH = "/models/checkpoint"
POLL_INTERVAL_S = 0.5
LOST_AFTER_S = 15.0
RETRIES = 3
MAX_HELD_BYTES = 2**28
WRITE_S = 60
"""For the writes of one prompt themselves."""
SILENCE_S = 15.0
"""Without pings from a peer's process; long steps do not count."""


def to_worker_settings(inputs: RenderInputs, role: Role) -> dict[str, Any]:
    """Content of worker.json."""
    spec, plan, profile = inputs.spec, inputs.plan, inputs.profile.spec
    return {
        "deployment": inputs.owner.name,
        "role": role.value,
        "model": {
            "checkpoint": CHECKPOINT_PATH,
            "served_name": spec.model.served_name,
            "max_model_len": plan.role(role).max_model_len,
        },
        "parallel": _parallel(spec, role),
        "runtime": _runtime(plan, profile),
        "limits": _limits(plan, profile, role),
        "handoff": {
            "transport": plan.transport.value.lower(),
            "reservation_timeout_s": float(profile.timeouts.reservation_seconds),
            # A step may last as long as a collective, and the ranks at both ends take part in writes between steps.
            "write_timeout_s": float(profile.timeouts.collective_seconds + WRITE_S),
            "silence_s": SILENCE_S,
            "peers": _peers(inputs, role),
            "fence": profile.fabric.fence,
        },
        "ports": {
            # All addresses: probes, routers and the operator reach a pod by its own.
            "address": "0.0.0.0",  # noqa: S104
            "api": API_PORT,
            "rendezvous": RENDEZVOUS_PORT,
            "coordinator": COORDINATOR_PORT,
            "handoff": HANDOFF_PORT,
        },
        "timeouts": {
            "group_start_s": float(profile.pod.startup_budget_seconds),
            "collective_s": float(profile.timeouts.collective_seconds),
            "drain_s": float(profile.timeouts.drain_seconds),
        },
        "service": {"headless": headless_name(inputs.owner.name, role), "namespace": inputs.owner.namespace},
        # For tests of the worker alone; a deployment cannot set them.
        "faults": {"notify_before_writes_land": False, "keep_recycled_state": False},
    }


def _peers(inputs: RenderInputs, role: Role) -> dict[str, Any]:
    """Where a decode pod finds the prefill lanes that must be able to write into it."""
    prefill, owner = inputs.spec.role(Role.PREFILL), inputs.owner
    is_checked = role is Role.DECODE
    return {
        "service": f"{headless_name(owner.name, Role.PREFILL)}.{owner.namespace}.svc" if is_checked else "",
        "port": HANDOFF_PORT,
        "lanes_per_pod": prefill.gpus_per_node // prefill.tensor_parallel if is_checked else 1,
    }


def to_router_settings(inputs: RenderInputs) -> dict[str, Any]:
    """Content of router.json."""
    owner = inputs.owner
    return {
        "deployment": owner.name,
        "served_name": inputs.spec.model.served_name,
        "port": API_PORT,
        "prefill_service": f"{headless_name(owner.name, Role.PREFILL)}.{owner.namespace}.svc",
        "decode_service": f"{headless_name(owner.name, Role.DECODE)}.{owner.namespace}.svc",
        "worker_port": API_PORT,
        "poll_interval_s": POLL_INTERVAL_S,
        "lost_after_s": LOST_AFTER_S,
        "retries": RETRIES,
        "drain_s": float(inputs.profile.spec.timeouts.drain_seconds),
        "max_held_bytes": MAX_HELD_BYTES,
    }


def _parallel(spec: KimiDeploymentSpec, role: Role) -> dict[str, int]:
    role_spec = spec.role(role)
    return {
        "nodes_per_group": role_spec.nodes_per_group,
        "ranks_per_node": role_spec.gpus_per_node,
        "tensor_parallel": role_spec.tensor_parallel,
    }


def _runtime(plan: Plan, profile: HardwareProfileSpec) -> dict[str, Any]:
    return {
        "device": profile.runtime.device.value,
        "dtype": profile.runtime.dtype.value,
        "kv_cache_dtype": plan.kv_cache_dtype.value,
        "collectives": profile.runtime.collectives.value,
        "threads_per_rank": profile.runtime.threads_per_rank,
    }


def _limits(plan: Plan, profile: HardwareProfileSpec, role: Role) -> dict[str, int]:
    role_plan = plan.role(role)
    return {
        "max_num_seqs": role_plan.max_num_seqs,
        "max_queued": profile.limits.max_queued,
        "max_num_batched_tokens": role_plan.max_num_batched_tokens,
        "num_pages": role_plan.num_pages,
        "page_size_tokens": role_plan.page_size_tokens,
        "num_state_slots": role_plan.num_state_slots,
    }
