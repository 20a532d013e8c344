"""The generated CRDs: never out of step with the models, structural, and strict about sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kimi_operator.api import crd
from kimi_operator.profiles import built_in_profiles

REPOSITORY = Path(__file__).resolve().parents[3]
CRDS = {"kd": crd.kimi_deployment_crd(), "hwp": crd.hardware_profile_crd()}


def schema_of(name: str) -> dict[str, Any]:
    return CRDS[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a schema with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def at(name: str, path: str) -> dict[str, Any]:
    return dict(nodes(schema_of(name)))[path]


def rules(name: str) -> dict[str, list[str]]:
    found = {path: node.get("x-kubernetes-validations", []) for path, node in nodes(schema_of(name))}
    return {path: [rule["rule"] for rule in items] for path, items in found.items() if items}


def test_generated_files_do_not_drift() -> None:
    assert crd.drifted(REPOSITORY) == [], "run `python -m kimi_operator.api.crd`"


def test_drift_is_seen_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--check", str(tmp_path)]) == 1
    assert crd.main([str(tmp_path)]) == 0
    assert crd.main(["--check", str(tmp_path)]) == 0
    stale = tmp_path / "crds" / "kimideployments.kimi-operator.io.yaml"
    stale.write_text(stale.read_text().replace("maxLength: 40", "maxLength: 63"))
    assert crd.main(["--check", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "differs crds/kimideployments.kimi-operator.io.yaml"


@pytest.mark.parametrize("name", CRDS)
def test_schemas_are_structural(name: str) -> None:
    for path, node in nodes(schema_of(name)):
        is_int_or_string = node.get("x-kubernetes-int-or-string", False)
        assert ("type" in node) != is_int_or_string, path
        assert not {"$ref", "oneOf", "allOf", "const", "title", "nullable", "exclusiveMinimum"} & set(node), path
        assert ("anyOf" in node) == is_int_or_string, path


@pytest.mark.parametrize("name", CRDS)
def test_everything_of_variable_size_has_a_bound(name: str) -> None:
    """Without bounds the API server refuses rules as too costly."""
    for path, node in nodes(schema_of(name)):
        if path.startswith(".status") or path in (".apiVersion", ".kind") or "enum" in node:
            continue
        match node.get("type"):
            case "string":
                assert "maxLength" in node or "pattern" in node, path
            case "array":
                assert "maxItems" in node, path
            case "integer":
                assert "minimum" in node, path
            case "object" if "additionalProperties" in node:
                assert "maxProperties" in node, path


@pytest.mark.parametrize("name", CRDS)
def test_every_field_is_described(name: str) -> None:
    for path, node in nodes(schema_of(name)):
        if path.endswith("[]") or path.count(".") < 2 or path == ".metadata.name":
            continue
        assert node.get("description"), path


def test_rules_of_a_deployment() -> None:
    found = rules("kd")
    assert found[".spec.model.checkpoint"] == [
        "[has(self.hostPath), has(self.persistentVolumeClaim), has(self.image)].filter(x, x).size() == 1"
    ]
    assert found[".spec"][0] == "self.prefill.tensorParallel == self.decode.tensorParallel"
    assert len(found[".spec"]) == 3, "and the experts of each role: test_rules_of_architectures.py"
    for role in ("prefill", "decode"):
        (divides,) = found[f".spec.{role}"]
        assert divides.endswith(" || self.gpusPerNode % self.tensorParallel == 0")
    frozen = [".spec.model.architecture", ".spec.model.servedName"]
    frozen += [f".spec.{role}.{size}" for role in ("prefill", "decode") for size in SHAPE]
    assert all(found[path] == ["self == oldSelf"] for path in frozen)


def test_rules_of_a_workload() -> None:
    found = rules("kd")
    for lengths in ("prompt", "output"):
        assert "filter(x, x).size() == 1" in found[f".spec.workload.{lengths}"][0]
        assert found[f".spec.workload.{lengths}.uniform"] == ["self.min <= self.max"]
        assert found[f".spec.workload.{lengths}.logNormal"] == ["self.median <= self.p95"]
    assert "!has(self.requestsPerSecond) || !has(self.concurrency)" in found[".spec.workload"]
    assert at("kd", ".spec.workload.prompt.empirical")["maxItems"] == 1024


SHAPE = ("nodesPerGroup", "gpusPerNode", "tensorParallel")


def test_fields_of_rules_that_compare_with_the_past_always_exist() -> None:
    """A transition rule is skipped when the field was absent before: each has a default or is required."""
    for path, node in nodes(schema_of("kd")):
        if any("oldSelf" in rule["rule"] for rule in node.get("x-kubernetes-validations", [])):
            assert "default" in node, path


def test_what_is_required_has_no_default() -> None:
    """The API server checks a default against the rules before it fills in the fields that they read."""
    for name in CRDS:
        for path, node in nodes(schema_of(name)):
            for field in node.get("required", []):
                assert "default" not in node.get("properties", {}).get(field, {}), f"{path}.{field}"


def test_messages_are_fixed() -> None:
    """A message that is put together from values is refused as too costly."""
    for _, node in nodes(schema_of("kd")):
        for rule in node.get("x-kubernetes-validations", []):
            assert rule["message"]
            assert "messageExpression" not in rule


def test_names_leave_room_for_what_is_appended() -> None:
    assert at("kd", ".metadata.name")["maxLength"] == 40
    longest = "k" * 40 + "-prefill-63"
    assert len(f"{longest}-{'c' * 10}") <= 63, "label controller-revision-hash"
    assert len(f"{longest}-63") <= 63, "label statefulset.kubernetes.io/pod-name and the host name"


def test_defaults_stand_in_the_spec_and_not_in_the_status() -> None:
    assert at("kd", ".spec.decode.tensorParallel")["default"] == 2
    assert at("kd", ".spec.precision")["default"] == {}
    assert all("default" not in node for path, node in nodes(schema_of("kd")) if path.startswith(".status"))


def test_conditions_are_a_map_keyed_by_type() -> None:
    conditions = at("kd", ".status.conditions")
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_names_columns_and_subresources() -> None:
    spec = CRDS["kd"]["spec"]
    version = spec["versions"][0]
    assert spec["names"]["shortNames"] == ["kd"]
    assert spec["names"]["categories"] == ["inference"]
    assert version["subresources"] == {"status": {}}
    names = {column["name"]: column.get("priority", 0) for column in version["additionalPrinterColumns"]}
    assert [name for name, priority in names.items() if priority == 0] == [
        "Model", "Prefill", "Decode", "GPUs", "Ready", "Reason", "Age",
    ]  # fmt: skip
    assert [name for name, priority in names.items() if priority == 1] == [
        "Revision", "Profile", "MaxSeqs", "KV pool", "URL",
    ]  # fmt: skip


def test_columns_point_at_fields_that_exist() -> None:
    for name, definition in CRDS.items():
        paths = dict(nodes(schema_of(name)))
        for column in definition["spec"]["versions"][0]["additionalPrinterColumns"]:
            path = column["jsonPath"].replace('[?(@.type=="Ready")]', "[]")
            assert path in paths or path == ".metadata.creationTimestamp", column


def test_a_profile_says_in_a_wide_column_what_the_worker_promises() -> None:
    columns = {column["name"]: column for column in CRDS["hwp"]["spec"]["versions"][0]["additionalPrinterColumns"]}
    assert [name for name in columns if "priority" in columns[name]] == ["Transport", "Worker"]
    for name, profile in built_in_profiles().items():
        assert profile.spec.worker is not None, name


def test_a_flag_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        crd.main(["--chek"])
    assert list(tmp_path.iterdir()) == []
