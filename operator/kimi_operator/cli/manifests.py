"""Reading manifests for commands that work without a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kimi_operator.api.base import parse
from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Infeasible, Plan, make_plan
from kimi_operator.profiles import architecture, built_in_profiles, select_profile

STANDARD_INPUT = Path("-")


@dataclass(frozen=True, slots=True)
class Planned:
    """A deployment with its profile and plan."""

    deployment: KimiDeployment
    profile: HardwareProfile
    plan: Plan | Infeasible


def read_and_plan(files: list[Path]) -> Planned:
    """Read one KimiDeployment, and HardwareProfiles beside the built-in ones, from YAML files; plan it.

    A profile is also looked for in `profile.yaml` beside the deployment's file.
    Raises InvalidSpec that names file and field.
    """
    documents = [document for file in files for document in _documents(file)]
    documents += [document for file in files for document in _neighbour(file)]
    profiles = dict(built_in_profiles())
    for file, document in documents:
        if document.get("kind") == "HardwareProfile":
            profile = parse(HardwareProfile, document, str(file))
            profiles[profile.metadata.name] = profile
    deployments = [(file, document) for file, document in documents if document.get("kind") == "KimiDeployment"]
    if len(deployments) != 1:
        raise _refuse(files, f"{len(deployments)} KimiDeployments", "exactly one")
    deployment = parse(KimiDeployment, deployments[0][1], str(deployments[0][0]))
    chosen = select_profile(deployment.spec, profiles, node_labels=())
    return Planned(
        deployment, chosen, make_plan(architecture(deployment.spec.model.architecture), deployment.spec, chosen)
    )


def _documents(file: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
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
        yield file, document


def _neighbour(file: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    beside = file.parent / "profile.yaml"
    if file not in (STANDARD_INPUT, beside) and beside.is_file():
        yield from _documents(beside)


def _refuse(files: list[Path], got: str, expected: str) -> InvalidSpec:
    names = ", ".join(str(file) for file in files)
    return InvalidSpec((Problem(names, got, expected, "mend the file"),))
