"""Reading manifests for commands that work without a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from kimi_operator.api.base import parse
from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.files import STANDARD_INPUT, Documents, profiles_of, read_objects, refuse_file
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner import Architecture, Infeasible, Plan
from kimi_operator.profiles import architecture, select_profile
from kimi_operator.profiles.forecast import plan_on

PROFILE_BESIDE = "profile.yaml"


class Planned(Struct, frozen=True):
    """A deployment with its profile, model and plan."""

    deployment: KimiDeployment
    profile: HardwareProfile
    architecture: Architecture
    plan: Plan | Infeasible


def read_and_plan(files: list[Path]) -> Planned:
    """Read one KimiDeployment, and HardwareProfiles beside the built-in ones, from YAML files; plan it.

    A profile is also looked for in `profile.yaml` beside the deployment's file.
    Raises InvalidSpec that names file and field.
    """
    documents = read_documents(files)
    return plan_deployment(deployment_of(documents, files), profiles_of(documents))


def plan_deployment(deployment: KimiDeployment, profiles: Mapping[str, HardwareProfile]) -> Planned:
    """Plan a deployment. Raises InvalidSpec for sizes that can never be, and for names that nobody knows."""
    chosen = select_profile(deployment.spec, profiles, node_labels=())
    model = architecture(deployment.spec.model.architecture)
    plan = plan_on(model, deployment.spec, chosen)
    if isinstance(plan, Infeasible) and plan.is_wrong:
        raise InvalidSpec(plan.problems)
    return Planned(deployment, chosen, model, plan)


def read_documents(files: Iterable[Path]) -> Documents:
    """What lies in the files, after what lies in a `profile.yaml` beside them; `-` is standard input.

    Raises InvalidSpec that names the file.
    """
    files = list(files)
    given = [(file, document) for file in files for document in read_objects(file)]
    stated = {file.resolve() for file in files}
    beside = dict.fromkeys(found for file in files for found in _beside(file) if found.resolve() not in stated)
    for file in beside:
        sys.stderr.write(f"kimictl: {file} is read too, since it lies beside the manifest\n")
    return [(file, document) for file in beside for document in read_objects(file)] + given


def deployment_of(documents: Documents, files: Iterable[Path]) -> KimiDeployment:
    """The one KimiDeployment of the documents. Raises InvalidSpec that names file and field."""
    found = [(file, document) for file, document in documents if document.get("kind") == "KimiDeployment"]
    if len(found) != 1:
        files = list(files)
        kinds = dict.fromkeys(_kind(each) for file, each in documents if file in files)
        others = f", but {' and '.join(kinds)}" if kinds and not found else ""
        remedy = "mend the file" if found else "name a file with kind: KimiDeployment"
        raise refuse_file(files, f"{len(found)} KimiDeployments{others}", "exactly one", remedy)
    file, document = found[0]
    return parse(KimiDeployment, document, f"{file}: ")


def _kind(document: Mapping[str, Any]) -> str:
    return f"kind {document['kind']}" if "kind" in document else "an object without kind"


def _beside(file: Path) -> Iterator[Path]:
    beside = file.parent / PROFILE_BESIDE
    if file != STANDARD_INPUT and beside.is_file():
        yield beside
