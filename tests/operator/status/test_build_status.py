"""Conditions and counts, for each situation that a user may find."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from kimi_operator.api.conditions import ConditionType, Reason
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import KimiDeploymentStatus, MeasuredFabric, MeasuredPools, PlanStatus, RolePlanStatus
from kimi_operator.decide.capacity import Capacity, find_shortage
from kimi_operator.decide.evidence import Patience, Scene
from kimi_operator.decide.groups import GroupPolicy, GroupWanted
from kimi_operator.decide.rollout import decide_groups
from kimi_operator.look import Look, Refusal
from kimi_operator.observe import Ended, FailureSeen, GroupSeen, NodeSeen, Observed, PodSeen, RouterSeen
from kimi_operator.render.names import GroupKey
from kimi_operator.status import build_status

NOW_S = 10_000.0
NODES = {f"node{i}": NodeSeen(f"node{i}", gpus={"amd.com/gpu": 8}) for i in range(4)}
PREFILL, DECODE = GroupKey(Role.PREFILL, 0), GroupKey(Role.DECODE, 0)
ROLE_PLAN = RolePlanStatus(
    ranks=16, lanes=8, experts_per_rank=56, max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=900_000,
    num_pages=1000, page_size_tokens=64, num_state_slots=34, binds="maxNumSeqs binds",
)  # fmt: skip
PLAN = PlanStatus(
    architecture="kimi-k3", profile="mi300x", gpus=32, kv_cache_dtype="bfloat16", experts="MXFP4", transport="NIXL",
    prefill=ROLE_PLAN, decode=ROLE_PLAN,
)  # fmt: skip
ROUTER = RouterSeen(desired=2, ready=2, updated=2, settled=True)


def wanted(revision: str = "v1-a", suspended: bool = False) -> list[GroupWanted]:
    return [GroupWanted(key, "k3", "owner", 2, revision, suspended) for key in (PREFILL, DECODE)]


def group(key: GroupKey, changes: dict[int, dict[str, Any]] | None = None, **fields: Any) -> GroupSeen:
    """A ready group on two nodes; `changes` by ordinal."""
    first_node = 0 if key.role is Role.PREFILL else 2
    pods = []
    for ordinal in range(2):
        pod = PodSeen(
            f"k3-{key.role}-0-{ordinal}", f"{key.role}-{ordinal}", 1, "v1-a", 8_000.0, ip="10.0.0.1",
            node=f"node{first_node + ordinal}", phase="Running", ready=True, ready_changed_s=9_000.0, started_s=8_100.0,
        )  # fmt: skip
        pods.append(replace(pod, **(changes or {}).get(ordinal, {})))
    return replace(GroupSeen(key, f"set-{key.role}", "owner", 1, "v1-a", 2, pods=tuple(pods)), **fields)


def look(
    prefill: GroupSeen | None = None,
    decode: GroupSeen | None = None,
    groups: list[GroupWanted] | None = None,
    paused: bool = False,
    **fields: Any,
) -> Look:
    """A look at a deployment whose groups are ready unless told otherwise."""
    seen = {PREFILL: prefill or group(PREFILL), DECODE: decode or group(DECODE)}
    groups = groups or wanted()
    decisions = decide_groups(
        groups, seen, Scene(NODES, NOW_S), GroupPolicy(patience=Patience(start_s=5_000.0)), paused=paused
    )
    base = Look(
        name="k3", namespace="ns", generation=7, now_s=NOW_S, seen=Observed(seen, ROUTER, NODES), plan=PLAN,
        wanted=groups, decisions=decisions, revision="v1-all", revisions=dict.fromkeys(Role, groups[0].revision),
        desired=dict.fromkeys(Role, 1), router_replicas=2, is_paused=paused, is_suspended=groups[0].suspended,
    )  # fmt: skip
    return replace(base, **fields)


def conditions(a_look: Look) -> dict[str, tuple[str, str, str]]:
    status = build_status(a_look)
    KimiDeploymentStatus.model_validate_json(json.dumps(status))
    assert [one["type"] for one in status["conditions"]] == [kind.value for kind in ConditionType]
    assert all(one["observedGeneration"] == 7 for one in status["conditions"])
    return {one["type"]: (one["status"], one["reason"], one["message"]) for one in status["conditions"]}


def test_a_healthy_deployment_is_ready_in_every_way() -> None:
    pools = MeasuredPools(num_pages=1000, num_state_slots=34, max_num_seqs=32, weights_bytes=1)
    found = conditions(look(measured={PREFILL: pools, DECODE: pools}))
    assert found["Ready"][:2] == ("True", "AsDesired")
    for kind in ("Available", "PlanResolved", "PrefillReady", "DecodeReady", "RouterReady", "WeightsReady"):
        assert found[kind][0] == "True", kind
    assert found["CapacityAvailable"] == ("True", "CapacitySufficient", "4 pods have their nodes")
    for kind in ("Progressing", "Degraded", "Stalled", "ScalingActive"):
        assert found[kind][0] == "False", kind
    assert found["FabricVerified"][:2] == ("Unknown", "NotChecked")


def test_counts_and_addresses_stand_beside_the_conditions() -> None:
    status = build_status(look())
    decode = status["decode"]
    assert (decode["desired"], decode["current"], decode["ready"], decode["updated"]) == (1, 1, 1, 1)
    assert (decode["summary"], decode["revision"]) == ("1/1", "v1-a")
    assert decode["selector"] == "kimi-operator.io/deployment=k3,kimi-operator.io/role=decode"
    assert decode["groups"][0]["readyPods"] == 2
    assert status["router"] == {"desired": 2, "ready": 2}
    assert status["url"] == "http://k3-router.ns.svc:8000"
    assert status["observedGeneration"] == 7
    assert status["plan"]["decode"]["numPages"] == 1000


def test_times_change_with_the_status_and_with_nothing_else() -> None:
    before = build_status(look())
    later = build_status(look(now_s=NOW_S + 500, previous=before, generation=7))
    assert later == before
    broken = look(decode=group(DECODE, {1: {"ready": False, "ready_changed_s": 9_990.0}}))
    after = build_status(replace(broken, now_s=NOW_S + 500, previous=before))
    moved = {
        new["type"]
        for old, new in zip(before["conditions"], after["conditions"], strict=True)
        if old["lastTransitionTime"] != new["lastTransitionTime"]
    }
    assert moved == {"Ready", "Available", "Progressing", "DecodeReady", "WeightsReady"}


def test_a_shortage_is_exact() -> None:
    words = "0/4 nodes are available: 4 Insufficient amd.com/gpu."
    refused = {1: {"unschedulable": words, "node": None, "ready": False, "started_s": None}}
    a_look = look(decode=group(DECODE, refused))
    in_use = {"node0": 8, "node1": 8, "node2": 8, "node3": 4}
    shortage = find_shortage(wanted(), a_look.seen, Capacity("amd.com/gpu", {"prefill": 8, "decode": 8}, in_use))
    assert shortage is not None
    assert shortage.startswith("needs 4 nodes x 8 amd.com/gpu, 3 free; k3-decode-0-1: 0/4 nodes")
    found = conditions(replace(a_look, shortage=shortage))
    assert found["CapacityAvailable"] == ("False", "InsufficientCapacity", shortage)
    assert found["Ready"][:2] == ("False", "InsufficientCapacity")
    assert shortage in found["Ready"][2]
    assert found["Stalled"][0] == "False"


def refused_by_scheduler(words: str) -> Look:
    return look(decode=group(DECODE, {1: {"unschedulable": words, "node": None, "ready": False, "started_s": None}}))


def shortage_of(a_look: Look, gpus: dict[str, int], in_use: dict[str, int]) -> str | None:
    return find_shortage(wanted(), a_look.seen, Capacity("amd.com/gpu", gpus, in_use))


def test_a_node_is_counted_once_when_roles_differ_in_gpus() -> None:
    """Prefill holds node0 and node1 with 8 GPUs each; decode, with 4, holds node2 and finds no second node."""
    words = "0/4 nodes are available: 1 Insufficient amd.com/gpu, 3 node(s) didn't match pod anti-affinity rules."
    in_use = {"node0": 8, "node1": 8, "node2": 4, "node3": 6}
    shortage = shortage_of(refused_by_scheduler(words), {"prefill": 8, "decode": 4}, in_use)
    assert shortage is not None
    assert shortage.startswith(
        "needs 2 nodes x 4 amd.com/gpu, 1 free; needs 2 nodes x 8 amd.com/gpu, 2 free; k3-decode"
    )


def test_the_larger_need_takes_the_node_that_both_could_use() -> None:
    nothing = {n: {"unschedulable": "0/4: 4 Insufficient amd.com/gpu.", "node": None} for n in range(2)}
    a_look = look(prefill=group(PREFILL, nothing), decode=group(DECODE, nothing))
    shortage = shortage_of(a_look, {"prefill": 8, "decode": 4}, {"node0": 0, "node1": 4, "node2": 8, "node3": 8})
    assert shortage is not None
    assert shortage.startswith("needs 2 nodes x 4 amd.com/gpu, 1 free; needs 2 nodes x 8 amd.com/gpu, 1 free; ")


@pytest.mark.parametrize(
    "words",
    [
        '0/4 nodes are available: persistentvolumeclaim "kimi-k3" not found. not found',
        "0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
    ],
)
def test_a_missing_claim_is_a_missing_checkpoint(words: str) -> None:
    a_look = refused_by_scheduler(words)
    assert shortage_of(a_look, {"prefill": 8, "decode": 8}, {}) is None
    found = conditions(a_look)
    assert found["WeightsReady"][:2] == ("False", "WeightsMissing")
    assert words in found["WeightsReady"][2]
    assert found["Ready"][:2] == ("False", "WeightsMissing")
    assert found["CapacityAvailable"][0] == "Unknown"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("0/4 nodes are available: 4 node(s) had untolerated taint(s).", "Unschedulable"),
        ("0/4 nodes are available: 4 Insufficient memory.", "InsufficientCapacity"),
    ],
)
def test_no_gpus_are_counted_where_nobody_speaks_of_gpus(words: str, reason: str) -> None:
    a_look = refused_by_scheduler(words)
    shortage = shortage_of(a_look, {"prefill": 8, "decode": 8}, {})
    assert shortage == f"k3-decode-0-1: {words}"
    found = conditions(replace(a_look, shortage=shortage))
    assert found["CapacityAvailable"] == ("False", reason, shortage)
    assert found["Ready"][:2] == ("False", reason)


def test_no_shortage_while_no_pod_is_refused() -> None:
    assert find_shortage(wanted(), look().seen, Capacity("amd.com/gpu", {"prefill": 8, "decode": 8}, {})) is None


NO_CONFIG = Ended("Error", 1, "/models/checkpoint/config.json: No such file or directory")


def test_a_bad_checkpoint_says_so_through_all_restarts() -> None:
    dead = {1: {"ready": False, "started_s": None, "ended": NO_CONFIG}}
    fresh = {n: {"ready": False, "ready_changed_s": 8_000.0} for n in range(2)}
    failure = FailureSeen("2026-01-01T00:00:00Z", "k3-decode-0-1", NO_CONFIG.message)
    first = look(decode=group(DECODE, dead))
    again = look(decode=group(DECODE, fresh, streak=1, restarts=1, failure=failure))
    over = look(decode=group(DECODE, dead, streak=5, restarts=5, failure=failure))
    for one in (first, again, over):
        status, reason, message = conditions(one)["WeightsReady"]
        assert (status, reason) == ("False", "WeightsMissing")
        assert NO_CONFIG.message in message
    assert conditions(again)["Ready"][:2] == ("False", "WeightsMissing")
    stalled = conditions(over)["Stalled"]
    assert stalled[:2] == ("True", "RestartBudgetExhausted")
    assert "kubectl delete pod" in stalled[2]
    groups = build_status(again)["decode"]["groups"]
    assert (groups[0]["restarts"], groups[0]["lastFailure"]["pod"]) == (1, "k3-decode-0-1")


def test_back_off_has_an_end_that_can_be_read() -> None:
    dead = {1: {"ready": False, "started_s": None, "ended": Ended("Error", 137, "")}}
    status = build_status(look(decode=group(DECODE, dead, streak=1, restarts=1, restarted_s=NOW_S - 4)))
    assert status["decode"]["groups"][0]["state"] == "Failed"
    assert status["decode"]["groups"][0]["nextRestartTime"] == "1970-01-01T02:46:46Z"


def test_a_refused_spec_leaves_a_running_service_available() -> None:
    refusal = Refusal(Reason.DOES_NOT_FIT, "spec.prefill: needs 250 GiB a GPU, 192 GiB there")
    found = conditions(look(refusal=refusal))
    for kind, status in (("Ready", "False"), ("PlanResolved", "False"), ("Stalled", "True")):
        assert found[kind] == (status, "DoesNotFit", refusal.message)
    assert found["Available"][0] == "True"


def test_what_the_api_server_refused_is_told() -> None:
    found = conditions(look(apply_refusal=Refusal(Reason.APPLY_REFUSED, "exceeded quota")))
    assert found["Ready"] == ("False", "ApplyRefused", "exceeded quota")
    assert found["Stalled"][:2] == ("True", "ApplyRefused")


def test_a_paused_rollout_is_neither_progress_nor_ready() -> None:
    found = conditions(look(groups=wanted("v1-b"), paused=True))
    assert found["Ready"][:2] == ("False", "Paused")
    assert found["Progressing"][:2] == ("False", "Paused")
    assert found["Available"][0] == "True"


def test_a_rollout_counts_updated_groups_only() -> None:
    a_look = look(groups=wanted("v1-b"))
    status = build_status(a_look)
    assert (status["prefill"]["ready"], status["prefill"]["updated"], status["prefill"]["current"]) == (0, 0, 1)
    assert conditions(a_look)["Ready"][:2] == ("False", "Updating")
    assert conditions(a_look)["Progressing"][:2] == ("True", "Updating")


def test_a_suspended_deployment_is_not_called_broken() -> None:
    found = conditions(look(groups=wanted(suspended=True)))
    assert found["Ready"][:2] == ("False", "Suspended")
    assert found["Stalled"][0] == "False"
    assert found["Degraded"][0] == "False"


def test_a_second_group_that_is_down_degrades_the_service() -> None:
    second = GroupKey(Role.DECODE, 1)
    groups = [*wanted(), GroupWanted(second, "k3", "owner", 2, "v1-a")]
    seen = {PREFILL: group(PREFILL), DECODE: group(DECODE), second: group(second, {0: {"ready": False}})}
    decisions = decide_groups(groups, seen, Scene(NODES, NOW_S), GroupPolicy(), paused=False)
    a_look = look(wanted=groups, decisions=decisions, seen=Observed(seen, ROUTER, NODES))
    found = conditions(a_look)
    assert found["Available"][0] == "True"
    assert found["Degraded"][0] == "True"
    assert "decode group 1" in found["Degraded"][2]


@pytest.mark.parametrize(("pages", "degraded"), [(1000, "False"), (985, "False"), (900, "True"), (1100, "False")])
def test_real_pools_are_held_against_the_plan(pages: int, degraded: str) -> None:
    pools = MeasuredPools(num_pages=pages, num_state_slots=34, max_num_seqs=32, weights_bytes=1)
    a_look = look(measured={PREFILL: pools.model_copy(update={"num_pages": 1000}), DECODE: pools})
    found = conditions(a_look)
    assert found["Degraded"][0] == degraded
    differs = abs(pages - 1000) > 20
    assert found["PlanResolved"][:2] == ("True", "PoolsDiffer" if differs else "PlanFits")
    if differs:
        assert f"decode group 0: {pages} KV pages a lane, planned 1000" in found["PlanResolved"][2]
    assert build_status(a_look)["decode"]["groups"][0]["measured"]["numPages"] == pages


GIB = 2**30
WITH_MEMORY = PLAN.model_copy(
    update={
        "gpu_memory_bytes": 200 * GIB,
        "decode": ROLE_PLAN.model_copy(update={"weights_bytes": 100 * GIB, "free_bytes": 10 * GIB}),
    }
)
OFF = {
    "as planned": (100.0, 10.0, ""),
    "less free, within": (100.0, 6.1, ""),
    "more free, within": (100.0, 13.9, ""),
    "less free": (100.0, 5.9, "decode group 0: 5.9 GiB free on a GPU, planned 10.0 GiB (-2.1% of its 200.0 GiB)"),
    "more free": (100.0, 15.0, "decode group 0: 15.0 GiB free on a GPU, planned 10.0 GiB (+2.5% of its 200.0 GiB)"),
    "weights, within": (101.9, 10.0, ""),
    "more weights": (103.0, 10.0, "decode group 0: 103.0 GiB of weights a GPU, planned 100.0 GiB (+3.0%)"),
    "fewer weights": (97.0, 10.0, "decode group 0: 97.0 GiB of weights a GPU, planned 100.0 GiB (-3.0%)"),
    "nobody can tell": (0.0, None, ""),
}


@pytest.mark.parametrize("case", OFF)
def test_measured_memory_is_held_against_the_plan(case: str) -> None:
    weights, free, words = OFF[case]
    pools = MeasuredPools(
        num_pages=1000, num_state_slots=34, max_num_seqs=32, weights_bytes=int(weights * GIB),
        free_bytes=None if free is None else int(free * GIB),
    )  # fmt: skip
    found = conditions(look(plan=WITH_MEMORY, measured={PREFILL: pools, DECODE: pools}))
    expected = ("True", "MemoryDiffers", words) if words else ("True", "PlanFits", "maxNumSeqs binds")
    assert found["PlanResolved"] == expected
    is_worse = case in {"less free", "more weights"}
    assert found["Degraded"] == (("True", "MemoryDiffers", words) if is_worse else ("False", "AsDesired", ""))
    assert found["Ready"][0] == "True", "it serves what was asked for"


def test_a_group_that_is_down_is_told_before_memory_that_is_short() -> None:
    second = GroupKey(Role.DECODE, 1)
    groups = [*wanted(), GroupWanted(second, "k3", "owner", 2, "v1-a")]
    seen = {PREFILL: group(PREFILL), DECODE: group(DECODE), second: group(second, {0: {"ready": False}})}
    decisions = decide_groups(groups, seen, Scene(NODES, NOW_S), GroupPolicy(), paused=False)
    pools = MeasuredPools(num_pages=1000, num_state_slots=34, max_num_seqs=32, weights_bytes=103 * GIB)
    a_look = look(
        wanted=groups,
        decisions=decisions,
        seen=Observed(seen, ROUTER, NODES),
        plan=WITH_MEMORY,
        measured={PREFILL: pools, DECODE: pools},
    )
    found = conditions(a_look)
    assert found["PlanResolved"][1] == "MemoryDiffers"
    assert "decode group 1" in found["Degraded"][2]


def test_what_a_plan_warns_of_stands_beside_what_binds() -> None:
    plan = PLAN.model_copy(update={"warnings": ("nobody ran it there",)})
    pools = MeasuredPools(num_pages=1000, num_state_slots=34, max_num_seqs=32, weights_bytes=1)
    a_look = look(plan=plan, measured={PREFILL: pools, DECODE: pools})
    assert conditions(a_look)["PlanResolved"] == ("True", "PlanFits", "maxNumSeqs binds; nobody ran it there")
    assert build_status(a_look)["plan"]["warnings"] == ["nobody ran it there"]


def test_nodes_of_another_chip_are_told_first() -> None:
    pools = MeasuredPools(num_pages=900, num_state_slots=34, max_num_seqs=32, weights_bytes=0)
    found = conditions(look(foreign_hardware="node n is another", measured={PREFILL: pools, DECODE: pools}))
    status, reason, message = found["PlanResolved"]
    assert (status, reason) == ("True", "HardwareDiffers")
    assert message.startswith("node n is another; decode group 0: 900 KV pages a lane")


def test_pools_and_memory_that_are_off_are_told_together_and_pools_name_the_reason() -> None:
    pools = MeasuredPools(num_pages=900, num_state_slots=34, max_num_seqs=32, weights_bytes=0, free_bytes=30 * GIB)
    found = conditions(look(plan=WITH_MEMORY, measured={DECODE: pools, PREFILL: pools}))
    assert found["PlanResolved"][1] == "PoolsDiffer"
    assert "decode group 0: 900 KV pages a lane, planned 1000 (-10.0%)" in found["PlanResolved"][2]
    assert "30.0 GiB free on a GPU, planned 10.0 GiB (+10.0% of its 200.0 GiB)" in found["PlanResolved"][2]
    assert "free" not in found["Degraded"][2]


def test_a_group_that_runs_another_revision_is_held_against_no_plan_of_this_one() -> None:
    pools = MeasuredPools(num_pages=900, num_state_slots=34, max_num_seqs=32, weights_bytes=1, free_bytes=1)
    a_look = look(plan=WITH_MEMORY, groups=wanted("v1-b"), paused=True, measured={PREFILL: pools, DECODE: pools})
    assert conditions(a_look)["PlanResolved"][:2] == ("True", "PlanFits")
    assert conditions(a_look)["Degraded"][0] == "False"


def test_pools_that_cannot_be_read_are_told() -> None:
    found = conditions(look())
    status, reason, message = found["PlanResolved"]
    assert (status, reason) == ("True", "PoolsUnread")
    assert "decode group 0" in message
    assert "8000" in message
    assert found["FabricVerified"][:2] == ("Unknown", "PoolsUnread")
    assert found["Ready"][0] == "True"


FABRICS = {
    "no test writes": (None, ("Unknown", "NotChecked", "the workers make no test writes")),
    "no peers yet": ((0, 0, ""), ("Unknown", "FabricChecking", "0 of 0 pairs of a decode pod and a prefill lane")),
    "some": ((8, 5, ""), ("Unknown", "FabricChecking", "5 of 8 pairs of a decode pod and a prefill lane")),
    "all": ((8, 8, ""), ("True", "FabricVerified", "8 of 8 pairs of a decode pod and a prefill lane")),
    "error": (
        (8, 7, "k3-decode-0-1: timed out"),
        ("False", "FabricFailed", "decode group 0: k3-decode-0-1: timed out"),
    ),
}


@pytest.mark.parametrize(("fabric", "expected"), FABRICS.values(), ids=FABRICS.keys())
def test_the_fabric_is_verified_when_all_pairs_are(
    fabric: tuple[int, int, str] | None, expected: tuple[str, str, str]
) -> None:
    told = MeasuredFabric(peers=fabric[0], verified=fabric[1], error=fabric[2]) if fabric else None
    decode = MeasuredPools(num_pages=1000, num_state_slots=34, max_num_seqs=32, weights_bytes=1, fabric=told)
    a_look = look(measured={PREFILL: decode.model_copy(update={"fabric": None}), DECODE: decode})
    assert conditions(a_look)["FabricVerified"] == expected
    starting = look(measured=a_look.measured, prefill=group(PREFILL, {0: {"ready": False, "ready_changed_s": 8_000.0}}))
    assert conditions(starting)["FabricVerified"][:2] == ("Unknown", "GroupsStarting")


def test_pods_that_may_not_be_made_stall_the_deployment_until_somebody_acts() -> None:
    words = "create Pod k3-decode-0-0 in StatefulSet k3-decode-0 failed error: exceeded quota: gpus"
    a_look = look(decode=group(DECODE, pods=(), creation_failure=words))
    found = conditions(a_look)
    for kind, status in (("Ready", "False"), ("DecodeReady", "False"), ("Stalled", "True"), ("Progressing", "False")):
        assert found[kind] == (status, "PodsRefused", f"decode group 0: {words}"), kind
    assert found["CapacityAvailable"][0] == "Unknown"
    assert build_status(a_look)["decode"]["blocked"] == words


def test_a_router_that_is_not_there_is_named_last() -> None:
    router = RouterSeen(desired=2, ready=1, updated=2, settled=True)
    found = conditions(look(seen=Observed(look().seen.groups, router, NODES)))
    assert found["Ready"] == ("False", "PodsNotReady", "1 of 2 router pods ready")
    assert found["Available"][0] == "True"


def test_a_router_whose_pods_may_not_be_made_says_why() -> None:
    router = RouterSeen(desired=2, ready=0, settled=True, refused="exceeded quota: pods")
    found = conditions(look(seen=Observed(look().seen.groups, router, NODES)))
    assert found["RouterReady"] == ("False", "PodsRefused", "0 of 2 router pods ready; exceeded quota: pods")


def test_messages_never_exceed_what_the_schema_allows() -> None:
    dead = {1: {"ready": False, "started_s": None, "ended": Ended("Error", 1, "x" * 9000)}}
    conditions(look(decode=group(DECODE, dead)))
    conditions(look(decode=group(DECODE, dead, streak=5)))
