"""Numbers of architectures that stand in rules of the CRD, and what the planner says to the same."""

from __future__ import annotations

from kimi_operator.api.deployment import EXPERTS, MAX_POSITIONS, KimiDeploymentSpec
from kimi_operator.profiles import architecture

NAMES = ("kimi-k3", "kimi-k3-tiny")


def test_the_numbers_are_those_of_the_architectures() -> None:
    assert {name: architecture(name).num_experts for name in NAMES} == EXPERTS
    assert {name: architecture(name).max_positions for name in NAMES} == MAX_POSITIONS


def test_each_role_has_its_rule_with_the_field_to_change() -> None:
    schema = KimiDeploymentSpec.model_config["json_schema_extra"]
    assert isinstance(schema, dict)
    rules = schema["x-kubernetes-validations"]
    assert isinstance(rules, list)
    found = {one["fieldPath"]: one for one in rules if isinstance(one, dict) and "experts" in str(one["message"])}
    assert set(found) == {".prefill.nodesPerGroup", ".decode.nodesPerGroup"}
    assert "self.decode.nodesPerGroup * self.decode.gpusPerNode" in str(found[".decode.nodesPerGroup"]["rule"])
    assert "896 of kimi-k3, 8 of kimi-k3-tiny" in str(found[".decode.nodesPerGroup"]["message"])
