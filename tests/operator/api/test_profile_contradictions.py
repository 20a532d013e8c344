"""What cannot be true at once in a HardwareProfile, and the CEL rules that the API server checks of it."""

from __future__ import annotations

from typing import Any

import pytest
from kimi_operator.api import HardwareProfile, crd, dump, parse
from kimi_operator.api.contradictions import num_partitions
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.profiles import built_in_profiles

MI300X = dump(built_in_profiles()["mi300x"])
CPX = {"compute": "CPX", "memory": "NPS4"}
SMALL_RESERVE = {"contexts": "2Gi", "symmetricHeap": 0, "activations": "4Gi", "graphs": 0, "staging": 0, "margin": 0}
CPX_GPU = {"partition": CPX, "memory": "24Gi", "computeUnits": 38, "perNode": 64}


def document(**sections: Any) -> dict[str, Any]:
    """MI300X's profile with fields of sections changed; None takes a field out."""
    spec = dict(MI300X["spec"])
    for section, fields in sections.items():
        merged = spec.get(section, {}) | fields
        spec[section] = {name: value for name, value in merged.items() if value is not None}
    return MI300X | {"spec": spec}


def problems(**sections: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidSpec) as error:
        parse(HardwareProfile, document(**sections), "mine.yaml")
    return error.value.problems


@pytest.mark.parametrize(
    ("sections", "field", "got", "expected"),
    [
        # partitions and cards
        (
            {"gpu": {**CPX_GPU, "memory": "96Gi"}, "match": {"vram": "96Gi"}, "reserve": SMALL_RESERVE},
            "gpu.memory", "96.00 GiB", "at most 24.00 GiB: a cpx_nps4 GPU is 1/8 of its card of 192.00 GiB",
        ),
        (
            {"gpu": {**CPX_GPU, "computeUnits": 304}, "match": {"vram": "24Gi"}, "reserve": SMALL_RESERVE},
            "gpu.computeUnits", "304", "at most 38: a cpx_nps4 GPU is 1/8 of its card of 304",
        ),
        (
            {"gpu": {**CPX_GPU, "perNode": 9}, "match": {"vram": "24Gi"}, "reserve": SMALL_RESERVE},
            "gpu.perNode", "9", "a multiple of 8",
        ),
        (
            {"gpu": {"card": None, "partition": CPX}, "basis": {"gpu.card": None}},
            "gpu.card", "nothing", "cpx_nps4 GPU is a part of",
        ),
        (
            {"gpu": {"memory": "200Gi"}, "match": {"vram": "200Gi"}},
            "gpu.memory", "200.00 GiB", "at most 192.00 GiB: a GPU is the whole card",
        ),
        ({"gpu": {"computeUnits": 305}}, "gpu.computeUnits", "305", "at most 304"),
        # match
        ({"match": {"vram": "24Gi"}}, "gpu.memory", "191.98 GiB", "at most match.vram 24.00 GiB"),
        ({"match": {"deviceIds": [], "virtualDeviceIds": []}}, "match.deviceIds", "nothing", "at least one device id"),
        ({"match": {"virtualDeviceIds": ["74ff"]}}, "match.virtualDeviceIds", "74ff", "some of match.deviceIds"),
        # memory that is spoken for
        (
            {"reserve": {"activations": "192Gi"}},
            "reserve", "contexts 11.20 GiB + symmetricHeap 8.00 GiB + activations 192", "less than gpu.memory 191.98",
        ),
        # rates in other units
        ({"gpu": {"hbmBytesPerSecond": 5300}}, "gpu.hbmBytesPerSecond", "5,300", "bytes a second, at least 100,000,"),
        ({"gpu": {"bf16FlopsPerSecond": 1307}}, "gpu.bf16FlopsPerSecond", "1,307", "operations a second, at least 1,0"),
        ({"fabric": {"nicBytesPerSecond": 50}}, "fabric.nicBytesPerSecond", "50", "bytes a second, at least 100,000,"),
        # runtime and fabric
        ({"runtime": {"device": "cpu"}, "fabric": {"transport": "NIXL"}}, "runtime.collectives", "nccl", "gloo where"),
        ({"runtime": {"device": "cpu", "collectives": "gloo"}}, "fabric.transport", "MoRIIO", "NIXL where runtime"),
        ({"fabric": {"fence": "none"}}, "fabric.fence", "none", "read_back with transport MoRIIO"),
        # basis
        ({"basis": {"reserve.context": "Measured"}}, "basis", "reserve.context", "path of a figure that this profile"),
        ({"basis": {"gpu.architecture": "Measured"}}, "basis", "gpu.architecture", "path of a figure"),
        ({"basis": {"gpu.cards.memory": "Measured"}}, "basis", "gpu.cards.memory", "path of a figure"),
    ],
)  # fmt: skip
def test_a_contradiction_names_field_value_and_remedy(
    sections: dict[str, Any], field: str, got: str, expected: str
) -> None:
    (problem,) = problems(**sections)
    assert problem.field == f"HardwareProfile mi300x: spec.{field}"
    assert got in problem.got
    assert expected in problem.expected
    assert problem.remedy


@pytest.mark.parametrize(
    ("sections", "field", "got"),
    [
        ({"gpu": {"hbmBytesPerSecond": 0}}, "mine.yaml.spec.gpu.hbmBytesPerSecond", "0"),
        ({"gpu": {"hbmBytesPerSecond": -1}}, "mine.yaml.spec.gpu.hbmBytesPerSecond", "-1"),
        ({"gpu": {"hbmBytesPerSecond": 5.3e12 + 0.5}}, "mine.yaml.spec.gpu.hbmBytesPerSecond", "5300000000000.5"),
        ({"gpu": {"hbmBytesPerSecond": 10**30}}, "mine.yaml.spec.gpu.hbmBytesPerSecond", str(10**30)),
        ({"gpu": {"bf16FlopsPerSecond": 10**18 + 1}}, "mine.yaml.spec.gpu.bf16FlopsPerSecond", str(10**18 + 1)),
        ({"fabric": {"nicBytesPerSecond": 10**15 + 1}}, "mine.yaml.spec.fabric.nicBytesPerSecond", str(10**15 + 1)),
        ({"gpu": {"memory": 2**61}}, "mine.yaml.spec.gpu.memory", str(2**61)),
        ({"gpu": {"memory": None}}, "mine.yaml.spec.gpu.memory", "nothing"),
        ({"gpu": {"computeUnits": 0}}, "mine.yaml.spec.gpu.computeUnits", "0"),
        ({"gpu": {"card": {"memory": "192Gi"}}}, "mine.yaml.spec.gpu.card.computeUnits", "nothing"),
        ({"gpu": {"partition": {"compute": "Quarter"}}}, "mine.yaml.spec.gpu.partition.compute", "'Quarter'"),
        ({"reserve": {"contexts": None}}, "mine.yaml.spec.reserve.contexts", "nothing"),
        ({"fabric": {"nicBytesPerSecond": 0}}, "mine.yaml.spec.fabric.nicBytesPerSecond", "0"),
        ({"basis": {"gpu.memory": "Guessed"}}, "mine.yaml.spec.basis.gpu.memory", "'Guessed'"),
        ({"worker": {"support": "Perhaps"}}, "mine.yaml.spec.worker.support", "'Perhaps'"),
        ({"match": {"deviceIds": ["MI300X"]}}, "mine.yaml.spec.match.deviceIds.0", "'MI300X'"),
    ],
)
def test_a_wrong_or_missing_figure_is_named_with_its_file(sections: dict[str, Any], field: str, got: str) -> None:
    found = {problem.field: problem.got for problem in problems(**sections)}
    assert found[field] == got


@pytest.mark.parametrize("path", [path for path in MI300X["spec"]["basis"] if "." in path])
def test_a_figure_that_is_left_out_is_named_though_basis_speaks_of_it(path: str) -> None:
    section, _, field = path.partition(".")
    changed = document(**{section: {field: None}})
    try:
        parse(HardwareProfile, changed)
    except InvalidSpec as error:
        (problem,) = error.problems
        assert (problem.field.rpartition("spec.")[2], problem.got) == (path, "nothing")
    else:
        assert section in ("runtime", "reserve", "pod", "limits", "timeouts"), "only these have defaults"


def test_a_missing_figure_hides_no_contradiction() -> None:
    found = problems(gpu={"hbmBytesPerSecond": None}, fabric={"fence": "none"})
    assert [problem.field.rpartition(" spec.")[2] for problem in found] == ["gpu.hbmBytesPerSecond", "fabric.fence"]
    assert (found[0].expected, found[0].remedy) == (
        "a value: basis says DataSheet of it",
        "set it, or remove it from basis",
    )


def test_every_contradiction_is_named_at_once() -> None:
    found = problems(gpu={"computeUnits": 400, "hbmBytesPerSecond": 53}, fabric={"fence": "none"})
    assert [problem.field.rpartition(" spec.")[2] for problem in found] == [
        "gpu.computeUnits", "gpu.hbmBytesPerSecond", "fabric.fence",
    ]  # fmt: skip


def test_a_partition_that_agrees_with_its_card_is_taken() -> None:
    profile = parse(HardwareProfile, document(gpu=CPX_GPU, match={"vram": "24Gi"}, reserve=SMALL_RESERVE))
    assert str(profile.spec.gpu.partition) == "cpx_nps4"
    assert not profile.spec.gpu.partition.is_whole


@pytest.mark.parametrize(("mode", "parts"), [("SPX", 1), ("DPX", 2), ("TPX", 3), ("QPX", 4), ("CPX", 8)])
def test_partitions_of_a_card(mode: str, parts: int) -> None:
    assert num_partitions(mode, 8) == parts


def rules_of(*path: str) -> list[str]:
    schema = crd.hardware_profile_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path:
        schema = schema["properties"][name]
    return [one["rule"] for one in schema["x-kubernetes-validations"]]


def test_rules_that_the_api_server_checks() -> None:
    assert rules_of("spec", "runtime") == ["self.device != 'cpu' || self.collectives == 'gloo'"]
    assert [rule.partition(" ")[0] for rule in rules_of("spec", "match")] == [
        "!has(self.vram)",
        "!has(self.virtualDeviceIds)",
    ]
    assert len(rules_of("spec", "gpu")) == 3
    assert "read_back" in rules_of("spec", "fabric")[0]
    memory, reserve = rules_of("spec")
    assert "self.match.vram" in memory
    assert all(f"self.reserve.{name}" in reserve for name in dump(built_in_profiles()["mi300x"].spec.reserve))


# fmt: off
OPTIONAL = ("match", "match.vram", "vram", "deviceIds", "virtualDeviceIds", "card", "computeUnits", "partition",
            "transport", "fence")
# fmt: on


@pytest.mark.parametrize("path", [("spec",), ("spec", "match"), ("spec", "gpu"), ("spec", "fabric")])
def test_rules_read_no_field_that_may_be_absent_without_asking(path: tuple[str, ...]) -> None:
    """The API server tries a default before it fills in fields, and a rule about an absent field fails."""
    for rule in rules_of(*path):
        for field in OPTIONAL:
            if f"self.{field}" in rule:
                assert f"has(self.{field})" in rule, rule
