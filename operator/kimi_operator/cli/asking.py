"""What a command line asks to plan: a deployment from files or flags, with a workload, planned and looked ahead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.base import dump, parse
from kimi_operator.api.deployment import KimiDeployment, Role
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.beside import search_beside
from kimi_operator.cli.files import profiles_of
from kimi_operator.cli.flag_documents import (
    DEPLOYMENT_FLAGS,
    NOTHING_TYPED,
    Typed,
    deployment_document,
    named_by_flag,
    read_by_flag,
    typed,
    workload_document,
)
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags, known_as, refuse
from kimi_operator.cli.look_ahead import look_ahead
from kimi_operator.cli.manifests import Planned, deployment_of, plan_deployment, read_documents
from kimi_operator.cli.outlook import Outlook, assumed_workload
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Plan
from kimi_operator.planner.case import Solution
from kimi_operator.planner.demand import FIELD
from kimi_operator.planner.elsewhere import layout_of, load_on, with_remedies, with_room
from kimi_operator.planner.targets import TARGETS
from kimi_operator.planner.workload import Workload, check_lengths, read_workload, workload_of
from kimi_operator.profiles import architecture

WorkloadDocument = Mapping[str, Any]
LENGTHS = ("prompt", "output")
CUT_FOR_OWN = (
    "flags changed the workload that is predicted; what is not stated of maxNumSeqs and pools is still cut for the "
    "manifest's spec.workload, and --what-if workload.KEY=VALUE cuts it anew"
)


class Asked(Struct, frozen=True):
    """A deployment to plan, the profiles that are known, and the workload as a document; empty when none was given."""

    deployment: KimiDeployment
    profiles: Mapping[str, HardwareProfile]
    workload: WorkloadDocument
    flags: frozenset[str] = frozenset()
    """Flags that problems are named by, instead of by fields."""
    written: Typed = NOTHING_TYPED

    @property
    def is_from_flags(self) -> bool:
        """Whether the deployment is none of a manifest."""
        return self.flags >= DEPLOYMENT_FLAGS

    def problems(self, problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
        """Problems by the names that the user wrote."""
        named = named_by_flag(problems, self.flags, self.written)
        return named if self.is_from_flags else tuple(map(in_spec, named))


def in_spec(problem: Problem) -> Problem:
    """The same; a field of the workload where it stands in a manifest."""
    return replace(problem, field=re.sub(r"^workload\b", FIELD, problem.field))


def asked_for(files: list[Path], flags: DeploymentFlags, work: WorkloadFlags) -> Asked:
    """Raises InvalidSpec for files and flags that say nothing, too much, or what cannot be."""
    documents = read_documents(files)
    profiles, written = profiles_of(documents), typed(flags, work)
    is_manifest = any(document.get("kind") == "KimiDeployment" for _, document in documents)
    if files and (is_manifest or not flags.given):
        if flags.given:
            remedy = "edit the manifest, or try kimictl plan --what-if KEY=VALUE"
            raise refuse(flags.given[0], "a flag beside a manifest", "either of them", remedy)
        deployment, names = deployment_of(documents, files), work.given
    else:
        chip = chip_of(flags, profiles)
        document = deployment_document(flags, chip)
        names = DEPLOYMENT_FLAGS | work.given
        deployment = read_by_flag(names, lambda: parse(KimiDeployment, document), written)
    model = read_by_flag(names, lambda: architecture(deployment.spec.model.architecture))
    workload = workload_document(work, own_workload(deployment), model.max_positions)
    return Asked(deployment, profiles, workload, names, written)


def own_workload(deployment: KimiDeployment) -> WorkloadDocument:
    """What the manifest asks for; empty when it does not say."""
    spec = deployment.spec.workload
    return {} if spec is None else dump(spec)


def chip_of(flags: DeploymentFlags, profiles: Mapping[str, HardwareProfile]) -> HardwareProfile:
    """The profile that --chip names, in capitals or not. Raises InvalidSpec without one, or for several."""
    if flags.chip is None:
        if flags.given:
            raise refuse("--chip", "nothing", f"one of {sorted(profiles)}", "name the chip of the nodes")
        raise refuse("--file", "nothing", "a manifest, flags such as --chip mi300x, or --check", "name one with -f")
    try:
        return profiles[known_as(flags.chip, profiles)]
    except ValueError as error:
        remedy = "name one of them, or give its HardwareProfile with -f"
        raise refuse("--chip", repr(flags.chip), f"one of {sorted(profiles)}", remedy) from error


def make_plan(asked: Asked) -> Planned:
    """Plan; from flags for the workload that they state. Raises InvalidSpec for lengths beyond the model."""
    return read_by_flag(asked.flags, lambda: plan_deployment(_with_workload(asked), asked.profiles), asked.written)


def _with_workload(asked: Asked) -> KimiDeployment:
    """The deployment, with the workload in its spec where both are of flags: so it can be applied as it is planned."""
    if not asked.is_from_flags or not has_lengths(asked.workload):
        return asked.deployment
    model = architecture(asked.deployment.spec.model.architecture)
    if problems := check_lengths(read_workload(asked.workload), model.max_positions):
        raise InvalidSpec(problems)
    document = dump(asked.deployment)
    document["spec"]["workload"] = {name: _as_in_a_spec(name, value) for name, value in asked.workload.items()}
    return parse(KimiDeployment, document)


def _as_in_a_spec(name: str, value: object) -> object:
    """A number of tokens as the API wants it."""
    return {"fixed": value} if name in LENGTHS and isinstance(value, int) else value


def has_lengths(workload: WorkloadDocument) -> bool:
    """Whether lengths are stated; without them a plan and a search assume some."""
    return any(name in workload for name in LENGTHS)


def outlook_of(planned: Planned, asked: Asked) -> Outlook:
    """The outlook under the workload, whose lengths are assumed where nobody stated them. Raises InvalidSpec."""
    document, spec = asked.workload, planned.deployment.spec.workload
    if not document:
        outlook = look_ahead(planned, None if spec is None else workload_of(spec, FIELD))
        return _judged(_without_repeats(_with_remedies(outlook)), asked)
    stated = read_by_flag(asked.flags, lambda: _workload(planned, document), asked.written)
    is_assumed = not has_lengths(document)
    outlook = read_by_flag(asked.flags, lambda: look_ahead(planned, stated, is_assumed=is_assumed), asked.written)
    outlook = _with_remedies(outlook)
    if asked.is_from_flags:
        outlook = _without_repeats(outlook)
    elif spec is not None:
        outlook = replace(outlook, plan=replace(outlook.plan, warnings=(*outlook.plan.warnings, CUT_FOR_OWN)))
    return _judged(outlook, asked)


def _workload(planned: Planned, document: WorkloadDocument) -> Workload:
    """The workload of a document. Without any lengths those that are assumed take their place."""
    if has_lengths(document):
        return read_workload(document)
    assert isinstance(planned.plan, Plan), "what does not fit has no workload"
    assumed = assumed_workload(planned, planned.plan)
    demand = read_workload({**document, **dict.fromkeys(LENGTHS, 1)})
    return replace(demand, prompt=assumed.prompt, output=assumed.output)


def _without_repeats(outlook: Outlook) -> Outlook:
    """The plan warns of what the workload in its spec misses; the outlook judges it too, and knows of waits."""
    plan = outlook.plan
    warnings = tuple(warning for warning in plan.warnings if warning not in plan.misses)
    return replace(outlook, plan=replace(plan, warnings=warnings))


def _judged(outlook: Outlook, asked: Asked) -> Outlook:
    """The outlook, which warns of targets that are barely met and of crowds; all by the names that the user wrote."""
    doubts, crowd = asked.problems(outlook.doubts), asked.problems(outlook.crowd)
    plan = replace(outlook.plan, warnings=(*outlook.plan.warnings, *map(str, (*doubts, *crowd))))
    return replace(outlook, plan=plan, misses=asked.problems(outlook.misses), doubts=doubts, crowd=crowd)


def _with_remedies(outlook: Outlook) -> Outlook:
    """The outlook; what is missed names what would meet it: another layout, or more running requests of a lane."""
    now, best = outlook.decode.at_plan, outlook.decode.best
    if isinstance(now, Solution) and isinstance(best, Solution):
        timing = None if outlook.forecast is None else outlook.forecast.timing
        load = load_on(outlook.workload, layout_of(outlook.planned.deployment.spec), timing)
        told = with_room(now.misses, now, best, "spec.decode.maxNumSeqs", load)
        of_decode = dict(zip(now.misses, told, strict=True))
        outlook = replace(outlook, misses=tuple(of_decode.get(each, each) for each in outlook.misses))
    return _with_layouts(outlook)


def _with_layouts(outlook: Outlook) -> Outlook:
    """The outlook, whose missed targets name the nearest layout that meets them."""
    solutions = (outlook.role(role).at_plan for role in Role)
    missed = {miss for each in solutions if isinstance(each, Solution) for miss in each.misses if miss.field in TARGETS}
    if not missed or outlook.forecast is None:
        return outlook
    request, spec = search_beside(outlook), outlook.planned.deployment.spec
    misses = (with_remedies((each,), request, spec)[0] if each in missed else each for each in outlook.misses)
    return replace(outlook, misses=tuple(misses))
