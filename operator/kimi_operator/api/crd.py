"""Writes the CRDs that follow from the models, and the profiles that the chart ships.

`python -m kimi_operator.api.crd [--check] [ROOT]` writes (or only compares) the files below the repository's root.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kimi_operator.api.base import GROUP, VERSION
from kimi_operator.api.deployment import MAX_NAME_LENGTH, NAME_PATTERN, KimiDeployment, KimiDeploymentSpec
from kimi_operator.api.profile import HardwareProfile, HardwareProfileSpec
from kimi_operator.api.schema import Schema, structural_schema
from kimi_operator.api.status import KimiDeploymentStatus

HEADER = "# Generated from the models in kimi_operator.api by `python -m kimi_operator.api.crd`; do not edit.\n"
CRD_FOLDERS = ("crds", "charts/kimi-operator/crds")
PROFILE_FOLDER = "charts/kimi-operator/files/profiles"
REPOSITORY = Path(__file__).resolve().parents[3]


def kimi_deployment_crd() -> dict[str, Any]:
    """The CRD of KimiDeployment."""
    schema = _object_schema(KimiDeployment, KimiDeploymentSpec, KimiDeploymentStatus)
    name = {"type": "string", "maxLength": MAX_NAME_LENGTH, "pattern": NAME_PATTERN}
    schema["properties"]["metadata"]["properties"] = {"name": name}
    return _crd("KimiDeployment", "kd", "Namespaced", schema, _deployment_columns())


def hardware_profile_crd() -> dict[str, Any]:
    """The CRD of HardwareProfile."""
    columns = [
        _column("GPU", ".spec.gpu.architecture"),
        _column("Resource", ".spec.gpu.resource"),
        _column("GPUs", ".spec.gpu.perNode", "integer"),
        _column("Memory", ".spec.gpu.memory"),
        _column("Transport", ".spec.fabric.transport", wide=True),
        _column("Worker", ".spec.worker.support", wide=True),
        _column("Age", ".metadata.creationTimestamp", "date"),
    ]
    return _crd(
        "HardwareProfile", "hwp", "Cluster", _object_schema(HardwareProfile, HardwareProfileSpec, None), columns
    )


def all_crds() -> tuple[dict[str, Any], ...]:
    """Every CRD of this version."""
    return (kimi_deployment_crd(), hardware_profile_crd())


def generated_files() -> dict[str, str]:
    """Path below the repository's root to content."""
    crds = {f"{crd['metadata']['name']}.yaml": HEADER + _yaml(crd) for crd in all_crds()}
    files = {f"{folder}/{name}": text for folder in CRD_FOLDERS for name, text in crds.items()}
    hardware = Path(__file__).resolve().parents[1] / "profiles" / "hardware"
    return files | {f"{PROFILE_FOLDER}/{path.name}": path.read_text() for path in sorted(hardware.glob("*.yaml"))}


def drifted(root: Path) -> list[str]:
    """Files that are absent or differ from what the models give."""
    return [
        path
        for path, text in generated_files().items()
        if not (root / path).is_file() or (root / path).read_text() != text
    ]


def _object_schema(model: type[BaseModel], spec: type[BaseModel], status: type[BaseModel] | None) -> Schema:
    properties: dict[str, Schema] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": structural_schema(spec, defaults=True),
    }
    if status is not None:
        properties["status"] = structural_schema(status, defaults=False)
    return {"type": "object", "description": model.__doc__, "required": ["spec"], "properties": properties}


def _crd(kind: str, short: str, scope: str, schema: Schema, columns: list[dict[str, Any]]) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": columns,
    }
    if "status" in schema["properties"]:
        version["subresources"] = {"status": {}}
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": kind.lower(),
        "shortNames": [short],
        "categories": ["inference"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": scope, "names": names, "versions": [version]},
    }


def _deployment_columns() -> list[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    return [
        _column("Model", ".spec.model.servedName"),
        _column("Prefill", ".status.prefill.summary"),
        _column("Decode", ".status.decode.summary"),
        _column("GPUs", ".status.plan.gpus", "integer"),
        _column("Ready", f"{ready}.status"),
        _column("Reason", f"{ready}.reason"),
        _column("Age", ".metadata.creationTimestamp", "date"),
        _column("Revision", ".status.revision", wide=True),
        _column("Profile", ".status.plan.profile", wide=True),
        _column("MaxSeqs", ".status.plan.decode.maxNumSeqs", "integer", wide=True),
        _column("KV pool", ".status.plan.decode.kvPool", wide=True),
        _column("URL", ".status.url", wide=True),
    ]


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if wide else {})}


class _Dumper(yaml.SafeDumper):
    """YAML without anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return True


def _yaml(document: object) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def main(arguments: list[str]) -> int:
    """Write the files, or with --check list those that differ and return 1 when there are any."""
    parser = argparse.ArgumentParser(prog="python -m kimi_operator.api.crd", description=main.__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=REPOSITORY, help="folder of crds and charts")
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args(arguments)
    root, check = asked.root, asked.check
    stale = drifted(root)
    for path in stale:
        if not check:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(generated_files()[path])
        sys.stdout.write(f"{'differs' if check else 'wrote'} {path}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
