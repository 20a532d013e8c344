"""A group that has just begun to start is not replaced for each of several changes of its spec."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import Role
from kimi_operator.decide.evidence import Scene
from kimi_operator.decide.groups import GroupDecision, GroupPolicy, GroupWanted, decide_group
from kimi_operator.observe import Ended, GroupSeen, PodSeen
from kimi_operator.render.names import GroupKey

KEY = GroupKey(Role.PREFILL, 0)
NOW_S = 10_000.0
MADE_S = NOW_S - 4.0
POLICY = GroupPolicy()
WANTED = GroupWanted(KEY, "k3", "owner", replicas=2, revision="v1-b")
STARTING = PodSeen(
    "k3-prefill-0-0", "uid-0", 3, "v1-a", MADE_S, node="n0", phase="Running", ready_changed_s=MADE_S,
    started_s=MADE_S + 1.0,
)  # fmt: skip


def decide(pod: PodSeen, now_s: float = NOW_S) -> GroupDecision:
    """What becomes of an outdated group of two such pods whose turn it is."""
    pods = (pod, replace(pod, name="k3-prefill-0-1", uid="uid-1"))
    seen = GroupSeen(KEY, "set-uid", "owner", 3, "v1-a", 2, pods=pods)
    return decide_group(WANTED, seen, Scene({}, now_s), POLICY, may_roll=True)


def assert_moves(decision: GroupDecision) -> None:
    assert (decision.reason, decision.stamp.generation if decision.stamp else 0) == (Reason.UPDATING, 4)
    assert len(decision.delete) == 2


def test_pods_that_are_starting_stand_for_a_while() -> None:
    decision = decide(STARTING)
    assert (decision.keep_template, decision.delete) == (True, ())
    assert decision.look_again_s == MADE_S + POLICY.settle_s
    assert_moves(decide(STARTING, decision.look_again_s))


OTHERS = {
    "ready": {"ready": True, "ready_changed_s": NOW_S - 1.0},
    "ended": {"ended": Ended("Error", 1, "no such file")},
    "of an earlier start": {"generation": 2},
    "made by a clock ahead of ours": {"created_s": NOW_S + 60.0},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_others_do_not_wait(changes: dict[str, object]) -> None:
    assert_moves(decide(replace(STARTING, **changes)))  # type: ignore[arg-type]
