"""Raw objects, as the API server writes them, become one picture."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog
import yaml
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import Failure
from kimi_operator.observe import gpus_in_use, observe, read_node, read_pod
from kimi_operator.render.names import GroupKey
from kimi_operator.times import parse_time

STATEFUL_SET = """
kind: StatefulSet
metadata:
  name: k3-decode-0
  namespace: ns
  uid: set-uid
  labels: {kimi-operator.io/deployment: k3, kimi-operator.io/role: decode, kimi-operator.io/group: "0"}
  annotations:
    kimi-operator.io/restarted-at: "2026-01-02T03:04:05Z"
    kimi-operator.io/restarts: "4"
    kimi-operator.io/restarts-in-a-row: "2"
    kimi-operator.io/last-failure: '{"time": "2026-01-02T03:04:05Z", "pod": "k3-decode-0-1", "message": "rank 3: NaN"}'
  ownerReferences: [{uid: owner-uid, controller: true, kind: KimiDeployment, name: k3}]
spec:
  replicas: 2
  template: {metadata: {labels: {kimi-operator.io/generation: "5", kimi-operator.io/revision: v1-a}}}
"""

POD = """
kind: Pod
metadata:
  name: k3-decode-0-1
  namespace: ns
  uid: pod-uid
  creationTimestamp: "2026-01-02T03:04:10Z"
  labels: {kimi-operator.io/deployment: k3, kimi-operator.io/role: decode, kimi-operator.io/group: "0",
           kimi-operator.io/generation: "5", kimi-operator.io/revision: v1-a}
  ownerReferences: [{uid: set-uid, controller: true, kind: StatefulSet, name: k3-decode-0}]
spec:
  nodeName: node1
  containers: [{name: worker, resources: {limits: {amd.com/gpu: "8"}}}]
status:
  phase: Running
  podIP: 10.0.0.7
  conditions:
    - {type: Ready, status: "True", lastTransitionTime: "2026-01-02T03:05:00Z"}
    - {type: PodScheduled, status: "True"}
  containerStatuses:
    - name: worker
      restartCount: 0
      state: {running: {startedAt: "2026-01-02T03:04:20Z"}}
"""


def pod(**status: Any) -> dict[str, Any]:
    """The pod with other status fields."""
    document: dict[str, Any] = yaml.safe_load(POD)
    document["status"] |= status
    return document


def container(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "worker", "restartCount": 0, "state": {}, **fields}]


def test_a_group_and_its_pod_are_read_in_full() -> None:
    seen = observe([yaml.safe_load(STATEFUL_SET), pod()], [])
    group = seen.groups[GroupKey(Role.DECODE, 0)]
    assert (group.generation, group.revision, group.replicas, group.owner_uid) == (5, "v1-a", 2, "owner-uid")
    assert (group.restarts, group.streak) == (4, 2)
    assert group.restarted_s == parse_time("2026-01-02T03:04:05Z")
    assert group.failure is not None
    assert (group.failure.pod, group.failure.message) == ("k3-decode-0-1", "rank 3: NaN")
    (one,) = group.current
    assert (one.name, one.node, one.ip, one.ready, one.deleting) == ("k3-decode-0-1", "node1", "10.0.0.7", True, False)
    assert one.started_s == parse_time("2026-01-02T03:04:20Z")
    assert one.was_ready


def test_pods_of_another_owner_or_generation_are_told_apart() -> None:
    foreign = pod()
    foreign["metadata"] |= {"ownerReferences": [{"uid": "older-set", "controller": True}]}
    stale = pod()
    stale["metadata"]["labels"]["kimi-operator.io/generation"] = "4"
    group = observe([yaml.safe_load(STATEFUL_SET), foreign, stale], []).groups[GroupKey(Role.DECODE, 0)]
    assert len(group.pods) == 1
    assert group.current == ()
    assert len(group.stale) == 1


@pytest.mark.parametrize("nonsense", ["", "x", "-1", "1e3", "²", "{}", '{"time": 1}', "null", "9" * 40])
def test_what_somebody_wrote_into_labels_and_annotations_is_as_good_as_absent(nonsense: str) -> None:
    edited, one = yaml.safe_load(STATEFUL_SET), pod()
    edited["metadata"]["annotations"] = dict.fromkeys(edited["metadata"]["annotations"], nonsense)
    edited["spec"]["template"]["metadata"]["labels"]["kimi-operator.io/generation"] = nonsense
    one["metadata"]["labels"]["kimi-operator.io/generation"] = nonsense
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            group = observe([edited, one], []).groups[GroupKey(Role.DECODE, 0)]
    assert (group.generation, group.restarts, group.streak) == (1, 0, 0)
    assert (group.restarted_s, group.failure) == (None, None)
    assert group.pods[0].generation == 0
    assert len(logs) == len({(entry["name"], entry["got"]) for entry in logs})


def test_a_failure_that_is_noted_at_length_fits_the_status() -> None:
    edited = yaml.safe_load(STATEFUL_SET)
    note = json.dumps(dict.fromkeys(("time", "pod", "message"), "x" * 9000))
    edited["metadata"]["annotations"]["kimi-operator.io/last-failure"] = note
    seen = observe([edited], []).groups[GroupKey(Role.DECODE, 0)].failure
    assert seen is not None
    Failure(time=seen.time, pod=seen.pod, message=seen.message)


def test_readiness_that_was_lost_is_remembered_and_that_never_was_is_not() -> None:
    lost = pod(conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T03:30:00Z"}])
    never = pod(conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T03:04:11Z"}])
    assert read_pod(lost).was_ready
    assert not read_pod(never).was_ready


def test_a_container_that_ended_tells_why_also_after_its_restart() -> None:
    end = {"terminated": {"exitCode": 1, "reason": "Error", "message": "config.json: No such file"}}
    ended = read_pod(pod(containerStatuses=container(state=end)))
    restarted = read_pod(
        pod(
            containerStatuses=container(
                state={"running": {"startedAt": "2026-01-02T03:06:00Z"}}, lastState=end, restartCount=1
            )
        )
    )
    for one in (ended, restarted):
        assert str(one.ended) == "config.json: No such file"
    assert (ended.restarts, restarted.restarts) == (0, 1)
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    assert "137 (OOMKilled)" in str(read_pod(pod(containerStatuses=container(state=killed))).ended)


def test_what_keeps_a_pod_from_starting_is_read_and_plain_stages_are_not() -> None:
    refused = read_pod(
        pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "3 Insufficient amd.com/gpu."}])
    )
    assert refused.unschedulable == "3 Insufficient amd.com/gpu."
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    assert read_pod(pod(containerStatuses=container(state=waiting))).waiting == ("ImagePullBackOff", "not found")
    creating = {"waiting": {"reason": "ContainerCreating"}}
    assert read_pod(pod(containerStatuses=container(state=creating))).waiting is None
    failed = [{"name": "init", "restartCount": 2, "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}}}]
    init = read_pod(pod(initContainerStatuses=failed))
    assert init.init_ended is not None
    assert init.restarts == 0


def test_a_mount_failure_reaches_its_pod() -> None:
    seen = observe([yaml.safe_load(STATEFUL_SET), pod()], [], {"pod-uid": "/x is not a directory"})
    assert seen.groups[GroupKey(Role.DECODE, 0)].pods[0].mount_failure == "/x is not a directory"


def test_nodes_tell_readiness_taints_and_gpus() -> None:
    node = {
        "kind": "Node",
        "metadata": {"name": "node1", "labels": {"amd.com/gpu.device-id": "74a1"}},
        "spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]},
        "status": {
            "allocatable": {"amd.com/gpu": "8", "memory": "1Gi"},
            "conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-02T03:04:05Z"}],
        },
    }
    seen = read_node(node)
    assert (seen.ready, seen.out_of_service, seen.schedulable) == (False, True, False)
    assert seen.ready_changed_s == parse_time("2026-01-02T03:04:05Z")
    assert seen.gpus["amd.com/gpu"] == 8


def test_gpus_in_use_count_running_pods_by_node() -> None:
    done = pod(phase="Succeeded")
    unplaced = pod()
    unplaced["spec"]["nodeName"] = None
    assert gpus_in_use([pod(), done, unplaced], "amd.com/gpu") == {"node1": 8}
