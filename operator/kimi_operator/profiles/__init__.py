"""Built-in hardware profiles and architectures as data files, and how the profile of a deployment is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from kimi_operator.api.base import parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.architecture import Architecture, read_architecture
from kimi_operator.profiles.select import foreign_nodes, select_profile

__all__ = ["architecture", "built_in_profiles", "foreign_nodes", "select_profile"]


def _data(folder: str, suffix: str) -> dict[str, Path]:
    entries = (Path(__file__).parent / folder).iterdir()
    return {entry.name.removesuffix(suffix): entry for entry in entries if entry.name.endswith(suffix)}


@cache
def built_in_profiles() -> Mapping[str, HardwareProfile]:
    """The profiles that ship with the operator, by name."""
    found = {}
    for name, entry in sorted(_data("hardware", ".yaml").items()):
        document = yaml.load(entry.read_text(), Loader=yaml.CSafeLoader)
        found[name] = parse(HardwareProfile, document, entry.name)
    return found


@cache
def architecture(name: str) -> Architecture:
    """A built-in architecture. Raises InvalidSpec that lists the known names."""
    known = _data("architectures", ".json")
    if name not in known:
        problem = Problem(
            "spec.model.architecture", repr(name), f"one of {sorted(known)}", "choose a built-in architecture"
        )
        raise InvalidSpec((problem,))
    return read_architecture(name, json.loads(known[name].read_text()))
