"""Which profile a node's labels point to, and what is said of partitions, virtual functions and unknown chips."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_operator.api import HardwareProfile, dump, parse
from kimi_operator.profiles import built_in_profiles
from kimi_operator.profiles.detect import GIB, Match, Refused, detect
from node_labels import labelled, older_labels

BUILT_IN = built_in_profiles()


def found(labels: dict[str, str], profiles: Mapping[str, HardwareProfile] = BUILT_IN) -> Match:
    verdict = detect("gpu-1", labels, profiles)
    assert isinstance(verdict, Match), str(verdict)
    return verdict


def refused(labels: dict[str, str], profiles: Mapping[str, HardwareProfile] = BUILT_IN) -> Refused:
    verdict = detect("gpu-1", labels, profiles)
    assert isinstance(verdict, Refused), str(verdict)
    return verdict


def changed(name: str, base: str = "mi300x", **sections: dict[str, object]) -> dict[str, HardwareProfile]:
    """The built-in profiles and one more, made of `base` with some fields of some sections changed."""
    document = dump(BUILT_IN[base])
    document["metadata"]["name"] = name
    for section, fields in sections.items():
        document["spec"][section] |= fields
    return {**BUILT_IN, name: parse(HardwareProfile, document)}


@pytest.mark.parametrize(
    ("device", "vram", "units", "name"),
    [
        ("74a1", "192G", 304, "mi300x"),
        ("74a9", "192G", 304, "mi300x"),
        ("74a5", "256G", 304, "mi325x"),
        ("74a2", "192G", 80, "mi308x"),
        ("74a8", "192G", 80, "mi308x"),
        ("75a0", "288G", 256, "mi350x"),
        ("75a3", "288G", 256, "mi355x"),
    ],
)
@pytest.mark.parametrize("partition", ["spx_nps1", None])
def test_whole_cards_are_told_apart_by_device_id(
    device: str, vram: str, units: int, name: str, partition: str | None
) -> None:
    match = found(labelled(device, vram, units, partition))
    assert match.profile == name
    assert match.share is not None
    assert match.share.is_whole
    assert match.share.memory == BUILT_IN[name].spec.match.vram
    assert match.notes == ()


@pytest.mark.parametrize(
    ("device", "name"), [("74b5", "mi300x"), ("74b6", "mi308x"), ("74b9", "mi325x"), ("75b3", "mi355x")]
)
def test_a_virtual_function_with_its_whole_card_matches_and_says_so(device: str, name: str) -> None:
    """Reported of an MI300X: 74b5, 192G, 304 compute units and no product name."""
    card = BUILT_IN[name].spec.gpu.card
    assert card is not None
    match = found(labelled(device, f"{card.memory // GIB}G", card.compute_units))
    assert match.profile == name
    assert match.share is not None
    assert match.share.is_virtual
    assert match.notes == (
        f"{device} is a virtual function with its whole card; figures were taken without virtualisation",
    )


def test_two_chips_of_one_size_and_architecture_are_not_confused() -> None:
    mi300x, mi308x = (found(labelled(device, "192G")).profile for device in ("74a1", "74a2"))
    assert (mi300x, mi308x) == ("mi300x", "mi308x")
    assert "got 304, expected at most 80, all of a card" in str(refused(labelled("74a2", "192G", 304)))


def test_the_product_name_decides_nothing_but_is_mentioned() -> None:
    labels = labelled("74a2", "192G", 80, "spx_nps1")
    assert found(labels | {"amd.com/gpu.product-name": "AMD_Instinct_MI308X_OAM"}).notes == ()
    match = found(labels | {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"})
    assert match.profile == "mi308x"
    assert match.notes == (
        "label amd.com/gpu.product-name of node gpu-1 says AMD_Instinct_MI300X_OAM; the device id 74a2 decides",
    )
    assert "got nothing" in str(refused({"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}))


def test_missing_labels_are_noted() -> None:
    notes = found(labelled("74a1")).notes
    assert [note.partition(" is absent: ")[2].partition(";")[0] for note in notes] == [
        "memory was not checked",
        "nothing tells a partition from a card",
    ]


@pytest.mark.parametrize(
    ("labels", "label", "share"),
    [
        (labelled("74a1", "24G", 38, "cpx_nps4"), "compute-memory-partition", (24, 38, 8)),
        (labelled("74a1", "96G", 152, "dpx_nps1"), "compute-memory-partition", (96, 152, 2)),
        (labelled("74a1", "48G", 76, "qpx_nps1"), "compute-memory-partition", (48, 76, 4)),
        (labelled("75a3", "144G", 128, "dpx_nps1"), "compute-memory-partition", (144, 128, 2)),
        (labelled("74a2", "48G", 20, "cpx_nps1"), "compute-memory-partition", (48, 20, 4)),
        # Whatever is said of MI308X's dies: a count of its compute units is believed.
        (labelled("74a2", "24G", 10, "cpx_nps1"), "compute-memory-partition", (24, 10, 8)),
        (labelled("74a1", partition="cpx_nps1"), "compute-memory-partition", (24, 38, 8)),
        (labelled("74a1", "24G", 38), "cu-count", (24, 38, 8)),
        (labelled("74a1", "192G", 38), "cu-count", (24, 38, 8)),
        (older_labels("74a1", "192G", 38, 8), "cu-count", (24, 38, 8)),
        ({"amd.com/compute-memory-partition": "cpx_nps4", **labelled("74a1")}, "compute-memory-partition", (24, 38, 8)),
    ],
)  # fmt: skip
def test_a_partition_is_no_card(labels: dict[str, str], label: str, share: tuple[int, int, int]) -> None:
    memory, units, parts = share
    (problem,) = refused(labels).problems
    assert problem.field == f"label amd.com/gpu.{label} of node gpu-1"
    assert f"with {memory} of " in problem.got
    assert f"{units} of " in problem.got
    assert f"one of {parts}" in problem.got
    assert problem.expected == "whole cards, spx_nps1"
    assert "SPX" in problem.remedy
    assert "kimictl profile from-node gpu-1" in problem.remedy


@pytest.mark.parametrize(
    ("vram", "units", "label"), [("24G", 38, "vram"), ("96G", 304, "vram"), ("192G", 152, "cu-count")]
)
def test_a_virtual_function_with_part_of_its_card_is_no_card(vram: str, units: int, label: str) -> None:
    (problem,) = refused(labelled("74b5", vram, units)).problems
    assert problem.field == f"label amd.com/gpu.{label} of node gpu-1"
    assert f"a virtual function with {vram[:-1]} of 192 GiB and {units} of 304 compute units" in problem.got
    assert "one function a card" in problem.remedy


def test_a_profile_of_a_partition_matches_that_partition_alone() -> None:
    part = {"partition": {"compute": "CPX", "memory": "NPS4"}, "perNode": 64, "memory": "24574Mi", "computeUnits": 38}
    reserve = {"contexts": "2Gi", "symmetricHeap": 0, "activations": "4Gi", "graphs": 0}
    profiles = changed("cpx", gpu=part, match={"vram": "24Gi"}, reserve=reserve)
    assert found(labelled("74a1", "24G", 38, "cpx_nps4"), profiles).profile == "cpx"
    assert found(labelled("74a1", "192G", 38, "cpx_nps4"), profiles).profile == "cpx"
    assert found(older_labels("74a1", "192G", 38, 8), profiles).profile == "cpx"
    assert found(labelled("74a1", "192G", 304, "spx_nps1"), profiles).profile == "mi300x"
    assert "cpx_nps1" in str(refused(labelled("74a1", "24G", 38, "cpx_nps1"), profiles))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (labelled("74a1", "192G", 304, "cpx_nps4"), "cu-count of node gpu-1: got 304, expected 38"),
        (labelled("74a1", "192G", 38, "spx_nps1"), "cu-count of node gpu-1: got 38, expected 304"),
        (labelled("74a1", "24G", 304, "spx_nps1"), "vram of node gpu-1: got 24G, expected 192G"),
    ],
)
def test_labels_of_before_a_repartitioning_are_not_believed(labels: dict[str, str], words: str) -> None:
    """The labeller reads a node once, when it starts."""
    verdict = str(refused(labels))
    assert words in verdict
    assert "restart AMD's node labeller" in verdict


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (labelled("74a2", "24G", 128), "cu-count of node gpu-1: got 128, expected at most 80"),
        (labelled("74b6", "192G", 81), "cu-count of node gpu-1: got 81, expected at most 80"),
        (labelled("74a2", "193G", 80), "vram of node gpu-1: got 193G, expected at most 192G"),
        (labelled("74b6", "256G"), "vram of node gpu-1: got 256G, expected at most 192G"),
        (labelled("74a2", "256G", 80, "spx_nps1"), "vram of node gpu-1: got 256G, expected at most 192G"),
        (labelled("74a2", "256G", 20, "cpx_nps1"), "vram of node gpu-1: got 256G, expected at most 192G"),
        (older_labels("74a2", "288G", 20, 32), "vram of node gpu-1: got 288G, expected at most 192G"),
    ],
)
def test_more_than_all_of_a_card_is_not_believed(labels: dict[str, str], words: str) -> None:
    (problem,) = refused(labels).problems
    assert words in str(problem)
    assert f"all of a card with device id {labels.get('amd.com/gpu.device-id', '74a2')} (mi308x)" in problem.expected
    assert "restart AMD's node labeller" in problem.remedy
    assert "gpu.card" in problem.remedy


def test_a_card_of_your_own_may_have_more_than_the_known_one() -> None:
    gpu = {"memory": "256Gi", "card": {"memory": "256Gi", "computeUnits": 304, "computeDies": 8}}
    profiles = changed("site", gpu=gpu, match={"vram": "256Gi"})
    match = found(labelled("74a1", "256G", 304), profiles)
    assert match.profile == "site"
    assert match.share is not None
    assert match.share.chip == "site"
    assert found(labelled("74a1", "192G", 304), profiles).profile == "mi300x"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({}, "device-id of node gpu-1: got nothing, expected the PCI device id"),
        ({"feature.node.kubernetes.io/amd-gpu": "true"}, "enable the node labeller of AMD's GPU operator"),
        (labelled("7400", "64G", 120), "device-id of node gpu-1: got 7400, expected a device id in match.deviceIds"),
        (labelled("74a0", "128G", 228), "got 74a0 (MI300A)"),
        (labelled("75a8"), "got 75a8 (MI350P)"),
        (labelled("74a1", "256G", 304), "vram of node gpu-1: got 256G, expected at most 192G, all of a card"),
        (labelled("74a1", "144G", 304), "vram of node gpu-1: got 144G, expected with device id 74a1: 192G (mi300x)"),
        (labelled("74a1", "192G", 228), "cu-count of node gpu-1: got 228, expected with device id 74a1: 304 (mi300x)"),
        (labelled(""), "device-id of node gpu-1: got '', expected four hex digits such as 74a1"),
        (labelled("MI300X"), "device-id of node gpu-1: got 'mi300x'"),
        (labelled("74a1", "unknown"), "vram of node gpu-1: got 'unknown', expected whole GiB such as 192G"),
        (labelled("74a1", "0G"), "vram of node gpu-1: got '0G'"),
        (labelled("74a1", "-192G"), "vram of node gpu-1: got '-192G'"),
        (labelled("74a1", "192G", 0), "cu-count of node gpu-1: got '0', expected a number of compute units"),
        (labelled("74a1", "192G", 10**9), "cu-count of node gpu-1: got '1000000000'"),
        (labelled("74a1", "192G", 304, "xpx_nps1"), "compute-memory-partition of node gpu-1: got 'xpx_nps1'"),
        (labelled("74a1", "192G", 304, "spx"), "got 'spx', expected SPX|DPX|TPX|QPX|CPX_NPS1|NPS2|NPS4|NPS8"),
        (labelled("74a1") | {"amd.com/gpu.mode": "vf-passthrough"}, "mode of node gpu-1: got vf-passthrough"),
        (labelled("74a1") | {"amd.com/gpu.vram.192G": "4", "amd.com/gpu.vram.24G": "32"}, "got 4 x 192G, 32 x 24G"),
        ({"amd.com/gpu.device-id.74a1": "4", "amd.com/gpu.device-id.74a5": "4"}, "got 4 x 74a1, 4 x 74a5"),
    ],
)  # fmt: skip
def test_each_refusal_names_label_value_and_remedy(labels: dict[str, str], words: str) -> None:
    verdict = refused(labels)
    assert words in str(verdict)
    for problem in verdict.problems:
        assert problem.field.startswith("label amd.com/gpu.")
        assert problem.field.endswith(" of node gpu-1")
        assert problem.remedy


def test_two_profiles_that_match_are_named() -> None:
    (problem,) = refused(labelled("74a1", "192G", 304), changed("site")).problems
    assert problem.expected == "one HardwareProfile that matches, not mi300x, site"
    assert "spec.hardware.profile" in problem.remedy


def test_a_profile_without_a_card_still_matches_by_device_id_and_memory() -> None:
    document = dump(BUILT_IN["mi300x"])
    document["spec"]["gpu"] = {
        name: value for name, value in document["spec"]["gpu"].items() if name not in ("card", "computeUnits")
    }
    document["spec"]["basis"] = {}
    profiles = {"mine": parse(HardwareProfile, document)}
    assert found(labelled("74a1", "192G", 304), profiles).share is None
    assert "got 24G" in str(refused(labelled("74a1", "24G", 38), profiles))
    assert "got cpx_nps4" in str(refused(labelled("74a1", "192G", 38, "cpx_nps4"), profiles))


NAMES = st.sampled_from(["device-id", "vram", "cu-count", "compute-memory-partition", "mode", "product-name"])
KEYS = st.builds(
    "{}.{}{}".format,
    st.sampled_from(["amd.com/gpu", "beta.amd.com/gpu"]),
    NAMES,
    st.sampled_from(["", ".74a1", ".24G"]),
)
VALUES = st.one_of(
    st.sampled_from(["74a1", "74b5", "75a3", "192G", "24G", "304", "38", "spx_nps1", "cpx_nps4", "_", "", "0x74A1"]),
    st.text(max_size=12),
)


@settings(max_examples=300)
@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_every_node_gets_a_verdict(labels: dict[str, str]) -> None:
    verdict = detect("gpu-1", labels, BUILT_IN)
    if isinstance(verdict, Refused):
        assert all(
            problem.field and problem.got and problem.expected and problem.remedy for problem in verdict.problems
        )
    else:
        assert verdict.share is not None
        assert verdict.share.is_whole
