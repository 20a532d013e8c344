"""Built-in hardware profiles and architectures as data files, and how the profile of a deployment is found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import yaml

from kimi_operator.api.base import parse, parse_bytes
from kimi_operator.api.deployment import KimiDeploymentSpec
from kimi_operator.api.profile import HardwareProfile, MatchSpec
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.architecture import Architecture, read_architecture

LABEL_PREFIXES = ("amd.com/gpu.", "beta.amd.com/gpu.")


def _data(folder: str, suffix: str) -> dict[str, Traversable]:
    entries = (files(__name__) / folder).iterdir()
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


def select_profile(
    spec: KimiDeploymentSpec, profiles: Mapping[str, HardwareProfile], node_labels: Iterable[Mapping[str, str]]
) -> HardwareProfile:
    """The profile that spec.hardware.profile names, else the one that the GPU nodes' labels point to.

    `profiles` are those of the cluster (or the built-in ones), `node_labels` the labels of each node.
    Raises InvalidSpec when the name is unknown, or when no or more than one profile matches the nodes.
    """
    wanted = spec.hardware.profile
    if wanted is not None:
        if wanted not in profiles:
            raise _refuse(repr(wanted), f"the name of a HardwareProfile: one of {sorted(profiles)}")
        return profiles[wanted]
    labels = list(node_labels)
    matching = sorted(name for name, p in profiles.items() if any(matches(p.spec.match, node) for node in labels))
    if len(matching) != 1:
        seen = f"nothing, and the nodes' labels match {matching or 'no profile'}"
        raise _refuse(seen, f"one of {sorted(profiles)}")
    return profiles[matching[0]]


def matches(match: MatchSpec, labels: Mapping[str, str]) -> bool:
    """Whether a node is of this class: device id and, where both state it, memory must agree."""
    device = _gpu_label(labels, "device-id")
    if device not in match.device_ids:
        return False
    vram = _gpu_label(labels, "vram")
    if match.vram is None or vram is None:
        return True
    try:
        # The node labeller writes 192G for 192 GiB.
        return parse_bytes(vram.removesuffix("i") + "i") == match.vram
    except ValueError:
        return False


def _gpu_label(labels: Mapping[str, str], name: str) -> str | None:
    return next((labels[prefix + name] for prefix in LABEL_PREFIXES if prefix + name in labels), None)


def _refuse(got: str, expected: str) -> InvalidSpec:
    return InvalidSpec((Problem("spec.hardware.profile", got, expected, "name a profile or create it"),))
