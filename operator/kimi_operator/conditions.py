"""Pure: the conditions of a deployment. Each says what is missing, how much of it, and who said so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from kimi_operator.api.conditions import ConditionType, Reason
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import Condition, GroupState, MeasuredFabric
from kimi_operator.decide.blocked import is_about_checkpoint
from kimi_operator.decide.groups import GroupDecision
from kimi_operator.look import Look
from kimi_operator.measured import Measured, find_drifts
from kimi_operator.render.names import API_PORT
from kimi_operator.times import format_time


class Finding(NamedTuple):
    """A condition without its times."""

    status: Literal["True", "False", "Unknown"]
    reason: Reason
    message: str = ""


def build_conditions(look: Look) -> tuple[Condition, ...]:
    """One condition a type, in the vocabulary's order; transition times are kept while the status stays."""
    before = {condition["type"]: condition for condition in look.previous.get("conditions", ())}
    findings = _findings(look)
    return tuple(_condition(look, before.get(kind.value, {}), kind, findings[kind]) for kind in ConditionType)


def _condition(look: Look, before: Mapping[str, str], kind: ConditionType, finding: Finding) -> Condition:
    unchanged = before.get("status") == finding.status
    return Condition(
        type=kind,
        status=finding.status,
        reason=finding.reason,
        message=finding.message[:4096],
        observed_generation=look.generation,
        last_transition_time=before["lastTransitionTime"] if unchanged else format_time(look.now_s),
    )


def _findings(look: Look) -> dict[ConditionType, Finding]:
    """In dependency order: what the summary needs comes first."""
    roles = {role: _role_ready(look, role) for role in Role}
    router = _router_ready(look)
    available = _available(look)
    stalled = _stalled(look)
    return {
        ConditionType.READY: _ready(look, list(roles.values()), router),
        ConditionType.AVAILABLE: available,
        ConditionType.PROGRESSING: _progressing(look, stalled),
        ConditionType.PLAN_RESOLVED: _plan_resolved(look),
        ConditionType.PREFILL_READY: roles[Role.PREFILL],
        ConditionType.DECODE_READY: roles[Role.DECODE],
        ConditionType.ROUTER_READY: router,
        ConditionType.FABRIC_VERIFIED: _fabric_verified(look),
        ConditionType.WEIGHTS_READY: _weights_ready(look),
        ConditionType.CAPACITY_AVAILABLE: _capacity_available(look),
        ConditionType.SCALING_ACTIVE: Finding("False", Reason.FIXED_GROUPS, "the spec sets the number of groups"),
        ConditionType.DEGRADED: _degraded(look, available),
        ConditionType.STALLED: stalled,
    }


_NEEDS_A_PERSON = frozenset(
    {Reason.RESTART_BUDGET_EXHAUSTED, Reason.NAME_CONFLICT, Reason.PODS_REFUSED, Reason.NODE_LOST}
)
"""Reasons of groups that time alone will not mend."""

_WORST_FIRST = (
    Reason.NAME_CONFLICT,
    Reason.RESTART_BUDGET_EXHAUSTED,
    Reason.PODS_REFUSED,
    Reason.WEIGHTS_MISSING,
    Reason.IMAGE_UNAVAILABLE,
    Reason.INSUFFICIENT_CAPACITY,
    Reason.UNSCHEDULABLE,
    Reason.NODE_LOST,
    Reason.GROUP_RESTARTING,
    Reason.PODS_NOT_READY,
    Reason.UPDATING,
    Reason.DRAINING,
    Reason.GROUPS_STARTING,
)


def _worst(look: Look, decisions: list[GroupDecision]) -> Finding | None:
    """What to say first about groups that are not ready, if any is not."""
    waiting = [one for one in decisions if not look.is_ready(one.key)]
    if not waiting:
        return None

    worst = min(waiting, key=lambda one: _rank(_reason(one)))
    reason, message = _reason(worst), _checkpoint_failure(worst) or worst.message
    if worst.state is GroupState.READY:  # ready, at another revision
        reason = Reason.PAUSED if look.is_paused else Reason.UPDATING
        message = "runs the previous revision" + (" while the rollout is paused" if look.is_paused else "")
    if reason is Reason.INSUFFICIENT_CAPACITY and look.shortage:
        message = look.shortage
    more = f" ({len(waiting) - 1} more groups are not ready)" if len(waiting) > 1 else ""
    return Finding("False", reason, f"{worst.key.role} group {worst.key.group}: {message}{more}")


def _reason(decision: GroupDecision) -> Reason:
    """Of a group that restarts again and again, the cause says more than the restart."""
    restarts = decision.reason is Reason.GROUP_RESTARTING
    return Reason.WEIGHTS_MISSING if restarts and _checkpoint_failure(decision) else decision.reason


def _rank(reason: Reason) -> int:
    return _WORST_FIRST.index(reason) if reason in _WORST_FIRST else len(_WORST_FIRST)


def _role_ready(look: Look, role: Role) -> Finding:
    if look.is_suspended:
        return Finding("False", Reason.SUSPENDED, "spec.suspend is true")
    decisions = look.of(role)
    if not decisions:
        return Finding("False", Reason.RECONCILING, "no group exists yet")
    return _worst(look, decisions) or Finding(
        "True", Reason.GROUPS_READY, f"{len(decisions)} of {len(decisions)} groups"
    )


def _router_ready(look: Look) -> Finding:
    if look.is_suspended:
        return Finding("False", Reason.SUSPENDED, "spec.suspend is true")
    router, wanted = look.seen.router, look.router_replicas
    if wanted and router.settled and min(router.ready, router.updated) >= wanted:
        return Finding("True", Reason.PODS_READY, f"{router.ready} of {wanted} pods")
    if router.refused:
        return Finding("False", Reason.PODS_REFUSED, f"{router.ready} of {wanted} router pods ready; {router.refused}")
    waiting = next((pod for pod in router.pods if pod.waiting or pod.unschedulable is not None), None)
    why = f"; {waiting.name}: {waiting.unschedulable or ': '.join(waiting.waiting or ())}" if waiting else ""
    return Finding("False", Reason.PODS_NOT_READY, f"{router.ready} of {wanted} router pods ready{why}")


def _available(look: Look) -> Finding:
    """Whether requests are answered, at whatever revision."""
    missing = [
        f"a ready {role} group" for role in Role if not any(one.state is GroupState.READY for one in look.of(role))
    ]
    missing += [] if look.seen.router.ready else ["a ready router pod"]
    if not missing:
        return Finding("True", Reason.SERVING)
    reason = Reason.SUSPENDED if look.is_suspended else Reason.PODS_NOT_READY
    return Finding("False", reason, f"needs {' and '.join(missing)}")


def _ready(look: Look, roles: list[Finding], router: Finding) -> Finding:
    for refusal in (look.refusal, look.apply_refusal):
        if refusal is not None:
            return Finding("False", refusal.reason, refusal.message)
    if look.is_suspended:
        return Finding("False", Reason.SUSPENDED, "spec.suspend is true")
    # Groups come first: a router without groups behind it is not worth a word.
    unready = [role for role in roles if role.status != "True"]
    if look.delay is not None and (unready or router.status != "True"):
        return Finding("False", look.delay.reason, look.delay.message)
    if not unready:
        return router if router.status != "True" else Finding("True", Reason.AS_DESIRED)
    worst = min(unready, key=lambda role: _rank(role.reason))
    return Finding("False", worst.reason, worst.message)


def _stalled(look: Look) -> Finding:
    for refusal in (look.refusal, look.apply_refusal):
        if refusal is not None:
            return Finding("True", refusal.reason, refusal.message)
    for decision in look.decisions.values():
        if decision.reason in _NEEDS_A_PERSON:
            where = f"{decision.key.role} group {decision.key.group}"
            return Finding("True", decision.reason, f"{where}: {decision.message}")
    return Finding("False", Reason.AS_DESIRED)


def _progressing(look: Look, stalled: Finding) -> Finding:
    if look.delay is not None:
        return Finding("True", look.delay.reason, look.delay.message)
    if look.is_suspended:
        leaving = any(one.state is GroupState.DRAINING for one in look.decisions.values())
        return Finding("True" if leaving else "False", Reason.SUSPENDED, "spec.suspend is true")
    moving = [
        one for one in look.decisions.values() if not look.is_ready(one.key) and one.reason not in _NEEDS_A_PERSON
    ]
    outdated = [one for one in moving if one.state is GroupState.READY]
    if look.is_paused and moving and len(outdated) == len(moving):
        return Finding("False", Reason.PAUSED, f"{len(outdated)} groups run the previous revision")
    if not moving:
        return Finding("False", stalled.reason, stalled.message)
    worst = _worst(look, moving)
    return Finding("True", worst.reason, worst.message) if worst else Finding("True", Reason.RECONCILING)


def _plan_resolved(look: Look) -> Finding:
    if look.refusal is not None:
        return Finding("False", look.refusal.reason, look.refusal.message)
    drifts = find_drifts(look)
    if look.foreign_hardware:
        # It explains whatever else is off.
        return Finding("True", Reason.HARDWARE_DIFFERS, "; ".join([look.foreign_hardware, *map(str, drifts)]))
    if drifts:
        pools_differ = any(one.what is Measured.POOL for one in drifts)
        reason = Reason.POOLS_DIFFER if pools_differ else Reason.MEMORY_DIFFERS
        return Finding("True", reason, "; ".join(map(str, drifts)))
    if unread := _unread(look):
        message = (
            f"the pools of {unread} cannot be read: port {API_PORT} of its pods must answer the operator "
            "(NetworkPolicy?); its log names the pod and the error"
        )
        return Finding("True", Reason.POOLS_UNREAD, message)
    if look.plan is None:
        return Finding("True", Reason.PLAN_FITS)
    return Finding("True", Reason.PLAN_FITS, "; ".join([look.plan.decode.binds, *look.plan.warnings]))


def _unread(look: Look, *roles: Role) -> str:
    """The first ready group whose pods have not all told their pools; of these roles, or of any."""
    missing = [
        key
        for key, one in sorted(look.decisions.items())
        if one.state is GroupState.READY and key not in look.measured and key.role in (roles or tuple(Role))
    ]
    return f"{missing[0].role} group {missing[0].group}" if missing else ""


def _fabric_verified(look: Look) -> Finding:
    if look.is_suspended:
        return Finding("Unknown", Reason.SUSPENDED, "no group runs")
    if not all(any(one.state is GroupState.READY for one in look.of(role)) for role in Role):
        return Finding("Unknown", Reason.GROUPS_STARTING, "needs a ready group of both roles")
    if unread := _unread(look, Role.DECODE):
        return Finding("Unknown", Reason.POOLS_UNREAD, f"{unread} does not answer the operator")
    return _fabric_told({key.group: one.fabric for key, one in look.measured.items() if key.role is Role.DECODE})


def _fabric_told(told: Mapping[int, MeasuredFabric | None]) -> Finding:
    """What the decode groups, by index, say of test writes; True when all have reached every prefill lane."""
    fabrics = {group: fabric for group, fabric in sorted(told.items()) if fabric is not None}
    for group, fabric in fabrics.items():
        if fabric.error:
            return Finding("False", Reason.FABRIC_FAILED, f"decode group {group}: {fabric.error}")
    if len(fabrics) < len(told):
        return Finding("Unknown", Reason.NOT_CHECKED, "the workers make no test writes")
    verified, peers = sum(one.verified for one in fabrics.values()), sum(one.peers for one in fabrics.values())
    message = f"{verified} of {peers} pairs of a decode pod and a prefill lane"
    if all(fabric.is_verified for fabric in fabrics.values()):
        return Finding("True", Reason.FABRIC_VERIFIED, message)
    return Finding("Unknown", Reason.FABRIC_CHECKING, message)


def _checkpoint_failure(decision: GroupDecision) -> str | None:
    """What a worker said about the checkpoint, while its group is not ready."""
    if decision.state is GroupState.READY:
        return None
    if decision.reason is Reason.WEIGHTS_MISSING:
        return decision.message
    if decision.state is GroupState.FAILED:
        return decision.message if is_about_checkpoint(decision.message) else None
    failure = decision.stamp.failure if decision.stamp else None
    if failure is not None and decision.reason is Reason.GROUP_RESTARTING and is_about_checkpoint(failure.message):
        return f"{failure.pod}: {failure.message}"
    return None


def _weights_ready(look: Look) -> Finding:
    if look.is_suspended:
        return Finding("Unknown", Reason.SUSPENDED, "no group runs")
    decisions = list(look.decisions.values())
    for decision in decisions:
        if (said := _checkpoint_failure(decision)) is not None:
            return Finding("False", Reason.WEIGHTS_MISSING, f"{decision.key.role} group {decision.key.group}: {said}")
    if decisions and all(one.state is GroupState.READY for one in decisions):
        return Finding("True", Reason.WEIGHTS_LOADED)
    return Finding("Unknown", Reason.GROUPS_STARTING, "some groups have not loaded yet")


def _capacity_available(look: Look) -> Finding:
    if look.shortage is not None:
        refused = {one.reason for one in look.decisions.values()}
        is_full = Reason.INSUFFICIENT_CAPACITY in refused or Reason.UNSCHEDULABLE not in refused
        return Finding("False", Reason.INSUFFICIENT_CAPACITY if is_full else Reason.UNSCHEDULABLE, look.shortage)
    if look.is_suspended:
        return Finding("Unknown", Reason.SUSPENDED, "no group runs")
    pods = [pod for group in look.seen.groups.values() for pod in group.current]
    if pods and len(pods) >= sum(group.replicas for group in look.wanted) and all(pod.node for pod in pods):
        return Finding("True", Reason.CAPACITY_SUFFICIENT, f"{len(pods)} pods have their nodes")
    return Finding("Unknown", Reason.RECONCILING, "pods are not scheduled yet")


def _degraded(look: Look, available: Finding) -> Finding:
    if look.is_suspended:
        return Finding("False", Reason.SUSPENDED, "spec.suspend is true")
    worse = [one for one in find_drifts(look) if one.is_worse]
    if smaller := [one for one in worse if one.what is Measured.POOL]:
        return Finding("True", Reason.POOLS_DIFFER, "; ".join(map(str, smaller)))
    down = [one for one in look.decisions.values() if one.state is not GroupState.READY]
    if available.status == "True" and down:
        worst = _worst(look, down)
        return Finding("True", worst.reason if worst else Reason.PODS_NOT_READY, worst.message if worst else "")
    if worse:
        # All is served, but what was to stay free is in use: the largest step may find no memory.
        return Finding("True", Reason.MEMORY_DIFFERS, "; ".join(map(str, worse)))
    return Finding("False", Reason.AS_DESIRED)
