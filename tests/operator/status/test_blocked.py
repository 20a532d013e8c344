"""Why pods do not start: which words count as which reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kimi_operator.api.conditions import Reason
from kimi_operator.decide.blocked import find_blocked, is_about_checkpoint
from kimi_operator.observe import PodSeen

POD = PodSeen("k3-decode-0-1", "uid", 1, "v1-a", 0.0, node="node1")


@pytest.mark.parametrize(
    "words",
    [
        "/models/checkpoint/config.json: No such file or directory; model.checkpoint must be a folder",
        "k3-decode-0-1: /models/checkpoint/model.safetensors.index.json: not JSON: line 1; restart 2 of 5 at 2026",
        "rank 11: CheckpointError: /models/checkpoint/a.safetensors: model.norm.weight: bad; copy it again",
        "k3-decode-0-1: rank 3: ConfigError: /models/checkpoint/config.json: not JSON: line 1",
        "api: TokenizerError: /models/checkpoint/tiktoken.model: No such file or directory; not complete",
    ],
)
def test_what_a_worker_says_of_its_checkpoint_is_known_by_how_it_begins(words: str) -> None:
    assert is_about_checkpoint(words)


@pytest.mark.parametrize(
    "words",
    [
        "rank 3: OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB while loading expert weights",
        "rank 0: CollectiveError: rank 5 was not there within 60 s (waiting for: loaded weights)",
        "rank 1: RuntimeError: checkpoint stream failed in /models/checkpoint/a.safetensors",
        "ranks: killed by SIGKILL",
        "supervisor: ValueError: weight",
        "",
    ],
)
def test_other_troubles_that_mention_weights_are_not(words: str) -> None:
    assert not is_about_checkpoint(words)


MOUNTS = {
    'MountVolume.SetUp failed for volume "checkpoint" : hostPath type check failed: /mnt is not a directory': True,
    "Unable to attach or mount volumes: unmounted volumes=[checkpoint], unattached volumes=[]: timed out": True,
    "Unable to attach or mount volumes: unmounted volumes=[shm checkpoint], unattached volumes=[]: timed out": True,
    'MountVolume.SetUp failed for volume "device-0" : hostPath type check failed: /dev/infiniband is not a dir': False,
    "Failed to create pod sandbox: plugin type=multus failed: no network-attachment checkpoint-net": False,
}


@pytest.mark.parametrize(("words", "is_checkpoint"), MOUNTS.items())
def test_a_volume_is_the_checkpoint_only_by_its_name(words: str, is_checkpoint: bool) -> None:
    blocked = find_blocked([replace(POD, mount_failure=words)])
    assert blocked is not None
    assert blocked.reason is (Reason.WEIGHTS_MISSING if is_checkpoint else Reason.PODS_NOT_READY)
    assert blocked.message == f"k3-decode-0-1 on node node1: {words}"


def test_pods_that_may_not_be_made_say_who_refuses_them() -> None:
    words = 'create Pod k3-decode-0-0 in StatefulSet k3-decode-0 failed error: pods "k3-decode-0-0" is forbidden: '
    security = find_blocked([], words + 'violates PodSecurity "baseline:latest": host namespaces (hostNetwork=true)')
    quota = find_blocked([], words + "exceeded quota: gpus, requested: requests.amd.com/gpu=8")
    assert security is not None
    assert quota is not None
    assert security.reason is quota.reason is Reason.PODS_REFUSED
    assert security.message.endswith("label the namespace pod-security.kubernetes.io/enforce=privileged")
    assert quota.message == words + "exceeded quota: gpus, requested: requests.amd.com/gpu=8"


@pytest.mark.parametrize(("why", "reason"), [("ErrImagePull", Reason.IMAGE_UNAVAILABLE), ("X", Reason.PODS_NOT_READY)])
def test_a_container_that_waits_says_why(why: str, reason: Reason) -> None:
    blocked = find_blocked([POD, replace(POD, waiting=(why, "not found"))])
    assert blocked is not None
    assert (blocked.reason, blocked.message) == (reason, f"k3-decode-0-1: {why}: not found")
    assert find_blocked([POD]) is None
