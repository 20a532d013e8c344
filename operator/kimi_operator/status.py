"""Pure: from one look at a deployment to its status. Equal looks give equal statuses, or rest would not be rest."""

from __future__ import annotations

from typing import Any

from kimi_operator.api.base import dump
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import Failure, GroupStatus, KimiDeploymentStatus, RoleStatus, RouterStatus
from kimi_operator.conditions import build_conditions
from kimi_operator.decide.groups import GroupDecision
from kimi_operator.look import Look
from kimi_operator.render.names import API_PORT, role_selector, router_name, selector_text
from kimi_operator.times import format_time


def build_status(look: Look) -> dict[str, Any]:
    """The status to apply."""
    status = KimiDeploymentStatus(
        observed_generation=look.generation,
        conditions=build_conditions(look),
        revision=look.revision,
        plan=look.plan,
        prefill=_role_status(look, Role.PREFILL),
        decode=_role_status(look, Role.DECODE),
        router=RouterStatus(desired=look.router_replicas, ready=look.seen.router.ready),
        url=f"http://{router_name(look.name)}.{look.namespace}.svc:{API_PORT}",
    )
    return dump(status)


def _role_status(look: Look, role: Role) -> RoleStatus:
    decisions = look.of(role)
    ready = sum(look.is_ready(decision.key) for decision in decisions)
    desired = look.desired.get(role, 0)
    blocked = next((one.blocked.message for one in decisions if one.blocked), "")
    return RoleStatus(
        desired=desired,
        current=sum(decision.key in look.seen.groups for decision in decisions),
        ready=ready,
        updated=sum(look.is_updated(decision.key) for decision in decisions),
        summary=f"{ready}/{desired}",
        revision=look.revisions.get(role, ""),
        selector=selector_text(role_selector(look.name, role)),
        blocked=blocked[:1024],
        groups=tuple(_group_status(look, decision) for decision in decisions),
    )


def _group_status(look: Look, decision: GroupDecision) -> GroupStatus:
    seen, stamp = look.seen.groups.get(decision.key), decision.stamp
    failure = stamp.failure if stamp else None
    return GroupStatus(
        index=decision.key.group,
        state=decision.state,
        generation=stamp.generation if stamp else seen.generation if seen else 0,
        restarts=stamp.restarts if stamp else 0,
        revision=seen.revision if seen else "",
        ready_pods=sum(pod.ready for pod in seen.current) if seen else 0,
        last_failure=Failure(time=failure.time, pod=failure.pod, message=failure.message[:2048]) if failure else None,
        next_restart_time=format_time(decision.retry_s) if decision.retry_s is not None else None,
        measured=look.measured.get(decision.key),
    )
