"""What the API accepts and refuses: each refusal names field, value and remedy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api import HardwareProfile, KimiDeployment, KimiDeploymentStatus, dump, parse
from kimi_operator.api.conditions import ConditionType, Reason
from kimi_operator.api.quantity import parse_bytes
from kimi_operator.errors import InvalidSpec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DEPLOYMENTS = ["mi300x-2p2d.yaml", "mi325x-2p2d.yaml", "local/2p2d.yaml"]
MINIMAL = {
    "metadata": {"name": "k3"},
    "spec": {"model": {"checkpoint": {"hostPath": {"path": "/k3"}}}, "prefill": {}, "decode": {}},
}


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value set."""
    result = copy.deepcopy(document)
    inner = result
    *parents, last = path.split(".")
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return result


@pytest.mark.parametrize("example", DEPLOYMENTS)
def test_examples_survive_a_round_trip(example: str) -> None:
    deployment = parse(KimiDeployment, yaml.safe_load((EXAMPLES / example).read_text()))
    assert parse(KimiDeployment, dump(deployment)) == deployment


def test_profile_survives_a_round_trip() -> None:
    profile = parse(HardwareProfile, yaml.safe_load((EXAMPLES / "local" / "profile.yaml").read_text()))
    assert parse(HardwareProfile, dump(profile)) == profile
    assert profile.spec.gpu.memory == 64 << 20


def test_defaults_are_those_of_a_full_size_group() -> None:
    spec = parse(KimiDeployment, MINIMAL).spec
    assert (spec.prefill.nodes_per_group, spec.prefill.gpus_per_node, spec.prefill.tensor_parallel) == (2, 8, 2)
    assert (spec.restart_budget, spec.suspend, spec.rollout.paused) == (5, False, False)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("spec.decode.gpuPerNode", 8, "spec.decode.gpuPerNode: got 8, expected no such field; remove it"),
        ("spec.autoscaling", {}, "spec.autoscaling: got {}, expected no such field"),
        ("spec.decode.groups", "2", "spec.decode.groups: got '2', expected a valid integer"),
        ("spec.decode.groups", 1.5, "spec.decode.groups: got 1.5, expected a valid integer"),
        ("spec.decode.groups", True, "spec.decode.groups: got true, expected a valid integer"),
        ("spec.decode.groups", 0, "spec.decode.groups: got 0, expected greater than or equal to 1"),
        ("spec.decode.groups", 65, "spec.decode.groups: got 65, expected less than or equal to 64"),
        ("spec.decode.maxNumSeqs", -1, "spec.decode.maxNumSeqs: got -1, expected greater than or equal to 1"),
        ("spec.decode", [], "spec.decode: got []"),
        ("spec.suspend", "yes", "spec.suspend: got 'yes', expected a valid boolean"),
        ("spec.model.maxModelLen", 10**9, "expected less than or equal to 16777216"),
        ("spec.model.architecture", "Kimi K3", "spec.model.architecture: got 'Kimi K3'"),
        ("spec.model.checkpoint.hostPath.path", "k3", "spec.model.checkpoint.hostPath.path: got 'k3'"),
        ("spec.model.checkpoint", {}, "expected exactly one of hostPath, persistentVolumeClaim and image"),
        ("spec.model.checkpoint.image", {"reference": "r/k3"}, "expected exactly one of hostPath"),
        ("spec.precision.kvCache", "FP16", "spec.precision.kvCache: got 'FP16', expected 'Auto', 'BF16' or 'FP32'"),
        ("spec.handoff.transport", "RDMA", "spec.handoff.transport: got 'RDMA', expected 'Auto', 'MoRIIO' or 'NIXL'"),
        ("spec.decode.template.env", [{"name": "1X"}], "spec.decode.template.env.0.name: got '1X'"),
        ("spec.decode.template.resources.limits", {"cpu": "many"}, "spec.decode.template.resources.limits.cpu"),
        ("metadata.name", "K3", "metadata: "),
        ("metadata.name", "k" * 41, "a name of at most 40 lower-case letters"),
        ("kind", "KimiDeploy", "kind: got 'KimiDeploy', expected 'KimiDeployment'"),
    ],
)
def test_a_wrong_value_is_named(path: str, value: Any, expected: str) -> None:
    with pytest.raises(InvalidSpec) as error:
        parse(KimiDeployment, changed(MINIMAL, path, value))
    assert expected in str(error.value)
    assert all(problem.remedy for problem in error.value.problems)


def test_a_missing_section_is_named() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.decode: got nothing, expected a value; set it"):
        parse(KimiDeployment, {"metadata": {"name": "k3"}, "spec": {"model": MINIMAL["spec"]["model"], "prefill": {}}})


def test_every_wrong_field_is_named_at_once() -> None:
    document = changed(changed(MINIMAL, "spec.decode.groups", 0), "spec.router", {"replica": 2})
    with pytest.raises(InvalidSpec) as error:
        parse(KimiDeployment, document, "k3.yaml")
    fields = [problem.field for problem in error.value.problems]
    assert fields == ["k3.yaml.spec.decode.groups", "k3.yaml.spec.router.replica"]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("spec.gpu.memory", "lots", "spec.gpu.memory: got 'lots', expected whole bytes, or a number with one"),
        ("spec.gpu.memory", -1, "spec.gpu.memory: got -1"),
        ("spec.runtime.device", "tpu", "spec.runtime.device: got 'tpu', expected 'cuda' or 'cpu'"),
        ("spec.runtime.kvCacheDtype", "float8", "spec.runtime.kvCacheDtype: got 'float8'"),
        ("spec.match.deviceIds", ["0x74a1"], "spec.match.deviceIds.0: got '0x74a1'"),
        ("spec.limits.pageSizeTokens", 0, "spec.limits.pageSizeTokens: got 0"),
        ("spec.pod.devices", ["dev/kfd"], "spec.pod.devices.0: got 'dev/kfd'"),
        ("spec.pod.capabilities", ["sys admin"], "spec.pod.capabilities.0: got 'sys admin'"),
    ],
)
def test_a_wrong_profile_is_named(path: str, value: Any, expected: str) -> None:
    document = yaml.safe_load((EXAMPLES / "local" / "profile.yaml").read_text())
    with pytest.raises(InvalidSpec) as error:
        parse(HardwareProfile, changed(document, path, value))
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("64Mi", 64 << 20), ("11.2Gi", 12_025_908_428), ("13G", 13 * 10**9), ("201310208Ki", 201310208 << 10), ("7", 7)],
)
def test_quantities_are_exact_bytes(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1e3", "1KiB", "-"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole bytes, or a number with one of the units"):
        parse_bytes(text)


def test_status_of_a_newer_operator_can_be_read() -> None:
    status = parse(KimiDeploymentStatus, {"observedGeneration": 3, "forecast": {"tokens": 7}})
    assert status.observed_generation == 3


def test_vocabulary_is_camel_case_and_has_no_synonyms() -> None:
    for word in [*ConditionType, *Reason]:
        assert word.value.isalpha()
        assert word.value[0].isupper()
    assert len({word.value for word in Reason}) == len(Reason)
