"""Reading manifests for commands that work without a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kimi_operator.api.base import parse
from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Architecture, Infeasible, Plan
from kimi_operator.profiles import architecture, built_in_profiles, select_profile
from kimi_operator.profiles.forecast import plan_on

STANDARD_INPUT = Path("-")
Document = Mapping[str, Any]
Documents = list[tuple[Path, Document]]


@dataclass(frozen=True, slots=True)
class Planned:
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
    """Plan a deployment. Raises InvalidSpec for an architecture or a profile that nobody knows."""
    chosen = select_profile(deployment.spec, profiles, node_labels=())
    model = architecture(deployment.spec.model.architecture)
    return Planned(deployment, chosen, model, plan_on(model, deployment.spec, chosen))


def read_documents(files: Iterable[Path]) -> Documents:
    """What lies in the files, after what lies in a `profile.yaml` beside them; `-` is standard input.

    Raises InvalidSpec that names the file.
    """
    given = [(file, document) for file in files for document in _read(file)]
    beside = {neighbour: None for file in files for neighbour in _beside(file)}
    return [(file, document) for file in beside for document in _read(file)] + given


def deployment_of(documents: Documents, files: Iterable[Path]) -> KimiDeployment:
    """The one KimiDeployment of the documents. Raises InvalidSpec that names file and field."""
    found = [(file, document) for file, document in documents if document.get("kind") == "KimiDeployment"]
    if len(found) != 1:
        raise _refuse(files, f"{len(found)} KimiDeployments", "exactly one")
    return parse(KimiDeployment, found[0][1], str(found[0][0]))


def profiles_of(documents: Documents) -> Mapping[str, HardwareProfile]:
    """The built-in profiles and those of the documents, by name. Raises InvalidSpec that names file and field."""
    profiles = dict(built_in_profiles())
    for file, document in documents:
        if document.get("kind") == "HardwareProfile":
            profile = parse(HardwareProfile, document, str(file))
            profiles[profile.metadata.name] = profile
    return profiles


def _read(file: Path) -> Iterator[Document]:
    try:
        text = sys.stdin.read() if file == STANDARD_INPUT else file.read_text(encoding="utf-8")
        loaded = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse([file], str(error), "a readable file") from error
    except yaml.YAMLError as error:
        raise _refuse([file], f"no YAML: {error}", "YAML documents") from error
    for document in loaded:
        if document is None:
            continue
        if not isinstance(document, Mapping):
            raise _refuse([file], type(document).__name__, "an object with apiVersion, kind, metadata and spec")
        yield document


def _beside(file: Path) -> Iterator[Path]:
    beside = file.parent / "profile.yaml"
    if file not in (STANDARD_INPUT, beside) and beside.is_file():
        yield beside


def _refuse(files: Iterable[Path], got: str, expected: str) -> InvalidSpec:
    names = ", ".join(str(file) for file in files)
    return InvalidSpec((Problem(names, got, expected, "mend the file"),))
