"""The profile that a deployment runs with, found from nodes or named, and nodes that are something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_operator.api import HardwareProfile, dump, parse
from kimi_operator.api.deployment import KimiDeploymentSpec
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.profiles import built_in_profiles, foreign_nodes, select_profile
from kimi_operator.profiles.detect import Match, detect
from kimi_operator.profiles.select import MOST_TOLD
from node_labels import labelled, older_labels

BUILT_IN = built_in_profiles()
MI300X = labelled("74a1", "192G", 304, "spx_nps1")
OLD_CPX = older_labels("74a1", "192G", 38, 64)
CPX = labelled("74a1", "24G", 38, "cpx_nps4")
MI325X = labelled("74a5", "256G", 304, "spx_nps1")


def spec(profile: str | None = None, selector: dict[str, str] | None = None) -> KimiDeploymentSpec:
    role: dict[str, Any] = {"template": {"nodeSelector": selector or {}}}
    document = {"model": {"checkpoint": {"hostPath": {"path": "/k3"}}}, "prefill": role, "decode": role}
    return parse(KimiDeploymentSpec, document | ({"hardware": {"profile": profile}} if profile else {}))


def chosen(nodes: Mapping[str, Mapping[str, str]], profile: str | None = None) -> str:
    return select_profile(spec(profile), BUILT_IN, nodes.items()).metadata.name


def problems(nodes: Mapping[str, Mapping[str, str]]) -> tuple[Problem, ...]:
    with pytest.raises(InvalidSpec) as raised:
        chosen(nodes)
    return raised.value.problems


def foreign(nodes: Mapping[str, Mapping[str, str]], profile: str = "mi300x", **options: Any) -> tuple[Problem, ...]:
    return foreign_nodes(spec(profile, **options), BUILT_IN[profile], BUILT_IN, nodes.items())


def with_section(name: str, base: str, section: str, value: object) -> dict[str, HardwareProfile]:
    document = dump(BUILT_IN[base])
    document["metadata"]["name"] = name
    document["spec"] |= {section: value, "basis": {}}
    return {**BUILT_IN, name: parse(HardwareProfile, document)}


# found from nodes


def test_a_partitioned_node_under_older_labels_is_no_whole_card() -> None:
    """It states the whole card's device id and memory; only its compute units tell."""
    first, node = problems({"gpu-1": OLD_CPX})
    assert (first.field, first.got) == ("spec.hardware.profile", "nothing, and no node is of a known profile")
    assert node.field == "label amd.com/gpu.cu-count of node gpu-1"
    assert node.got.startswith("38: a GPU with 24 of 192 GiB")
    assert "SPX" in node.remedy
    assert "kimictl profile from-node gpu-1" in node.remedy


def test_nodes_of_no_profile_stand_aside_of_those_that_are() -> None:
    assert (
        chosen({"a": OLD_CPX, "b": MI300X, "c": labelled("74a0"), "cpu": {"kubernetes.io/arch": "amd64"}}) == "mi300x"
    )


def test_nodes_of_several_profiles_are_named() -> None:
    (problem,) = problems({f"x{n}": MI300X for n in range(5)} | {"y": MI325X})
    assert (
        problem.got == "nothing, and nodes of several profiles: nodes x0, x1, x2 and 2 more of mi300x; node y of mi325x"
    )


def test_nodes_without_labels_are_no_evidence() -> None:
    (problem,) = problems({"a": {"kubernetes.io/arch": "amd64"}, "b": {}})
    assert problem.got == "nothing, and no node has labels of AMD's node labeller"
    assert "mi300x" in problem.expected


def test_every_kind_of_wrong_node_is_told_once() -> None:
    nodes = {f"p{n}": CPX for n in range(40)} | {"q": labelled("74a1", "64G"), "r": {"amd.com/gpu.vram": "192G"}}
    _, partitions, memory, silent = problems(nodes)
    assert partitions.field == "label amd.com/gpu.compute-memory-partition of nodes p0, p1, p10 and 37 more"
    assert (memory.field, memory.got[:3]) == ("label amd.com/gpu.vram of node q", "64G")
    assert silent.field == "label amd.com/gpu.device-id of node r"


def test_a_profile_of_the_partition_takes_partitioned_nodes() -> None:
    gpu = dump(BUILT_IN["mi300x"])["spec"]["gpu"] | {
        "memory": 24 * 2**30, "computeUnits": 38, "perNode": 64, "partition": {"compute": "CPX", "memory": "NPS4"},
    }  # fmt: skip
    document = dump(BUILT_IN["mi300x"])
    document["metadata"]["name"] = "mi300x-cpx"
    document["spec"] |= {"gpu": gpu, "match": {"deviceIds": ["74a1"], "vram": "24Gi"}, "basis": {}}
    document["spec"]["reserve"] = {"contexts": "1Gi", "activations": "1Gi"}
    profiles = {**BUILT_IN, "mi300x-cpx": parse(HardwareProfile, document)}
    assert select_profile(spec(), profiles, [("a", CPX)]).metadata.name == "mi300x-cpx"
    assert foreign_nodes(spec(), profiles["mi300x-cpx"], profiles, [("a", CPX)]) == ()
    (problem,) = foreign_nodes(spec(), profiles["mi300x"], profiles, [("a", CPX)])
    assert (problem.got, problem.expected) == ("74a1, 24G (mi300x-cpx)", "GPUs of mi300x")


# nodes that are something else


def test_nodes_of_the_profile_are_not_foreign() -> None:
    nodes = {"a": MI300X, "virtual": labelled("74b5", "192G", 304), "cpu": {}}
    assert foreign(nodes) == ()


def test_each_foreign_node_is_named_with_label_value_and_remedy() -> None:
    nodes = {"a": OLD_CPX, "b": MI325X, "c": MI325X, "d": labelled("74a2", "192G", 304), "e": labelled("1002")}
    old, others, contradiction, unknown = foreign(nodes)
    assert (old.field, old.got[:3]) == ("label amd.com/gpu.cu-count of node a", "38:")
    assert (others.field, others.got) == ("label amd.com/gpu.device-id of nodes b, c", "74a5 (mi325x)")
    assert others.expected.endswith("(mi300x)")
    assert "nodeSelector" in others.remedy
    assert "'74a1'" in others.remedy
    assert "node d" in contradiction.field
    assert unknown.got == "1002"


def test_two_profiles_of_one_kind_of_node_do_not_make_it_foreign() -> None:
    profiles = with_section("site", "mi300x", "limits", {"maxNumSeqs": 32})
    for name in ("mi300x", "site"):
        assert foreign_nodes(spec(name), profiles[name], profiles, [("a", MI300X)]) == ()


def test_nodes_that_the_pods_cannot_reach_are_left_out() -> None:
    selector = {"pool": "kimi"}
    nodes = {"a": MI325X, "b": CPX | selector}
    (problem,) = foreign(nodes, selector=selector)
    assert problem.field.endswith("node b")


def test_a_profile_that_names_no_device_says_nothing_of_nodes() -> None:
    profiles = with_section("any", "mi300x", "match", {})
    assert foreign_nodes(spec("any"), profiles["any"], profiles, [("a", CPX)]) == ()


def test_only_the_first_kinds_of_wrong_nodes_are_told() -> None:
    nodes = {f"n{number:02}": labelled(f"{number:04x}") for number in range(20)}
    assert [problem.got for problem in foreign(nodes)] == [f"{number:04x}" for number in range(MOST_TOLD)]


NAMES = st.sampled_from(["device-id", "vram", "cu-count", "compute-memory-partition", "mode"])
VALUES = st.sampled_from(["74a1", "74a5", "74b5", "75a3", "192G", "24G", "256G", "304", "38", "spx_nps1", "cpx_nps4"])
LABELS = st.dictionaries(NAMES.map("amd.com/gpu.{}".format), VALUES | st.text(max_size=6), max_size=5)


@settings(max_examples=200)
@given(st.lists(LABELS | st.sampled_from([MI300X, CPX, OLD_CPX, {}]), max_size=6))
def test_every_cluster_has_a_profile_or_reasons_and_the_profiles_own_nodes_are_not_foreign(
    labels: list[dict[str, str]],
) -> None:
    nodes = {f"node-{number}": one for number, one in enumerate(labels)}
    name = ""
    reasons: tuple[Problem, ...] = ()
    try:
        name = chosen(nodes)
    except InvalidSpec as error:
        reasons = error.problems
    assert bool(name) != bool(reasons)
    assert all(one.field and one.got and one.expected and one.remedy for one in reasons)
    if not name:
        return
    verdicts = {node: detect(node, one, BUILT_IN) for node, one in nodes.items()}
    own = {node: nodes[node] for node, verdict in verdicts.items() if isinstance(verdict, Match)}
    assert own
    assert foreign(own, name) == ()
    others = {node: one for node, one in nodes.items() if one and node not in own}
    assert bool(foreign(others, name)) == bool(others)
