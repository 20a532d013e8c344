"""Amounts of bytes in profiles and deployments: what cannot be meant is refused with what is likely meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api.base import dump, parse
from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.api.quantity import UNITS, parse_bytes, read_bytes
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.profiles import built_in_profiles

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DEPLOYMENT = yaml.safe_load((EXAMPLES / "mi300x-2p2d.yaml").read_text())
PROFILE = dump(built_in_profiles()["mi300x"])
BYTE_FIELDS = (
    "match.vram", "gpu.memory", "gpu.card.memory", "reserve.contexts", "reserve.symmetricHeap", "reserve.activations",
    "reserve.graphs", "reserve.staging", "reserve.margin", "pod.sharedMemory",
)  # fmt: skip
AMOUNTS = ("requests.memory", "limits.memory", "requests.ephemeral-storage", "limits.ephemeral-storage")


def refused(
    model: type[HardwareProfile | KimiDeployment], document: dict[str, Any], path: str, value: object
) -> Problem:
    """The one problem that a field's value makes."""
    changed = json.loads(json.dumps(document))  # no part of it twice, as YAML aliases make
    place = changed["spec"]
    *sections, field = path.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[field] = value
    with pytest.raises(InvalidSpec) as error:
        parse(model, changed)
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize("field", BYTE_FIELDS)
def test_a_forgotten_unit_of_any_byte_field_is_refused(field: str) -> None:
    problem = refused(HardwareProfile, PROFILE, field, 16)
    assert (problem.field, problem.got) == (f"spec.{field}", "16")
    assert problem.expected == "0, a number with its unit, or at least 1,048,576 bytes"
    assert problem.remedy == f"write it with its unit, such as {'16Mi' if field == 'reserve.staging' else '16Gi'}"


@pytest.mark.parametrize("field", BYTE_FIELDS)
@pytest.mark.parametrize("number", [1, 7, 64, 1000, 65_536, 1_048_575])
def test_the_unit_that_is_advised_is_plausible_for_the_field(field: str, number: int) -> None:
    """No more than the largest GPU has, but for what a pod shares, and no refusal again."""
    meant = refused(HardwareProfile, PROFILE, field, number).remedy.rpartition(" ")[2]
    assert read_bytes(meant) <= (2**40 if field == "pod.sharedMemory" else 2**39)
    assert meant != "1000Gi" or field == "pod.sharedMemory"


@pytest.mark.parametrize("written", ["512Ki", "1Ki", "100k", "0.5Mi"])
def test_a_small_amount_with_its_unit_is_taken(written: str) -> None:
    changed = json.loads(json.dumps(PROFILE))
    changed["spec"]["reserve"]["staging"] = written
    assert parse(HardwareProfile, changed).spec.reserve.staging == parse_bytes(written) > 0
    pod = json.loads(json.dumps(DEPLOYMENT))
    pod["spec"]["router"] = {"template": {"resources": {"requests": {"memory": written}}}}
    resources = dump(parse(KimiDeployment, pod))["spec"]["router"]["template"]["resources"]
    assert resources["requests"]["memory"] == written


def test_no_byte_field_of_the_schema_is_left_out() -> None:
    def of(schema: dict[str, Any], path: str) -> list[str]:
        if schema.get("x-kubernetes-int-or-string"):
            return [path]
        return [found for name, inner in schema.get("properties", {}).items() for found in of(inner, f"{path}.{name}")]

    crd = yaml.safe_load((EXAMPLES.parent / "crds" / "hardwareprofiles.kimi-operator.io.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert {path.removeprefix(".") for path in of(spec, "")} == set(BYTE_FIELDS)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize(
    "where", ["decode.template.resources", "prefill.template.resources", "router.template.resources"]
)
def test_a_forgotten_unit_of_a_pods_memory_is_refused(where: str, amount: str) -> None:
    for value, meant in (("64", "64Gi"), (8192, "8192Mi"), ("400m", "400Mi")):
        problem = refused(KimiDeployment, DEPLOYMENT, f"{where}.{amount}", value)
        assert (problem.field, problem.got) == (f"spec.{where}.{amount}", repr(value))
        assert problem.remedy == f"write it with its unit, such as {meant}"
    assert refused(HardwareProfile, PROFILE, f"pod.resources.{amount}", 64).field == f"spec.pod.resources.{amount}"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("16Gib", "16Gi"), ("16GiB", "16Gi"), ("16gi", "16Gi"), ("16 Gi", "16Gi"), ("16GB", "16G"), ("16g", "16G"),
        ("1,024Mi", "1024Mi"), ("16K", "16k"), ("7KiB", "7Ki"), ("16 bytes", "16"), ("1e9", "1000000000"),
        ("1.5E10", "15000000000"), ("2.5tib", "2.5Ti"), ("1e5Mi", "100000Mi"), ("2e1gib", "20Gi"),
    ],
)  # fmt: skip
def test_an_unknown_unit_is_refused_with_the_nearest_spelling(written: str, meant: str) -> None:
    for model, document, field in (
        (HardwareProfile, PROFILE, "reserve.symmetricHeap"),
        (HardwareProfile, PROFILE, "pod.resources.requests.memory"),
        (KimiDeployment, DEPLOYMENT, "decode.template.resources.limits.memory"),
    ):
        problem = refused(model, document, field, written)
        assert (problem.field, problem.got, problem.remedy) == (f"spec.{field}", repr(written), f"write {meant}")
        assert all(unit in problem.expected for unit in UNITS)
    assert parse_bytes(meant) > 0


@pytest.mark.parametrize(
    "written", ["1e99", "1E30", "2e18", 1e99, "9e9Gi", "99999999999tib", "1e99Xi", "9" * 90 + " Gi"]
)
def test_more_than_anything_has_is_not_told_as_a_spelling(written: str | float) -> None:
    """Following the remedy must not bring the next refusal, nor a hundred digits."""
    problem = refused(HardwareProfile, PROFILE, "reserve.contexts", written)
    assert (problem.field, problem.got) == ("spec.reserve.contexts", repr(written))
    assert problem.expected.startswith("whole bytes, or a number with one of the units k, M,")
    assert problem.remedy == "write a number with a unit, such as 64Mi or 8Gi"


@pytest.mark.parametrize("written", ["", "lots", "Gi", "-", "-16Gi", "16Xi", True, 0.5, "0.0001Ki"])
def test_what_no_spelling_is_near_is_refused_too(written: object) -> None:
    problem = refused(HardwareProfile, PROFILE, "reserve.margin", written)
    assert problem.field == "spec.reserve.margin"
    assert problem.remedy.startswith("write ")


def test_amounts_mean_what_they_meant() -> None:
    for text, amount in {"0": 0, "0Gi": 0, "1Mi": 2**20, "1.5Gi": 3 * 2**29, "13G": 13 * 10**9}.items():
        assert read_bytes(text) == amount
    for profile in built_in_profiles().values():
        assert parse(HardwareProfile, dump(profile)) == profile
    for file in sorted(EXAMPLES.glob("**/*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            model = {"KimiDeployment": KimiDeployment, "HardwareProfile": HardwareProfile}.get(document.get("kind"))
            if model is not None:
                first = parse(model, document)
                assert parse(model, dump(first)) == first
    cpu = {"requests": {"cpu": "500m", "memory": "128974848000m", "amd.com/gpu": 8}, "limits": {"memory": 0}}
    changed = json.loads(json.dumps(DEPLOYMENT))
    changed["spec"]["decode"]["template"]["resources"] = cpu
    assert dump(parse(KimiDeployment, changed))["spec"]["decode"]["template"]["resources"] == cpu
