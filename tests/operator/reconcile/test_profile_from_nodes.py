"""A deployment that names no profile: its nodes' labels choose it, or the status says what is wrong with each."""

from __future__ import annotations

from kimi_operator.api import dump
from kimi_operator.profiles import built_in_profiles
from stage import Stage, node

WHOLE = {"amd.com/gpu.device-id": "74a1", "amd.com/gpu.vram": "192G", "amd.com/gpu.cu-count": "304"}
PARTITIONED = WHOLE | {"amd.com/gpu.cu-count": "38"}
"""As an older labeller writes it: under the whole card's memory."""


def leave_the_choice(stage: Stage, labels: dict[str, str]) -> None:
    """No profile in the spec, the built-in ones in the cluster, and four nodes of one kind."""
    for profile in built_in_profiles().values():
        stage.server.put(dump(profile))
    for number in range(4):
        stage.server.put(node(f"node{number}", **labels))
    stage.change_spec(hardware={})


async def test_partitioned_cards_under_older_labels_are_refused_with_label_and_remedy(stage: Stage) -> None:
    leave_the_choice(stage, PARTITIONED)
    await stage.look(2)
    assert stage.condition("PlanResolved") == ("False", "ProfileUnknown")
    message = stage.message("PlanResolved")
    assert "spec.hardware.profile: got nothing, and no node is of a known profile" in message
    assert "label amd.com/gpu.cu-count of nodes node0, node1, node2 and 1 more: got 38: a GPU with 24 of 192" in message
    assert "set compute partition SPX" in message
    assert not stage.server.of("StatefulSet")


async def test_whole_cards_choose_their_profile_which_then_stays(stage: Stage) -> None:
    leave_the_choice(stage, PARTITIONED)
    await stage.look(2)
    for number in range(4):
        stage.server.put(node(f"node{number}", **WHOLE))
    await stage.look(2)
    assert stage.status()["plan"]["profile"] == "mi300x"
    stage.server.put(node("another", **WHOLE | {"amd.com/gpu.device-id": "74a5", "amd.com/gpu.vram": "256G"}))
    await stage.look(2)
    assert stage.condition("PlanResolved")[0] == "True"
    assert stage.status()["plan"]["profile"] == "mi300x"
