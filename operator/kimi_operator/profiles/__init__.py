"""Built-in hardware profiles and architectures, and how the profile of a deployment is found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kimi_operator.api.deployment import KimiDeploymentSpec
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.planner.architecture import Architecture


def built_in_profiles() -> dict[str, HardwareProfile]:
    """The profiles that ship with the operator, by name."""
    raise NotImplementedError


def architecture(name: str) -> Architecture:
    """A built-in architecture. Raises InvalidSpec that lists the known names."""
    raise NotImplementedError


def select_profile(
    spec: KimiDeploymentSpec, profiles: Mapping[str, HardwareProfile], node_labels: Iterable[Mapping[str, str]]
) -> HardwareProfile:
    """The profile that spec.hardware.profile names, else the one that the GPU nodes' labels point to.

    Raises InvalidSpec when the name is unknown, or when no or more than one profile matches the nodes.
    """
    raise NotImplementedError
