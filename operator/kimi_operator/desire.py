"""Pure: from a KimiDeployment's document to what is wanted of the cluster, or to why its spec is not acted on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kimi_operator.api.base import parse
from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import HardwareSpec, KimiDeploymentSpec, Role
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.api.status import PlanStatus
from kimi_operator.decide.evidence import Patience
from kimi_operator.decide.groups import GroupDecision, GroupPolicy, GroupWanted
from kimi_operator.errors import InvalidSpec
from kimi_operator.look import Refusal
from kimi_operator.observe import NodeSeen, Observed
from kimi_operator.planner import Infeasible, Plan
from kimi_operator.planner.report import plan_status
from kimi_operator.profiles import architecture, select_profile
from kimi_operator.profiles.forecast import plan_on
from kimi_operator.render import RenderConfig, Rendered, RenderInputs, render
from kimi_operator.render.names import GroupKey, Owner
from kimi_operator.render.worker import role_revision
from kimi_operator.store import Document

START_MARGIN_S = 60.0
"""Beyond the startup probe's own budget: the kubelet acts first."""


@dataclass(frozen=True, slots=True)
class Desired:
    """A spec with its plan: everything can be rendered."""

    inputs: RenderInputs
    revisions: Mapping[Role, str]
    groups: tuple[GroupWanted, ...]
    policy: GroupPolicy
    plan: PlanStatus

    def render(self, decisions: Mapping[GroupKey, GroupDecision]) -> Rendered:
        """The children, with each group's generation as decided."""
        generations = {key: one.stamp.generation for key, one in decisions.items() if one.stamp is not None}
        return render(replace(self.inputs, generations=generations))


@dataclass(frozen=True, slots=True)
class Profiles:
    """The cluster's HardwareProfiles: those that can be read, and why the others cannot."""

    known: Mapping[str, HardwareProfile]
    broken: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Planned:
    """A spec that fits, with what it was planned on."""

    spec: KimiDeploymentSpec
    profile: HardwareProfile
    plan: Plan


def desire(
    document: Document, profiles: Profiles, nodes: Iterable[NodeSeen], config: RenderConfig, node_s: float
) -> Desired | Refusal:
    """Read the spec, find its hardware, plan. `node_s`: how long a node may be NotReady."""
    planned = plan_document(document, profiles, nodes)
    if isinstance(planned, Refusal):
        return planned
    spec, profile, plan, metadata = planned.spec, planned.profile, planned.plan, document["metadata"]
    inputs = RenderInputs(Owner(metadata["name"], metadata["namespace"], metadata["uid"]), spec, plan, profile, config)
    revisions = {role: role_revision(inputs, role) for role in Role}
    return Desired(
        inputs, revisions, _groups(inputs, revisions), _policy(spec, profile, node_s), plan_status(plan, profile)
    )


def plan_document(document: Document, profiles: Profiles, nodes: Iterable[NodeSeen]) -> Planned | Refusal:
    """Read the spec, find its hardware, plan; or why that cannot be done."""
    try:
        spec = parse(KimiDeploymentSpec, document.get("spec", {}), "spec")
    except InvalidSpec as error:
        return Refusal(Reason.INVALID_SPEC, str(error))
    spec = _with_profile(spec, document, profiles)
    if (broken := profiles.broken.get(spec.hardware.profile or "")) is not None:
        return Refusal(Reason.PROFILE_UNKNOWN, broken)
    try:
        known = architecture(spec.model.architecture)
    except InvalidSpec as error:
        return Refusal(Reason.ARCHITECTURE_UNKNOWN, str(error))
    try:
        profile = select_profile(spec, profiles.known, [(node.name, node.labels) for node in nodes])
    except InvalidSpec as error:
        return Refusal(Reason.PROFILE_UNKNOWN, str(error))
    plan = plan_on(known, spec, profile)
    if isinstance(plan, Infeasible):
        return Refusal(Reason.DOES_NOT_FIT, str(plan))
    return Planned(spec, profile, plan)


def keep_running(document: Document, seen: Observed) -> tuple[GroupWanted, ...]:
    """What a refused spec leaves as it is: the groups that exist, as they are. They are still healed."""
    metadata = document["metadata"]
    return tuple(
        GroupWanted(
            key, metadata["name"], metadata["uid"], group.replicas, group.revision,
            suspended=group.replicas == 0, keeps_template=True,
        )
        for key, group in sorted(seen.groups.items())
    )  # fmt: skip


def read_profiles(documents: Iterable[Document]) -> Profiles:
    """Read each profile. One that cannot be read must not hinder those who do not name it."""
    known, broken = {}, {}
    for document in documents:
        name = document["metadata"]["name"]
        try:
            known[name] = parse(HardwareProfile, document, f"HardwareProfile {name}")
        except InvalidSpec as error:
            broken[name] = str(error)
    return Profiles(known, broken)


def names_profile(document: Document) -> bool:
    """Whether the profile is known without a look at the nodes; also where no profile will be asked for."""
    try:
        spec = parse(KimiDeploymentSpec, document.get("spec", {}), "spec")
    except InvalidSpec:
        return True
    return spec.hardware.profile is not None or _planned_profile(document) is not None


def _planned_profile(document: Document) -> str | None:
    plan = document.get("status", {}).get("plan")
    name = plan.get("profile") if isinstance(plan, Mapping) else None
    return name if isinstance(name, str) else None


def _with_profile(spec: KimiDeploymentSpec, document: Document, profiles: Profiles) -> KimiDeploymentSpec:
    """A spec that leaves its profile open keeps the one it was planned with: other nodes may come at any time."""
    name = _planned_profile(document)
    if spec.hardware.profile is not None or (name not in profiles.known and name not in profiles.broken):
        return spec
    return spec.model_copy(update={"hardware": HardwareSpec(profile=name)})


def _groups(inputs: RenderInputs, revisions: Mapping[Role, str]) -> tuple[GroupWanted, ...]:
    owner, spec = inputs.owner, inputs.spec
    return tuple(
        GroupWanted(
            GroupKey(role, index), owner.name, owner.uid, spec.role(role).nodes_per_group, revisions[role], spec.suspend
        )
        for role in Role
        for index in range(spec.role(role).groups)
    )


def _policy(spec: KimiDeploymentSpec, profile: HardwareProfile, node_s: float) -> GroupPolicy:
    start_s = profile.spec.pod.startup_budget_seconds + START_MARGIN_S
    return GroupPolicy(restart_budget=spec.restart_budget, patience=Patience(start_s=start_s, node_s=node_s))
