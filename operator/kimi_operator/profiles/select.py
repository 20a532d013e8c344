"""Pure: which profile a deployment runs with, and the nodes that are something else than it describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from kimi_operator.api.deployment import KimiDeploymentSpec, Role
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.profiles.detect import LABEL_PREFIXES, Match, Refused, detect, misfit

FIELD = "spec.hardware.profile"
MOST_TOLD = 8
"""Kinds of nodes that are told apart; more would drown the first."""
MOST_NAMED = 3
"""Nodes of a kind that are named."""

NodeLabels = Iterable[tuple[str, Mapping[str, str]]]
"""Name and labels of each node."""


def select_profile(
    spec: KimiDeploymentSpec, profiles: Mapping[str, HardwareProfile], node_labels: NodeLabels
) -> HardwareProfile:
    """The profile that spec.hardware.profile names, else the one that the GPU nodes' labels point to.

    `profiles` are those of the cluster (or the built-in ones). Raises InvalidSpec when the name is unknown, and when
    the nodes are of no profile, with what is wrong with each, or of several.
    """
    wanted = spec.hardware.profile
    if wanted is not None and wanted not in profiles:
        raise InvalidSpec((_unknown(repr(wanted), f"the name of a HardwareProfile: one of {sorted(profiles)}"),))
    return profiles[wanted if wanted is not None else _find(profiles, node_labels)]


def foreign_nodes(
    spec: KimiDeploymentSpec,
    profile: HardwareProfile,
    profiles: Mapping[str, HardwareProfile],
    node_labels: NodeLabels,
) -> tuple[Problem, ...]:
    """GPU nodes that the pods may be scheduled to and that are not what `profile` describes; alike ones together.

    The scheduler counts GPUs and nothing else: it does not tell a whole card from a partition or another chip.
    """
    if not profile.spec.match.device_ids:
        return ()
    found = [
        (name, problem)
        for name, labels in _with_gpus(node_labels)
        if _may_be_scheduled(spec, labels) and (problem := misfit(name, labels, profile, profiles)) is not None
    ]
    return _alike_together(found)


def _find(profiles: Mapping[str, HardwareProfile], node_labels: NodeLabels) -> str:
    """The one profile that nodes are of; those that are of none do not count."""
    nodes: dict[str, list[str]] = {}
    refused: list[tuple[str, Problem]] = []
    for name, labels in _with_gpus(node_labels):
        match detect(name, labels, profiles):
            case Match(profile=profile):
                nodes.setdefault(profile, []).append(name)
            case Refused(problems=problems):
                refused += [(name, problem) for problem in problems]
    if len(nodes) == 1:
        return next(iter(nodes))
    if nodes:
        kinds = "; ".join(f"{_names(names)} of {profile}" for profile, names in sorted(nodes.items()))
        raise InvalidSpec((_unknown(f"nothing, and nodes of several profiles: {kinds}", "the name of one of them"),))
    what = "no node is of a known profile" if refused else "no node has labels of AMD's node labeller"
    raise InvalidSpec((_unknown(f"nothing, and {what}", f"one of {sorted(profiles)}"), *_alike_together(refused)))


def _with_gpus(node_labels: NodeLabels) -> list[tuple[str, Mapping[str, str]]]:
    """Nodes whose labels say anything of GPUs, by name: others have none, or nobody labels them."""
    found = (one for one in node_labels if any(label.startswith(LABEL_PREFIXES) for label in one[1]))
    return sorted(found, key=lambda one: one[0])


def _may_be_scheduled(spec: KimiDeploymentSpec, labels: Mapping[str, str]) -> bool:
    selectors = [spec.role(role).template.node_selector for role in Role]
    return any(selector.items() <= labels.items() for selector in selectors)


def _alike_together(found: list[tuple[str, Problem]]) -> tuple[Problem, ...]:
    """One problem for all nodes of which the same is wrong; the first one's remedy."""
    kinds: dict[tuple[str, str, str], list[tuple[str, Problem]]] = {}
    for name, problem in found:
        label = problem.field.removesuffix(f" of node {name}")
        kinds.setdefault((label, problem.got, problem.expected), []).append((name, problem))
    told = [
        nodes[0][1] if len(nodes) == 1 else replace(nodes[0][1], field=f"{label} of {_names([n for n, _ in nodes])}")
        for (label, _, _), nodes in kinds.items()
    ]
    return tuple(told[:MOST_TOLD])


def _names(nodes: list[str]) -> str:
    more = f" and {len(nodes) - MOST_NAMED:,} more" if len(nodes) > MOST_NAMED else ""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(nodes[:MOST_NAMED])}{more}"


def _unknown(got: str, expected: str) -> Problem:
    return Problem(FIELD, got, expected, "name one of them, or create yours (kimictl: give its file with another -f)")
