"""Pure: which outdated groups may be replaced now, and what all groups of a deployment do in one look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import GroupState
from kimi_operator.decide.evidence import Scene
from kimi_operator.decide.groups import GroupDecision, GroupPolicy, GroupWanted, decide_group
from kimi_operator.observe import GroupSeen
from kimi_operator.render.names import GroupKey


def decide_groups(
    wanted: Sequence[GroupWanted],
    seen: Mapping[GroupKey, GroupSeen],
    scene: Scene,
    policy: GroupPolicy,
    *,
    paused: bool,
) -> dict[GroupKey, GroupDecision]:
    """Decide for every wanted group. Groups that exist unwanted are leftovers."""

    def look(group: GroupWanted, *, may_roll: bool) -> GroupDecision:
        return decide_group(group, seen.get(group.key), scene, policy, may_roll=may_roll)

    decisions = {group.key: look(group, may_roll=False) for group in wanted}
    rolling = set() if paused else next_to_roll(wanted, seen, decisions)
    return decisions | {group.key: look(group, may_roll=True) for group in wanted if group.key in rolling}


def next_to_roll(
    wanted: Sequence[GroupWanted], seen: Mapping[GroupKey, GroupSeen], decisions: Mapping[GroupKey, GroupDecision]
) -> set[GroupKey]:
    """Outdated groups to replace now: all that serve nobody; else one, when every updated group is ready.

    While an updated group is not ready, an outdated one that may recover does so at its own revision: the new one may
    be the worse. A group that has lost its readiness for a while counts as one that is down, and is the one to replace.
    Else groups take turns by index, prefill before decode, so that with two groups a role a pair of equal revisions is
    always there.
    """
    outdated = {group.key for group in wanted if group.key in seen and seen[group.key].revision != group.revision}
    is_proven = all(decisions[group.key].state is GroupState.READY for group in wanted if group.key not in outdated)
    unready = {key for key in outdated if decisions[key].state is not GroupState.READY}
    unsteady = {key for key in unready if _is_unsteady(seen[key], decisions[key])}
    idle = {key for key in unready - unsteady if is_proven or not _may_recover(seen[key], decisions[key])}
    if idle:
        return idle
    if not is_proven or len(unsteady) > 1:
        return set()
    return unsteady or set(sorted(outdated, key=_turn)[:1])


def _may_recover(group: GroupSeen, decision: GroupDecision) -> bool:
    """Whether a group is on its way back from a restart; not one that starts for the first time, or is stuck."""
    if decision.reason is Reason.GROUPS_STARTING:
        return group.restarts > 0
    return decision.reason in (Reason.GROUP_RESTARTING, Reason.DRAINING, Reason.NODE_LOST)


def _is_unsteady(group: GroupSeen, decision: GroupDecision) -> bool:
    """Whether a group has been serving and may be again without a restart."""
    return decision.state is GroupState.STARTING and any(pod.was_ready for pod in group.current)


def _turn(key: GroupKey) -> tuple[int, int]:
    return key.group, list(Role).index(key.role)
