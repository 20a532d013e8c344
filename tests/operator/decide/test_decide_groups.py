"""Each way a group can fail, and what the operator does about it; then random walks over a simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import GroupState
from kimi_operator.decide.evidence import Patience, Scene
from kimi_operator.decide.groups import GroupDecision, GroupPolicy, GroupWanted, decide_group, without_stamp
from kimi_operator.decide.rollout import decide_groups
from kimi_operator.observe import Ended, GroupSeen, NodeSeen, PodSeen
from kimi_operator.render.names import GroupKey
from simulated_cluster import OWNER, SimulatedCluster

KEY = GroupKey(Role.DECODE, 0)
NOW_S = 10_000.0
POLICY = GroupPolicy(patience=Patience(start_s=600.0, node_s=20.0))
WANTED = GroupWanted(KEY, "k3", OWNER, replicas=2, revision="v1-a")


def pod(ordinal: int, **changes: object) -> PodSeen:
    """A pod that is ready since 9,000."""
    base = PodSeen(
        f"k3-decode-0-{ordinal}", f"uid-{ordinal}", 3, "v1-a", 8_900.0, node=f"n{ordinal}", phase="Running",
        ready=True, ready_changed_s=9_000.0, started_s=8_910.0,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def group(*pods: PodSeen, **changes: object) -> GroupSeen:
    """A group at generation 3, revision v1-a, restarted once long ago."""
    base = GroupSeen(KEY, "set-uid", OWNER, 3, "v1-a", 2, pods=pods, restarts=2)
    return replace(base, **changes)  # type: ignore[arg-type]


def decide(
    seen: GroupSeen | None,
    wanted: GroupWanted = WANTED,
    nodes: dict[str, NodeSeen] | None = None,
    now_s: float = NOW_S,
    may_roll: bool = False,
) -> GroupDecision:
    nodes = {"n0": NodeSeen("n0"), "n1": NodeSeen("n1")} | (nodes or {})
    return decide_group(wanted, seen, Scene(nodes, now_s), POLICY, may_roll=may_roll)


def assert_restarts(decision: GroupDecision, pod_name: str, *words: str) -> None:
    assert decision.restarted
    assert decision.reason is Reason.GROUP_RESTARTING
    assert decision.stamp is not None
    assert (decision.stamp.generation, decision.stamp.restarts, decision.stamp.streak) == (4, 3, 1)
    assert decision.stamp.failure is not None
    assert decision.stamp.failure.pod == pod_name
    assert all(word in decision.stamp.failure.message for word in words), decision.stamp.failure.message


def test_a_healthy_group_is_left_alone() -> None:
    decision = decide(group(pod(0), pod(1)))
    assert decision.state is GroupState.READY
    assert decision.stamp is not None
    assert (decision.stamp.generation, decision.stamp.restarts, decision.stamp.streak) == (3, 2, 0)
    assert not decision.delete
    assert decision.look_again_s is None


def test_a_missing_group_is_created_at_generation_one() -> None:
    decision = decide(None)
    assert decision.state is GroupState.PENDING
    assert decision.stamp is not None
    assert (decision.stamp.generation, decision.replicas) == (1, 2)


KILLED = Ended("Error", 137, "")
FAILURES = {
    "container ended": (pod(1, started_s=None, ready=False, ready_changed_s=9_990.0, ended=KILLED), ("137",)),
    "worker said why": (pod(1, started_s=None, ready=False, ended=Ended("Error", 1, "rank 3: NaN")), ("rank 3: NaN",)),
    "restarted in place": (pod(1, restarts=1, ready=False, ended=KILLED, started_s=9_995.0), ("137",)),
    "restarted in place and ready": (pod(1, restarts=1), ("restarted 1 times",)),
    "crashed, then deleted by hand": (pod(1, deleting=True, ended=KILLED, started_s=None, ready=False), ("137",)),
    "evicted": (pod(1, phase="Failed", ready=False, status_message="low on disk"), ("failed", "low on disk")),
    "replaced unseen": (pod(1, created_s=9_500.0, started_s=9_510.0, ready=False, ready_changed_s=9_500.0),
                        ("replaced", "k3-decode-0-0")),
    "never ready": (pod(1, started_s=9_300.0, created_s=8_900.0, ready=False, ready_changed_s=8_900.0),
                    ("was not ready within 600 s",)),
    "lost readiness": (pod(1, ready=False, ready_changed_s=9_390.0), ("lost readiness",)),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "words"), FAILURES.values(), ids=FAILURES.keys())
def test_each_failure_restarts_the_whole_group_once(broken: PodSeen, words: tuple[str, ...]) -> None:
    decision = decide(group(pod(0), broken))
    assert_restarts(decision, "k3-decode-0-1", *words)
    assert {one.name for one in decision.delete} == {"k3-decode-0-0", "k3-decode-0-1"} - (
        {broken.name} if broken.deleting else set()
    )
    assert decision.grace_s == POLICY.restart_grace_s


LEAVING = {
    "told to leave": (pod(0), pod(1, deleting=True)),
    "both told to leave": (pod(0, deleting=True), pod(1, deleting=True)),
    "drained": (pod(0), pod(1, deleting=True, ready=False, started_s=None, ended=Ended("Completed", 0, ""))),
    "before it was ready": (pod(0, ready=False, ready_changed_s=8_900.0),
                            pod(1, ready=False, ready_changed_s=8_900.0, deleting=True)),
}  # fmt: skip


@pytest.mark.parametrize("pods", LEAVING.values(), ids=LEAVING.keys())
@pytest.mark.parametrize("streak", [0, 2, 5])
def test_a_pod_that_must_leave_drains_its_group_at_nobodys_cost(pods: tuple[PodSeen, PodSeen], streak: int) -> None:
    decision = decide(group(*pods, streak=streak, restarted_s=NOW_S - 1))
    assert decision.restarted
    assert decision.reason is Reason.DRAINING
    assert decision.stamp is not None
    assert (decision.stamp.generation, decision.stamp.restarts, decision.stamp.streak) == (4, 3, streak)
    assert decision.delete == tuple(one for one in pods if not one.deleting)
    assert decision.grace_s is None


def test_a_pod_that_leaves_a_lost_node_is_a_failure() -> None:
    away = {"n1": NodeSeen("n1", ready=False, ready_changed_s=NOW_S - 5)}
    assert_restarts(decide(group(pod(0), pod(1, deleting=True)), nodes=away), "k3-decode-0-1", "deleted")
    peers = {"n0": NodeSeen("n0", ready=False, ready_changed_s=NOW_S - 5)}
    assert_restarts(decide(group(pod(0), pod(1, deleting=True)), nodes=peers), "k3-decode-0-1", "deleted")


def test_a_peer_that_lost_readiness_betrays_a_replaced_pod_too() -> None:
    lost = pod(0, ready=False, ready_changed_s=9_800.0)
    fresh = pod(1, created_s=9_790.0, started_s=9_795.0, ready=False, ready_changed_s=9_790.0)
    assert_restarts(decide(group(lost, fresh)), "k3-decode-0-1", "replaced")


def test_a_pod_that_is_gone_restarts_a_group_that_had_formed() -> None:
    assert_restarts(decide(group(pod(0))), "k3-decode-0-0", "1 of the group's 2 pods are gone")


def test_a_pod_that_comes_late_to_a_starting_group_is_no_failure() -> None:
    """Its predecessor took long to leave; nobody was ready before it came."""
    early = pod(0, ready=False, ready_changed_s=8_900.0, started_s=9_900.0)
    late = pod(1, created_s=9_950.0, started_s=None, ready=False, ready_changed_s=9_950.0)
    decision = decide(group(early, late))
    assert not decision.restarted
    assert decision.state is GroupState.PENDING
    assert decision.look_again_s == 9_900.0 + 600.0


def test_the_slower_of_two_pods_to_become_ready_is_no_failure() -> None:
    slow = pod(1, ready=False, ready_changed_s=8_900.0, started_s=9_990.0)
    decision = decide(group(pod(0, ready_changed_s=9_995.0, started_s=9_990.0), slow))
    assert not decision.restarted
    assert decision.state is GroupState.STARTING
    assert decision.message == "1 of 2 pods ready"


def test_a_pod_whose_node_is_not_ready_is_told_while_its_grace_lasts() -> None:
    away = {"n1": NodeSeen("n1", ready=False, ready_changed_s=NOW_S - 5)}
    decision = decide(group(pod(0), pod(1, ready=False, ready_changed_s=NOW_S - 5)), nodes=away)
    assert not decision.restarted
    assert decision.message == f"1 of 2 pods ready; node n1 of {pod(1).name} is NotReady"


def test_a_killed_process_is_told_by_its_signal_and_the_end_of_its_log() -> None:
    log = "x" * 3_000 + '\n{"event": "stepped"}\n'
    text = "ended with exit code 137 (Error); its log ends: "
    assert str(Ended("Error", 137, log)) == text + '{"event": "stepped"}'
    assert str(Ended("Error", 137, "y" * 900)) == text + "y" * 300
    assert str(Ended("Error", 1, "rank 3: NaN")) == "rank 3: NaN"


def test_a_short_loss_of_readiness_is_no_failure() -> None:
    decision = decide(group(pod(0), pod(1, ready=False, ready_changed_s=9_990.0)))
    assert not decision.restarted
    assert decision.look_again_s == 9_990.0 + 600.0


def test_nothing_is_judged_while_pods_of_the_last_start_leave() -> None:
    leaving = pod(1, generation=2, deleting=True)
    decision = decide(group(pod(0, ended=KILLED, restarts=1, ready=False), leaving, streak=1, restarted_s=9_990.0))
    assert not decision.restarted
    assert decision.state is GroupState.DRAINING
    assert not decision.delete


def test_a_pod_made_from_the_old_template_goes_without_counting() -> None:
    """The StatefulSet recreated it before it had seen the new generation."""
    decision = decide(group(pod(0, ready=False), pod(1, generation=2), streak=1, restarted_s=9_999.0))
    assert [one.name for one in decision.delete] == ["k3-decode-0-1"]
    assert decision.stamp is not None
    assert (decision.stamp.generation, decision.stamp.restarts) == (3, 2)


@pytest.mark.parametrize(("streak", "delay_s"), [(1, 10), (2, 20), (3, 40), (4, 80)])
def test_later_restarts_wait_longer(streak: int, delay_s: float) -> None:
    broken = group(pod(0), pod(1, ended=KILLED, ready=False), streak=streak, restarted_s=NOW_S - delay_s + 1)
    waiting = decide(broken)
    assert (waiting.state, waiting.restarted, waiting.retry_s) == (GroupState.FAILED, False, NOW_S + 1)
    assert waiting.look_again_s == NOW_S + 1
    assert not waiting.delete
    assert decide(broken, now_s=NOW_S + 1).restarted


def test_back_off_never_exceeds_five_minutes() -> None:
    policy = replace(POLICY, restart_budget=100)
    broken = group(pod(0), pod(1, ended=KILLED, ready=False), streak=40, restarted_s=NOW_S)
    decision = decide_group(WANTED, broken, Scene({}, NOW_S), policy, may_roll=False)
    assert decision.retry_s == NOW_S + 300.0


def test_a_restart_that_is_noted_for_a_time_to_come_holds_nothing_up() -> None:
    broken = group(pod(0), pod(1, ended=KILLED, ready=False), streak=1, restarted_s=253_402_300_799.0)
    assert decide(broken).restarted


def test_past_its_budget_a_group_stays_failed_with_its_pods() -> None:
    broken = group(pod(0), pod(1, ended=Ended("Error", 1, "no such file"), ready=False), streak=5, restarted_s=0.0)
    decision = decide(broken)
    assert (decision.state, decision.reason) == (GroupState.FAILED, Reason.RESTART_BUDGET_EXHAUSTED)
    assert not decision.delete
    assert decision.look_again_s is None
    assert "no such file" in decision.message
    assert "kubectl delete pod k3-decode-0-0 k3-decode-0-1" in decision.message


def test_a_failed_group_recovers_when_the_spec_changes() -> None:
    broken = group(pod(0), pod(1, ended=KILLED, ready=False), streak=5)
    decision = decide(broken, replace(WANTED, revision="v1-b"), may_roll=True)
    assert decision.stamp is not None
    assert (decision.stamp.generation, decision.stamp.streak, decision.keep_template) == (4, 0, False)
    assert len(decision.delete) == 2


def test_a_failed_group_tries_again_when_all_its_pods_were_deleted_by_hand() -> None:
    fresh = [pod(i, created_s=9_990.0, started_s=9_995.0, ready=False, ready_changed_s=9_990.0) for i in range(2)]
    decision = decide(group(*fresh, streak=5, restarted_s=9_000.0))
    assert decision.state is GroupState.STARTING


def test_ten_minutes_of_ready_give_the_budget_back() -> None:
    recent = decide(group(pod(0), pod(1, ready_changed_s=9_500.0), streak=3))
    assert recent.stamp is not None
    assert (recent.stamp.streak, recent.look_again_s) == (3, 9_500.0 + 600.0)
    stable = decide(group(pod(0), pod(1), streak=3))
    assert stable.stamp is not None
    assert (stable.stamp.streak, stable.stamp.generation, stable.stamp.restarts) == (0, 3, 2)


def test_a_node_may_be_away_for_its_grace_and_no_longer() -> None:
    away = {"n1": NodeSeen("n1", ready=False, ready_changed_s=NOW_S - 5)}
    patient = decide(group(pod(0), pod(1, ready=False, ready_changed_s=NOW_S - 5)), nodes=away)
    assert not patient.restarted
    assert patient.look_again_s == NOW_S + 15
    assert_restarts(decide(group(pod(0), pod(1)), nodes=away, now_s=NOW_S + 15), "k3-decode-0-1", "n1", "NotReady")


def test_pods_on_a_lost_node_are_forced_only_once_it_is_tainted() -> None:
    seen = group(pod(0, ready=False), pod(1, generation=2, deleting=True), streak=1, restarted_s=9_900.0)
    away = NodeSeen("n1", ready=False, ready_changed_s=9_000.0)
    waiting = decide(seen, nodes={"n1": away})
    assert not waiting.force_delete
    assert waiting.reason is Reason.NODE_LOST
    assert "node n1, which is NotReady" in waiting.message
    assert "out-of-service" in waiting.message
    forced = decide(seen, nodes={"n1": replace(away, out_of_service=True)})
    assert [one.name for one in forced.force_delete] == ["k3-decode-0-1"]
    assert forced.reason is Reason.GROUP_RESTARTING


def test_anothers_stateful_set_is_not_touched() -> None:
    decision = decide(group(pod(0), owner_uid="somebody"))
    assert (decision.stamp, decision.reason) == (None, Reason.NAME_CONFLICT)
    assert not decision.delete


def test_a_stateful_set_on_its_way_out_is_waited_for() -> None:
    decision = decide(group(pod(0), deleting=True))
    assert (decision.stamp, decision.state) == (None, GroupState.DRAINING)


def test_suspension_and_resumption_do_not_cost_a_restart() -> None:
    suspended = decide(group(pod(0), pod(1)), replace(WANTED, suspended=True))
    assert (suspended.replicas, suspended.state, suspended.delete) == (0, GroupState.DRAINING, ())
    resumed = decide(group(pod(0, deleting=True), replicas=0))
    assert resumed.stamp is not None
    assert (resumed.stamp.generation, resumed.stamp.restarts, resumed.replicas) == (4, 2, 2)


def test_an_outdated_group_is_held_until_its_turn_but_still_restarted() -> None:
    newer = replace(WANTED, revision="v1-b")
    held = decide(group(pod(0), pod(1)), newer)
    assert (held.state, held.keep_template) == (GroupState.READY, True)
    broken = decide(group(pod(0), pod(1, ended=KILLED, ready=False)), newer)
    assert broken.restarted
    assert broken.keep_template


@pytest.mark.parametrize("broken", [pod(1, ended=KILLED, ready=False), pod(1, deleting=True), pod(1)])
def test_a_group_that_nothing_is_rendered_for_keeps_its_template(broken: PodSeen) -> None:
    decision = decide(group(pod(0), broken), replace(WANTED, keeps_template=True))
    assert decision.keep_template


def test_a_stamp_that_was_not_taken_is_no_restart() -> None:
    scene = Scene({}, NOW_S)
    broken = group(pod(0), pod(1, ended=KILLED, ready=False))
    failed = without_stamp(WANTED, broken, scene, POLICY)
    assert (failed.state, failed.restarted, failed.delete) == (GroupState.FAILED, False, ())
    assert failed.stamp is not None
    assert (failed.stamp.generation, failed.stamp.restarts, failed.stamp.streak) == (3, 2, 0)
    outdated = without_stamp(replace(WANTED, revision="v1-b"), group(pod(0), pod(1)), scene, POLICY)
    assert (outdated.state, outdated.keep_template) == (GroupState.READY, True)
    assert without_stamp(WANTED, None, scene, POLICY).state is GroupState.PENDING


HOMELESS = pod(
    1, unschedulable="3 Insufficient amd.com/gpu.", node=None, ready=False, ready_changed_s=None, started_s=None,
    phase="Pending",
)  # fmt: skip


@pytest.mark.parametrize("streak", [0, 5])
@pytest.mark.parametrize(
    "waiter",
    [pod(0, restarts=1, ready=False, ended=KILLED), pod(0, ready=False, started_s=100.0, ready_changed_s=50.0)],
)
def test_a_group_with_a_pod_that_has_no_node_is_not_judged(waiter: PodSeen, streak: int) -> None:
    decision = decide(group(waiter, HOMELESS, streak=streak))
    assert (decision.state, decision.reason) == (GroupState.PENDING, Reason.INSUFFICIENT_CAPACITY)
    assert decision.message == "k3-decode-0-1: 3 Insufficient amd.com/gpu."
    assert not decision.restarted


def test_a_group_whose_pods_cannot_be_made_is_not_judged() -> None:
    refused = group(pod(0), streak=5, creation_failure='pods "k3-decode-0-1" is forbidden: exceeded quota')
    decision = decide(refused)
    assert (decision.state, decision.reason, decision.restarted) == (GroupState.PENDING, Reason.PODS_REFUSED, False)
    assert "exceeded quota" in decision.message


def test_a_pod_that_waited_in_vain_for_a_peer_without_a_node_costs_nothing() -> None:
    gave_up = replace(KILLED, at_s=9_700.0)
    waiter = pod(0, restarts=1, ready=False, ready_changed_s=8_900.0, ended=gave_up, started_s=9_705.0)
    late = replace(HOMELESS, unschedulable=None, node="n1", scheduled_s=9_990.0)
    revived = decide(group(waiter, late, streak=5, restarted_s=9_000.0))
    assert revived.restarted
    assert revived.stamp is not None
    assert (revived.stamp.generation, revived.stamp.streak) == (4, 5)
    punctual = replace(late, scheduled_s=late.created_s + 1.0)
    assert decide(group(waiter, punctual, streak=5)).reason is Reason.RESTART_BUDGET_EXHAUSTED
    formed = replace(waiter, ready_changed_s=9_800.0)
    assert decide(group(formed, late, streak=5)).reason is Reason.RESTART_BUDGET_EXHAUSTED


def decide_rollout(*groups: GroupSeen) -> dict[int, GroupDecision]:
    """Decode groups by index, all of which should be at v1-b."""
    seen = {GroupKey(Role.DECODE, index): replace(one, key=GroupKey(Role.DECODE, index))
            for index, one in enumerate(groups)}  # fmt: skip
    wanted = [replace(WANTED, key=key, revision="v1-b") for key in seen]
    nodes = {name: NodeSeen(name) for name in ("n0", "n1")}
    decisions = decide_groups(wanted, seen, Scene(nodes, NOW_S), POLICY, paused=False)
    return {key.group: decision for key, decision in decisions.items()}


def rolled(decisions: dict[int, GroupDecision]) -> list[int]:
    return [index for index, one in decisions.items() if one.reason is Reason.UPDATING]


STEADY = group(pod(0), pod(1))
BLIP = group(pod(0), pod(1, ready=False, ready_changed_s=9_995.0))
CRASHED = group(pod(0), pod(1, ended=KILLED, ready=False))
NEVER = group(*(pod(i, ready=False, ready_changed_s=8_900.0, started_s=9_900.0) for i in range(2)))
UPDATED = group(*(pod(i, revision="v1-b") for i in range(2)), revision="v1-b")
UPDATING = replace(NEVER, revision="v1-b")


def test_a_blip_of_readiness_is_no_leave_to_replace_a_group() -> None:
    assert rolled(decide_rollout(UPDATING, STEADY, BLIP)) == []
    assert rolled(decide_rollout(UPDATED, BLIP, BLIP)) == []
    assert rolled(decide_rollout(UPDATED, STEADY, BLIP)) == [2]
    assert rolled(decide_rollout(UPDATED, STEADY, STEADY)) == [1]


def test_groups_that_serve_nobody_are_replaced_together_unless_the_new_revision_has_yet_to_show_itself() -> None:
    assert rolled(decide_rollout(NEVER, CRASHED, STEADY)) == [0, 1]
    held = decide_rollout(UPDATING, CRASHED, NEVER)
    assert rolled(held) == []
    assert held[1].restarted
    assert held[1].keep_template


HOPELESS = {
    "starts for the first time": replace(NEVER, restarts=0),
    "budget spent": replace(CRASHED, streak=5),
    "no image": group(pod(0, ready=False, started_s=None, waiting=("ErrImagePull", "no")), pod(1, started_s=None)),
}


@pytest.mark.parametrize("hopeless", HOPELESS.values(), ids=HOPELESS.keys())
def test_a_group_without_a_prospect_is_replaced_whatever_the_others_do(hopeless: GroupSeen) -> None:
    assert rolled(decide_rollout(UPDATING, hopeless, STEADY)) == [1]


BLOCKS = {
    "capacity": ({"unschedulable": "0/4 nodes are available: 3 Insufficient amd.com/gpu.", "node": None},
                 Reason.INSUFFICIENT_CAPACITY, "3 Insufficient amd.com/gpu"),
    "image": ({"waiting": ("ImagePullBackOff", "not found")}, Reason.IMAGE_UNAVAILABLE, "not found"),
    "volume": ({"mount_failure": 'MountVolume.SetUp failed for volume "checkpoint": /x is not a directory'},
               Reason.WEIGHTS_MISSING, "/x is not a directory"),
    "container": ({"waiting": ("CreateContainerConfigError", 'secret "token" not found')},
                  Reason.PODS_NOT_READY, 'secret "token" not found'),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason", "words"), BLOCKS.values(), ids=BLOCKS.keys())
def test_a_group_that_cannot_start_says_why(change: dict[str, object], reason: Reason, words: str) -> None:
    stuck = pod(1, ready=False, started_s=None, ready_changed_s=None, phase="Pending", **change)
    decision = decide(group(pod(0, ready=False, ready_changed_s=8_900.0, started_s=9_990.0), stuck))
    assert (decision.state, decision.reason) == (GroupState.PENDING, reason)
    assert words in decision.message


# -- random walks --------------------------------------------------------------


def wanted_groups(groups: int, revision: str = "v1-a") -> list[GroupWanted]:
    return [
        GroupWanted(GroupKey(role, index), "k3", OWNER, replicas=2, revision=revision)
        for role in Role
        for index in range(groups)
    ]


def started(seed: int, groups: int = 2) -> SimulatedCluster:
    cluster = SimulatedCluster(seed, wanted_groups(groups), POLICY)
    cluster.run_until_settled(limit_s=300)
    return cluster


@pytest.mark.parametrize("seed", range(25))
def test_one_failure_gives_exactly_one_restart(seed: int) -> None:
    cluster = started(seed)
    key = cluster.rng.choice(sorted(cluster.sets))
    ordinal = cluster.rng.randrange(2)
    match seed % 4:
        case 0:
            cluster.kill_container(cluster.sets[key], ordinal)
        case 1:
            cluster.delete_pod(key, ordinal)
        case 2:
            cluster.vanish_pod(key, ordinal)
        case _:
            cluster.kill_container(cluster.sets[key], 0)
            cluster.kill_container(cluster.sets[key], 1)
    # The operator may be away for a while, looking seldom.
    every_s = cluster.rng.choice([2.0, 10.0, 20.0])
    cluster.run(for_s=60, every_s=every_s)
    cluster.run_until_settled(limit_s=240, every_s=every_s)
    assert {name: one.seen.restarts for name, one in cluster.sets.items()} == {
        name: int(name == key) for name in cluster.sets
    }


@pytest.mark.parametrize("seed", range(7))
def test_a_drained_node_ends_no_request_and_costs_no_budget(seed: int) -> None:
    """Every pod of the node is told to leave; the operator looks while they do."""
    cluster = started(seed)
    key = cluster.rng.choice(sorted(cluster.sets))
    cluster.graces.clear()
    for _ in range(4):
        cluster.delete_pod(key, cluster.rng.randrange(2))
        cluster.operate()
        cluster.run_until_settled(limit_s=400)
    assert set(cluster.graces) == {None}
    assert (cluster.sets[key].seen.restarts, cluster.sets[key].seen.streak) == (4, 0)


@pytest.mark.parametrize("seed", range(7))
def test_a_group_that_waits_for_a_node_keeps_its_budget_and_starts_when_one_comes(seed: int) -> None:
    cluster = SimulatedCluster(seed, wanted_groups(2), POLICY)
    cluster.num_places, cluster.peer_patience_s = cluster.rng.randrange(1, 8), 60.0
    cluster.run(for_s=1000)
    assert all(one.seen.streak == 0 for one in cluster.sets.values())
    unready = [one for one in cluster.decisions.values() if one.state is not GroupState.READY]
    assert unready
    assert {one.reason for one in unready} == {Reason.INSUFFICIENT_CAPACITY}
    cluster.num_places = 8
    cluster.run_until_settled(limit_s=400)
    assert all(one.seen.streak == 0 for one in cluster.sets.values())


@pytest.mark.parametrize("seed", range(15))
def test_a_lost_node_and_its_return(seed: int) -> None:
    cluster = started(seed)
    name = next(pod.node for pod in cluster.sets[KEY].pods.values())
    assert name is not None
    cluster.stop_node(name)
    cluster.run(for_s=200)
    if seed % 2:
        cluster.start_node(name)
    else:
        cluster.nodes[name] = replace(cluster.nodes[name], out_of_service=True)
    cluster.run_until_settled(limit_s=1500)


@pytest.mark.parametrize("seed", range(15))
def test_a_rollout_takes_one_group_at_a_time(seed: int) -> None:
    cluster = started(seed)
    cluster.wanted = wanted_groups(2, "v1-b")
    for _ in range(600):
        if cluster.rng.random() < 0.05:
            cluster.blip(cluster.rng.choice(sorted(cluster.sets)), cluster.rng.randrange(2))
        cluster.run(for_s=2)
        if cluster.settled():
            break
        formed = [key for key in cluster.sets if cluster.has_formed(key)]
        assert len(formed) >= len(cluster.sets) - 1
    assert cluster.settled()
    assert all(one.seen.restarts == 0 for one in cluster.sets.values())


@pytest.mark.parametrize("seed", range(10))
def test_a_bad_revision_stops_at_its_first_group_and_a_good_one_follows(seed: int) -> None:
    cluster = started(seed)
    cluster.broken_revisions.add("v1-bad")
    cluster.wanted = wanted_groups(2, "v1-bad")
    cluster.run(for_s=600)
    assert [one.seen.revision for one in cluster.sets.values()].count("v1-bad") == 1
    stuck = [decision for decision in cluster.decisions.values() if decision.state is GroupState.FAILED]
    assert [decision.reason for decision in stuck] == [Reason.RESTART_BUDGET_EXHAUSTED]
    for key, one in cluster.sets.items():
        if one.seen.revision == "v1-a":
            cluster.kill_container(one, 0)
            cluster.run(for_s=120)
            assert cluster.has_formed(key)
    assert [one.seen.revision for one in cluster.sets.values()].count("v1-bad") == 1
    cluster.wanted = wanted_groups(2, "v1-good")
    cluster.run_until_settled(limit_s=800)


def test_pausing_holds_the_revision_and_still_heals() -> None:
    cluster = started(3)
    cluster.paused = True
    cluster.wanted = wanted_groups(2, "v1-b")
    cluster.kill_container(cluster.sets[KEY], 1)
    cluster.run(for_s=120)
    assert {one.seen.revision for one in cluster.sets.values()} == {"v1-a"}
    assert cluster.sets[KEY].seen.restarts == 1
    assert all(decision.state is GroupState.READY for decision in cluster.decisions.values())
    cluster.paused = False
    cluster.run_until_settled(limit_s=600)


@pytest.mark.parametrize("seed", range(40))
def test_random_faults_and_changes_always_converge(seed: int) -> None:
    """Kill, delete, lose nodes, change revisions and sizes, suspend: left alone, everything is ready again."""
    cluster = started(seed)
    cluster.policy = replace(POLICY, restart_budget=1000, max_delay_s=40.0)
    for change in range(25):
        key = cluster.rng.choice(sorted(cluster.sets))
        ordinal = cluster.rng.randrange(2)
        match cluster.rng.randrange(9):
            case 0 if ordinal in cluster.sets[key].pods:
                cluster.kill_container(cluster.sets[key], ordinal)
            case 1:
                cluster.delete_pod(key, ordinal)
            case 2:
                cluster.vanish_pod(key, ordinal)
            case 3:
                cluster.stop_node(cluster.rng.choice(sorted(cluster.nodes)))
            case 4:
                cluster.start_node(cluster.rng.choice(sorted(cluster.nodes)))
            case 5:
                cluster.wanted = wanted_groups(cluster.rng.randint(1, 3), f"v1-{change}")
            case 6:
                suspended = cluster.rng.random() < 0.3
                cluster.wanted = [replace(one, suspended=suspended) for one in cluster.wanted]
            case 7:
                cluster.blip(key, ordinal)
            case _:
                cluster.paused = cluster.rng.random() < 0.2
        cluster.run(for_s=cluster.rng.choice([2, 10, 60]), every_s=cluster.rng.choice([2.0, 6.0]))
    cluster.paused = False
    for name in sorted(cluster.nodes):
        cluster.start_node(name)
    cluster.wanted = [replace(one, suspended=False) for one in cluster.wanted]
    cluster.run_until_settled(limit_s=2500)
