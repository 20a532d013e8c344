"""Two plans side by side: `--what-if` edits one and shows what changes, `--compare` takes two manifests. Pure."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.base import dump, fields_at, parse, paths_of
from kimi_operator.api.deployment import KimiDeployment, KimiDeploymentSpec, Role
from kimi_operator.api.profile import Basis, HardwareProfile, HardwareProfileSpec
from kimi_operator.cli.figures import Amount, Figure, factor_of, with_band
from kimi_operator.cli.files import read_value
from kimi_operator.cli.flags import known_as, refuse
from kimi_operator.errors import InvalidSpec
from kimi_operator.numerals import whole
from kimi_operator.planner.predict import Prediction
from kimi_operator.planner.units import counted

NO_FIGURE = Figure("", "-", "", "", "")
WIDEST = 48
"""Longer cells push the next one to the right."""
LEAST_FACTOR_CHANGE = 0.001
"""Relative; smaller ones are no other measurement."""
WHAT_IF_SOURCE = "stated by --what-if"
SHORT = {
    "chip": ("spec.hardware.profile",),
    "profile": ("spec.hardware.profile",),
    "maxModelLen": ("spec.model.maxModelLen",),
    "kvCache": ("spec.precision.kvCache",),
    **{
        name: (f"spec.prefill.{name}", f"spec.decode.{name}")
        for name in ("tensorParallel", "maxNumSeqs", "nodesPerGroup", "gpusPerNode")
    },
}
"""Keys for what both roles have in common, and for what is long to write."""


class Inputs(Struct, frozen=True):
    """Documents that a plan is made of."""

    deployment: Mapping[str, Any]
    profile: Mapping[str, Any]
    workload: Mapping[str, Any]
    """Beside the deployment's own; empty where nobody states one."""


def edited(inputs: Inputs, edits: Iterable[str], profiles: Mapping[str, HardwareProfile]) -> Inputs:
    """The inputs with each KEY=VALUE set. Raises InvalidSpec that names the edit which cannot be made."""
    edits = list(edits)
    _check_once(edits)
    # another chip first, so that edits of the profile are of the chip that is planned with
    for edit in sorted(edits, key=lambda text: text.startswith("profile.")):
        inputs = _edited(inputs, edit)
        name = _chip_of(inputs)
        if name != inputs.profile["metadata"]["name"]:
            inputs = _on_chip(inputs, name, profiles)
    return inputs


def _on_chip(inputs: Inputs, name: object, profiles: Mapping[str, HardwareProfile]) -> Inputs:
    """The inputs with the profile of this name, in capitals or not. Raises InvalidSpec where there is none."""
    try:
        profile = profiles[known_as(name if isinstance(name, str) else "", profiles)]
    except ValueError as error:
        expected = f"the name of a HardwareProfile: one of {sorted(profiles)}"
        raise refuse("--what-if chip", repr(name), expected, "name one, or give its file with -f") from error
    deployment = _set(inputs.deployment, "spec.hardware.profile", profile.metadata.name, "chip")
    return replace(inputs, deployment=deployment, profile=dump(profile))


def _check_once(edits: Iterable[str]) -> None:
    first: dict[tuple[str, ...], str] = {}
    for edit in edits:
        paths = _paths(edit.partition("=")[0].strip())
        if paths in first:
            raise refuse("--what-if", f"{first[paths]!r} and {edit!r}", "each key once", "leave one of them out")
        first[paths] = edit


def _paths(key: str) -> tuple[str, ...]:
    """Fields of a deployment that a key is short for."""
    return SHORT.get(key, (key if key.startswith("spec.") else f"spec.{key}",))


def _chip_of(inputs: Inputs) -> object:
    """The chip that is planned with; what is no object is refused later, by its field."""
    hardware = inputs.deployment["spec"]["hardware"]
    return hardware.get("profile") if isinstance(hardware, Mapping) else inputs.profile["metadata"]["name"]


def _edited(inputs: Inputs, edit: str) -> Inputs:
    key, equals, text = edit.partition("=")
    if not equals or not key.strip() or not text.strip():
        raise refuse("--what-if", repr(edit), "KEY=VALUE", "write decode.maxNumSeqs=32, nodes=8 or chip=mi325x")
    value = read_value(f"--what-if {key}", text)
    if key.strip() == "nodes":
        return _with_nodes(inputs, value)
    section, _, rest = key.partition(".")
    if section in ("profile", "workload") and rest:
        if section == "workload":
            return _with_workload(inputs, rest, value, edit)
        return replace(inputs, profile=_with_source(_set(inputs.profile, f"spec.{rest}", value, edit), rest))
    _check_begins_with_a_field(key, edit)
    deployment = inputs.deployment
    for path in _paths(key):
        deployment = _set(deployment, path, value, edit)
    return replace(inputs, deployment=deployment)


def _check_begins_with_a_field(key: str, edit: str) -> None:
    """Raises InvalidSpec for the name alone of a field that stands deeper, with its path."""
    if key in SHORT or "." in key or key in fields_at(KimiDeploymentSpec, ()):
        return
    paths = [*paths_of(KimiDeploymentSpec, key), *(f"profile.{path}" for path in paths_of(HardwareProfileSpec, key))]
    if paths:
        expected = f"the path of a field: {' or '.join(paths)}"
        raise refuse("--what-if", repr(edit), expected, f"write {edit.replace(key, paths[0], 1)}")


def _with_workload(inputs: Inputs, rest: str, value: object, edit: str) -> Inputs:
    """The manifest's own workload, for which the plan is cut, and that of flags, which is predicted."""
    if "workload" in inputs.deployment["spec"]:
        in_spec = {"fixed": value} if rest in ("prompt", "output") and type(value) is int else value
        inputs = replace(inputs, deployment=_set(inputs.deployment, f"spec.workload.{rest}", in_spec, edit))
        if not inputs.workload:
            return inputs
    return replace(inputs, workload=_set(inputs.workload, rest, value, edit))


def _with_nodes(inputs: Inputs, nodes: object) -> Inputs:
    """Both roles grow or shrink by whole groups, in the proportion that they have."""
    try:
        spec = parse(KimiDeployment, inputs.deployment).spec
    except InvalidSpec as error:
        raise named(error, "--what-if") from error
    now = nodes_of(spec)
    groups = {role: spec.role(role).groups for role in Role}
    least = math.gcd(*groups.values())
    step = sum(now.values()) // least
    if not isinstance(nodes, int) and (number := whole(nodes)) is not None:
        raise refuse("--what-if nodes", repr(nodes), "a whole number", f"write nodes={number}")
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < step or nodes % step:
        expected = f"a multiple of {step}: whole groups of both roles in the proportion {_shares(now)}"
        keys = " and ".join(
            f"{role}.groups (now {number} of {_of_a_group(spec, role)})" for role, number in groups.items()
        )
        raise refuse("--what-if nodes", repr(nodes), expected, f"set {keys} instead, or let --search choose")
    deployment = inputs.deployment
    for role, number in groups.items():
        deployment = _set(deployment, f"spec.{role}.groups", number // least * (nodes // step), "nodes")
    return replace(inputs, deployment=deployment)


def _of_a_group(spec: KimiDeploymentSpec, role: Role) -> str:
    return counted(spec.role(role).nodes_per_group, "node")


def nodes_of(spec: KimiDeploymentSpec) -> dict[Role, int]:
    """Nodes of all groups of each role."""
    return {role: spec.role(role).groups * spec.role(role).nodes_per_group for role in Role}


def _shares(nodes: Mapping[Role, int]) -> str:
    return " : ".join(f"{number} {role}" for role, number in nodes.items())


def heading(edits: Iterable[str], spec: KimiDeploymentSpec) -> str:
    """The edits as they were typed; a number of nodes with what each role got of it."""
    nodes = nodes_of(spec)
    shares = ", ".join(f"{number} {role}" for role, number in nodes.items())
    # a later edit may have changed them again
    typed = f"nodes={sum(nodes.values())}"
    return ", ".join(f"{edit} ({shares})" if edit.replace(" ", "") == typed else edit for edit in edits)


def _with_source(profile: dict[str, Any], path: str) -> dict[str, Any]:
    """The figure no longer comes from where the profile says."""
    spec = profile["spec"]
    for table, value in (("sources", WHAT_IF_SOURCE), ("basis", Basis.ASSUMED.value)):
        stated = spec.get(table, {})
        # what is no table is refused by its field
        if isinstance(stated, Mapping) and path.partition(".")[0] not in ("sources", "basis"):
            spec[table] = {**stated, path: value}
    return profile


def _set(document: Mapping[str, Any], path: str, value: object, edit: str) -> dict[str, Any]:
    copied = copy.deepcopy(dict(document))
    *sections, field = path.split(".")
    place: Any = copied
    for section in sections:
        place = place.setdefault(section, {}) if isinstance(place, dict) else place
    if not isinstance(place, dict):
        raise refuse("--what-if", repr(edit), "a field of an object", "name the field as in the manifest")
    place[field] = value
    return copied


def read_edited(inputs: Inputs) -> tuple[KimiDeployment, HardwareProfile]:
    """The edited documents, checked as files are. Raises InvalidSpec."""
    return parse(KimiDeployment, inputs.deployment), parse(HardwareProfile, inputs.profile, "profile")


def deployment_inputs(deployment: KimiDeployment, profile: HardwareProfile, workload: Mapping[str, Any]) -> Inputs:
    """The documents behind a plan; the profile by its own name, even where the nodes' labels chose it."""
    document = dump(deployment)
    document["spec"].setdefault("hardware", {})["profile"] = profile.metadata.name
    for role in Role:
        document["spec"].setdefault(str(role), {})
    return Inputs(document, dump(profile), workload)


class Change(Struct, frozen=True):
    """One figure of two plans."""

    key: str
    before: str
    after: str
    before_amount: Amount | None = None
    after_amount: Amount | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the two differ."""
        return self.before != self.after


def factor_notes(before: Mapping[str, Prediction], after: Mapping[str, Prediction]) -> Iterator[str]:
    """Phases whose factor was fitted on other measurements in either plan, with both times at the factor of the first.

    Else a chip of more bandwidth may look slower, by what one run of one engine took on it.
    """
    for phase, one in before.items():
        other = after.get(phase)
        if other is None or math.isclose(factor_of(one), factor_of(other), rel_tol=LEAST_FACTOR_CHANGE):
            continue
        alike = other.scaled(factor_of(one) / factor_of(other), other.unit)
        yield (
            f"{phase}: {one.fitted_on} in the first plan, {other.fitted_on} in the second: other measurements, "
            f"so part of the difference is theirs. With one factor, {factor_of(one):.3f}: {with_band(one)} in the "
            f"first, {with_band(alike)} in the second"
        )


def changes(before: Iterable[Figure], after: Iterable[Figure]) -> list[Change]:
    """Every figure of either plan, in the order of the first."""
    old, new = ({figure.key: figure for figure in figures} for figures in (before, after))
    pairs = ((key, old.get(key, NO_FIGURE), new.get(key, NO_FIGURE)) for key in dict.fromkeys((*old, *new)))
    return [Change(key, one.text, other.text, one.amount, other.amount) for key, one, other in pairs]


def table(rows: list[Change], heads: tuple[str, str]) -> Iterator[str]:
    """For a terminal."""
    shown = [("", *heads)] + [(row.key, row.before, row.after) for row in rows]
    widths = [min(WIDEST, max(len(line[column]) for line in shown)) for column in range(2)]
    for line in shown:
        yield "  ".join((*(cell.ljust(w) for cell, w in zip(line[:2], widths, strict=True)), line[2])).rstrip()


def markdown_table(rows: list[Change], heads: tuple[str, str]) -> Iterator[str]:
    """The same in Markdown."""
    yield f"| figure | {heads[0]} | {heads[1]} |"
    yield "|---|---|---|"
    for row in rows:
        yield f"| {row.key} | {_cell(row.before)} | {_cell(row.after)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def named(error: InvalidSpec, what: str) -> InvalidSpec:
    """The same error; its fields say of which of two plans they are."""
    return InvalidSpec(tuple(replace(problem, field=f"{what}: {problem.field}") for problem in error.problems))
