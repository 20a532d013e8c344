"""Pure: the life of one group. A group starts, serves, fails and restarts as a whole.

Every restart and every roll to another revision is one step: the StatefulSet gets the next generation, and all pods of
other generations are deleted. The step is found again from the cluster alone, so it may be repeated or interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kimi_operator.api.conditions import Reason
from kimi_operator.api.status import GroupState
from kimi_operator.decide.blocked import Blocked, find_blocked
from kimi_operator.decide.evidence import Cause, Evidence, Patience, Scene, find_failure, next_deadline_s
from kimi_operator.observe import FailureSeen, GroupSeen, PodSeen
from kimi_operator.render.names import GroupKey, stateful_set_name
from kimi_operator.times import format_time


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """Rules of failure and restart. Times in seconds."""

    restart_budget: int = 5
    """Restarts in a row before the group is left Failed."""
    first_delay_s: float = 10.0
    """Wait before the second restart in a row; doubles with each further one. The first comes at once."""
    max_delay_s: float = 300.0
    stable_s: float = 600.0
    """Ready for this long, a group has its whole budget again."""
    restart_grace_s: int = 5
    """For the pods of a broken group: the collective is gone, nothing is left to drain."""
    settle_s: float = 10.0
    """Pods that are starting stand for this long before another revision replaces them."""
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class GroupWanted:
    """What the spec asks of a group."""

    key: GroupKey
    deployment: str
    owner_uid: str
    replicas: int
    revision: str
    suspended: bool = False
    keeps_template: bool = False
    """Nothing can be rendered for it: it lives on with the template that it has."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What stands on the group's StatefulSet from one start to the next."""

    generation: int = 1
    restarted_s: float | None = None
    restarts: int = 0
    streak: int = 0
    failure: FailureSeen | None = None


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """What a group is, and what to do with it."""

    key: GroupKey
    state: GroupState
    reason: Reason
    message: str
    stamp: Stamp | None
    """What to apply; None: touch nothing, the object is another's or on its way out."""
    replicas: int = 0
    keep_template: bool = False
    """Apply onto the live pod template instead of the rendered one: the group keeps its revision."""
    delete: tuple[PodSeen, ...] = ()
    grace_s: int | None = None
    """Grace of `delete`; None leaves it to the pod's own."""
    force_delete: tuple[PodSeen, ...] = ()
    """Pods whose kubelet will never answer."""
    look_again_s: float | None = None
    """When, in seconds since 1970, time alone may change this decision."""
    retry_s: float | None = None
    """When back-off ends."""
    restarted: bool = False
    """This decision restarts the group: after a failure, or (reason Draining) because a pod of it has to leave."""
    blocked: Blocked | None = None


def decide_group(
    wanted: GroupWanted, seen: GroupSeen | None, scene: Scene, policy: GroupPolicy, *, may_roll: bool
) -> GroupDecision:
    """One look at one group. `may_roll`: an outdated group may be replaced now; it never is otherwise."""
    decision = _decide(wanted, seen, scene, policy, may_roll=may_roll)
    return replace(decision, keep_template=True) if wanted.keeps_template else decision


def without_stamp(wanted: GroupWanted, seen: GroupSeen | None, scene: Scene, policy: GroupPolicy) -> GroupDecision:
    """What a group is whose next stamp the API server did not take: what it was, with all of its pods."""
    decision = decide_group(wanted, seen, scene, policy, may_roll=False)
    if seen is None or decision.stamp is None or decision.stamp.generation == seen.generation:
        return decision
    state = GroupState.FAILED if decision.restarted else decision.state
    return replace(decision, state=state, stamp=_stamp(seen), delete=(), grace_s=None, restarted=False)


def _decide(
    wanted: GroupWanted, seen: GroupSeen | None, scene: Scene, policy: GroupPolicy, *, may_roll: bool
) -> GroupDecision:
    if seen is None:
        return _create(wanted)
    if seen.deleting or seen.owner_uid != wanted.owner_uid:
        return _not_ours(wanted, seen)
    if wanted.suspended:
        return _suspend(wanted, seen)
    if seen.replicas == 0:
        # Pods of the suspended generation may still be leaving: they must not be taken for the new one's.
        return _start_anew(wanted, seen, Reason.GROUPS_STARTING, "resumed")
    is_outdated = seen.revision != wanted.revision
    settled_s = _settled_s(seen, scene, policy)
    if is_outdated and may_roll and scene.now_s >= settled_s:
        return _start_anew(wanted, seen, Reason.UPDATING, f"moves from revision {seen.revision} to {wanted.revision}")
    decision = _continue(wanted, seen, scene, policy)
    if is_outdated and may_roll:
        decision = replace(decision, look_again_s=min(settled_s, decision.look_again_s or settled_s))
    return replace(decision, keep_template=is_outdated)


def _settled_s(seen: GroupSeen, scene: Scene, policy: GroupPolicy) -> float:
    """When a group that starts may move on, in seconds since 1970.

    A spec is often changed several times in a row: the first change is followed at once, those that come while its
    pods are new together.
    """
    if any(pod.was_ready or pod.ended is not None for pod in seen.current):
        return 0.0
    # A time to come is none of ours.
    made_s = [pod.created_s for pod in seen.current if pod.created_s <= scene.now_s]
    return max(made_s, default=-policy.settle_s) + policy.settle_s


def _create(wanted: GroupWanted) -> GroupDecision:
    replicas = 0 if wanted.suspended else wanted.replicas
    reason = Reason.SUSPENDED if wanted.suspended else Reason.GROUPS_STARTING
    return GroupDecision(wanted.key, GroupState.PENDING, reason, "is being created", Stamp(), replicas)


def _not_ours(wanted: GroupWanted, seen: GroupSeen) -> GroupDecision:
    name = stateful_set_name(wanted.deployment, wanted.key)
    if seen.deleting:
        message = f"waits until the previous StatefulSet {name} is gone"
        return GroupDecision(wanted.key, GroupState.DRAINING, Reason.DRAINING, message, None)
    message = f"StatefulSet {name} belongs to another owner (uid {seen.owner_uid or 'none'}); delete or rename it"
    return GroupDecision(wanted.key, GroupState.PENDING, Reason.NAME_CONFLICT, message, None)


def _suspend(wanted: GroupWanted, seen: GroupSeen) -> GroupDecision:
    state = GroupState.DRAINING if seen.pods else GroupState.PENDING
    message = f"suspended; {len(seen.pods)} pods are still leaving" if seen.pods else "suspended"
    stamp = replace(_stamp(seen), generation=seen.generation + (seen.revision != wanted.revision))
    return GroupDecision(wanted.key, state, Reason.SUSPENDED, message, stamp, replicas=0)


def _start_anew(wanted: GroupWanted, seen: GroupSeen, reason: Reason, message: str) -> GroupDecision:
    """A planned start at the wanted revision: the budget is whole again, pods take the time they need to drain."""
    stamp = replace(_stamp(seen), generation=seen.generation + 1, streak=0)
    return GroupDecision(
        wanted.key, GroupState.DRAINING, reason, message, stamp, wanted.replicas,
        delete=tuple(pod for pod in seen.pods if not pod.deleting),
    )  # fmt: skip


def _continue(wanted: GroupWanted, seen: GroupSeen, scene: Scene, policy: GroupPolicy) -> GroupDecision:
    if seen.stale:
        return _clear_away(wanted, seen, scene, policy)
    if seen.creation_failure or any(pod.unschedulable is not None for pod in seen.current):
        # A restart helps nobody: the others would wait for the same peer again. They are judged once it can start.
        return _starting(wanted, seen, scene, policy)
    evidence = find_failure(seen, wanted.replicas, scene, policy.patience)
    if evidence is not None and evidence.cause is not Cause.FAILURE:
        return _restart(wanted, seen, evidence, scene, policy)
    if evidence is not None:
        return _restart_or_wait(wanted, seen, evidence, scene, policy)
    ready = [pod for pod in seen.current if pod.ready]
    if len(ready) >= wanted.replicas:
        return _ready(wanted, seen, scene, policy)
    return _starting(wanted, seen, scene, policy)


def _clear_away(wanted: GroupWanted, seen: GroupSeen, scene: Scene, policy: GroupPolicy) -> GroupDecision:
    """Pods of an earlier generation stand: nothing is judged before they are gone."""
    homes = {pod: scene.node_of(pod) for pod in seen.stale}
    off = [pod for pod, node in homes.items() if node is not None and node.out_of_service]
    stuck = [(pod, node) for pod, node in homes.items() if pod.deleting and node is not None and not node.ready]
    message = f"waits until {len(seen.stale)} pods of the previous start are gone"
    after_failure = seen.streak > 0
    is_update = any(pod.revision != seen.revision for pod in seen.stale)
    reason = Reason.GROUP_RESTARTING if after_failure else Reason.UPDATING if is_update else Reason.DRAINING
    if stuck and not off:
        pod, node = stuck[0]
        reason = Reason.NODE_LOST
        message = (
            f"pod {pod.name} cannot leave node {node.name}, which is NotReady; bring the node back, or if it is off "
            f"taint it: kubectl taint node {node.name} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        )
    return GroupDecision(
        wanted.key, GroupState.DRAINING, reason, message, _stamp(seen), wanted.replicas,
        delete=tuple(pod for pod in seen.stale if not pod.deleting and pod not in off),
        grace_s=policy.restart_grace_s if after_failure else None,
        force_delete=tuple(off),
        look_again_s=next_deadline_s(seen, scene, policy.patience),
    )  # fmt: skip


def _restart_or_wait(
    wanted: GroupWanted, seen: GroupSeen, evidence: Evidence, scene: Scene, policy: GroupPolicy
) -> GroupDecision:
    failed = GroupDecision(wanted.key, GroupState.FAILED, Reason.GROUP_RESTARTING, "", _stamp(seen), wanted.replicas)
    said = f"{evidence.pod}: {evidence.message}"
    if seen.streak >= policy.restart_budget:
        names = " ".join(pod.name for pod in seen.current)
        message = (
            f"{said}; {seen.streak} restarts in a row did not help; change the spec, or mend it and try again by: "
            f"kubectl delete pod {names}"
        )
        return replace(failed, reason=Reason.RESTART_BUDGET_EXHAUSTED, message=message)
    # A time to come is none of ours.
    restarted_s = seen.restarted_s if seen.restarted_s is not None and seen.restarted_s <= scene.now_s else 0.0
    retry_s = restarted_s + _delay_s(policy, seen.streak)
    if scene.now_s < retry_s:
        message = f"{said}; restart {seen.streak + 1} of {policy.restart_budget} at {format_time(retry_s)}"
        return replace(failed, message=message, look_again_s=retry_s, retry_s=retry_s)
    return _restart(wanted, seen, evidence, scene, policy)


def _restart(
    wanted: GroupWanted, seen: GroupSeen, evidence: Evidence, scene: Scene, policy: GroupPolicy
) -> GroupDecision:
    """A restart at once. The budget pays only for failures; pods that work take the time they need to drain."""
    drains = evidence.cause is Cause.LEAVING
    stamp = Stamp(
        generation=seen.generation + 1,
        restarted_s=scene.now_s,
        restarts=seen.restarts + 1,
        streak=seen.streak + (evidence.cause is Cause.FAILURE),
        failure=FailureSeen(format_time(scene.now_s), evidence.pod, evidence.message[:2048]),
    )
    return GroupDecision(
        wanted.key, GroupState.DRAINING, Reason.DRAINING if drains else Reason.GROUP_RESTARTING,
        f"{evidence.pod}: {evidence.message}", stamp, wanted.replicas,
        delete=tuple(pod for pod in seen.pods if not pod.deleting),
        grace_s=None if drains else policy.restart_grace_s, restarted=True,
    )  # fmt: skip


def _ready(wanted: GroupWanted, seen: GroupSeen, scene: Scene, policy: GroupPolicy) -> GroupDecision:
    stamp = _stamp(seen)
    stable_s = max(pod.ready_changed_s or 0.0 for pod in seen.current) + policy.stable_s
    look_again_s = next_deadline_s(seen, scene, policy.patience)
    if seen.streak and scene.now_s >= stable_s:
        stamp = replace(stamp, streak=0)
    elif seen.streak:
        look_again_s = min(stable_s, look_again_s or stable_s)
    return GroupDecision(
        wanted.key, GroupState.READY, Reason.GROUPS_READY, "", stamp, wanted.replicas, look_again_s=look_again_s
    )


def _starting(wanted: GroupWanted, seen: GroupSeen, scene: Scene, policy: GroupPolicy) -> GroupDecision:
    # One without a node comes first: what the others wait for is that one.
    blocked = find_blocked(sorted(seen.current, key=lambda pod: pod.unschedulable is None), seen.creation_failure)
    running = len(seen.current) == wanted.replicas and all(pod.started_s is not None for pod in seen.current)
    state = GroupState.STARTING if running else GroupState.PENDING
    ready = sum(pod.ready for pod in seen.current)
    message = blocked.message if blocked else f"{ready} of {wanted.replicas} pods ready{_lost_nodes(seen, scene)}"
    default = Reason.GROUP_RESTARTING if seen.streak else Reason.GROUPS_STARTING
    return GroupDecision(
        wanted.key, state, blocked.reason if blocked else default, message, _stamp(seen), wanted.replicas,
        look_again_s=next_deadline_s(seen, scene, policy.patience), blocked=blocked,
    )  # fmt: skip


def _lost_nodes(seen: GroupSeen, scene: Scene) -> str:
    """What is not ready because its node is not: until the node's grace is over, that alone is known."""
    lost = sorted(
        f"node {pod.node} of {pod.name} is NotReady"
        for pod in seen.current
        if not pod.ready and (node := scene.node_of(pod)) is not None and not node.ready
    )
    return "".join(f"; {one}" for one in lost)


def _delay_s(policy: GroupPolicy, streak: int) -> float:
    return 0.0 if streak == 0 else min(policy.max_delay_s, policy.first_delay_s * 2 ** (streak - 1))


def _stamp(seen: GroupSeen) -> Stamp:
    return Stamp(seen.generation, seen.restarted_s, seen.restarts, seen.streak, seen.failure)
