"""The loop's body: observe, desire, decide, act, report. One call brings one KimiDeployment one step closer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import structlog

from kimi_operator.actor import Actor, NameConflict, Outcome
from kimi_operator.api.base import parse
from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import Role
from kimi_operator.api.status import KimiDeploymentStatus, MeasuredPools
from kimi_operator.cluster import Cluster
from kimi_operator.decide.capacity import Capacity, find_shortage
from kimi_operator.decide.evidence import Patience, Scene
from kimi_operator.decide.groups import GroupDecision, GroupPolicy, GroupWanted, without_stamp
from kimi_operator.decide.rollout import decide_groups
from kimi_operator.desire import Desired, Profiles, desire, keep_running, read_profiles
from kimi_operator.errors import InvalidSpec, ResourceGone
from kimi_operator.ghosts import Ghosts
from kimi_operator.journal import Journal, News, news_of
from kimi_operator.look import Look, Refusal
from kimi_operator.measure import PoolReader
from kimi_operator.metrics import Metrics
from kimi_operator.observe import Observed, observe
from kimi_operator.profiles import foreign_nodes
from kimi_operator.queue import FORGET
from kimi_operator.render import RenderConfig, Rendered
from kimi_operator.render.names import GroupKey
from kimi_operator.status import build_status
from kimi_operator.store import Document, ObjectKey, ResourceKey, Store
from kimi_operator.witness import Witness

REFUSED_LOOK_AGAIN_S = 60.0
SHORT_LOOK_AGAIN_S = 15.0
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Step:
    """What one reconcile found and decided."""

    document: Document
    now_s: float
    seen: Observed
    desired: Desired | Refusal
    wanted: tuple[GroupWanted, ...]
    policy: GroupPolicy
    decisions: Mapping[GroupKey, GroupDecision]
    rendered: Rendered | None


@dataclass(slots=True)
class Reconciler:
    """Everything a reconcile needs, wired once."""

    cluster: Cluster
    store: Store
    config: RenderConfig
    journal: Journal
    pools: PoolReader
    metrics: Metrics
    node_grace_s: float
    clock: Callable[[], float] = time.time
    """Seconds since 1970."""
    witness: Witness = field(init=False)
    ghosts: Ghosts = field(init=False)
    actor: Actor = field(init=False)
    _desired: dict[ResourceKey, tuple[tuple[object, ...], Desired]] = field(default_factory=dict, init=False)
    _profiles: tuple[tuple[str, ...], Profiles] = field(default=((), Profiles({}, {})), init=False)

    def __post_init__(self) -> None:
        self.witness = Witness(self.cluster, self.store)
        self.ghosts = Ghosts(self.cluster, self.store)
        self.actor = Actor(self.cluster, self.store)

    async def __call__(self, key: ResourceKey) -> float | None:
        """Reconcile; the answer is when to look again, in seconds."""
        document = self.store.get(ObjectKey("KimiDeployment", *key))
        if document is None or document["metadata"].get("deletionTimestamp"):
            return self._forget(key)
        try:
            return await self._reconcile(key, document)
        except ResourceGone as error:
            log.info("let_go", deployment=str(key), why=str(error))
            self.store.remove(document)
            return self._forget(key)

    def _forget(self, key: ResourceKey) -> float:
        self.metrics.forget_groups(key)
        self._desired.pop(key, None)
        return FORGET

    async def _reconcile(self, key: ResourceKey, document: Document) -> float | None:
        step = await self._decide(key, document)
        outcome = await self.actor.act(document, step.rendered, step.decisions, step.seen)
        step = replace(step, decisions=what_became(step, outcome))
        seen = await self._observe(key, step.now_s)
        measured = await self.pools.read(seen.groups, step.decisions, gpus_per_lane(step))
        shortage = await self._shortage(step, seen)
        look = make_look(step, seen, outcome, measured, shortage)
        look = replace(look, foreign_hardware=foreign_hardware(step, seen, self._profiles[1]))
        await self._report(key, step, build_status(look))
        if outcome.unavailable is not None:
            # Told; now the queue backs off.
            raise outcome.unavailable
        return self._look_again_s(key, step, look)

    async def _decide(self, key: ResourceKey, document: Document) -> Step:
        now_s = self.clock()
        await self.ghosts.dispel(key, now_s)
        seen = await self._observe(key, now_s)
        desired = self._desire(key, document, seen)
        scene = Scene(seen.nodes, now_s)
        if isinstance(desired, Refusal):
            wanted, paused = keep_running(document, seen), True
            policy = GroupPolicy(patience=Patience(node_s=self.node_grace_s))
        else:
            wanted, policy, paused = desired.groups, desired.policy, desired.inputs.spec.rollout.paused
        decisions = decide_groups(wanted, seen.groups, scene, policy, paused=paused)
        rendered = None if isinstance(desired, Refusal) else desired.render(decisions)
        return Step(document, now_s, seen, desired, wanted, policy, decisions, rendered)

    def _desire(self, key: ResourceKey, document: Document, seen: Observed) -> Desired | Refusal:
        """What is wanted; remembered until spec or profiles change, unless the nodes' labels choose the profile."""
        profiles = self._read_profiles()
        metadata = document["metadata"]
        state = (metadata["uid"], metadata.get("generation"), self._profiles[0])
        known = self._desired.get(key)
        if known is not None and known[0] == state:
            return known[1]
        desired = desire(document, profiles, seen.nodes.values(), self.config, self.node_grace_s)
        if isinstance(desired, Desired) and desired.inputs.spec.hardware.profile is not None:
            self._desired[key] = (state, desired)
        return desired

    async def _observe(self, key: ResourceKey, now_s: float) -> Observed:
        children, nodes = self.store.of_owner(key), self.store.of_kind("Node")
        return observe(children, nodes, await self.witness.mount_failures(children, now_s))

    def _read_profiles(self) -> Profiles:
        documents = self.store.of_kind("HardwareProfile")
        versions = tuple(one["metadata"]["name"] + one["metadata"]["resourceVersion"] for one in documents)
        if self._profiles[0] != versions:
            self._profiles = (versions, read_profiles(documents))
        return self._profiles[1]

    async def _shortage(self, step: Step, seen: Observed) -> str | None:
        if isinstance(step.desired, Refusal):
            return None
        if not any(pod.unschedulable is not None for group in seen.groups.values() for pod in group.current):
            return None
        spec, resource = step.desired.inputs.spec, step.desired.inputs.profile.spec.gpu.resource
        in_use = await self.witness.gpus_in_use(resource, step.now_s)
        gpus = {role.value: spec.role(role).gpus_per_node for role in Role}
        return find_shortage(step.wanted, seen, Capacity(resource, gpus, in_use))

    async def _report(self, key: ResourceKey, step: Step, status: Mapping[str, object]) -> None:
        """Write the status if it differs, tell what is news, log what changed."""
        metadata, before = step.document["metadata"], step.document.get("status", {})
        restarted = [one for one in step.decisions.values() if one.restarted]
        news = [_news_of_restart(one) for one in restarted]
        for one in restarted:
            self.metrics.restarts.labels(key.namespace, key.name, one.key.role.value).inc()
            log.warning(
                "group_restarted", deployment=str(key), group=f"{one.key.role}-{one.key.group}", why=one.message
            )
        # Told at once: a status that cannot be written must not take them along.
        await self.journal.write(step.document, news, step.now_s)
        self.metrics.set_groups(key, step.decisions)
        if status != before:
            try:
                await self.cluster.write_status(ObjectKey("KimiDeployment", *key), metadata["uid"], status)
            except InvalidSpec as error:
                # What cannot be told must not hold up what is done: no back-off, and the next look tries again.
                log.error("status_refused", deployment=str(key), error=str(error))
                return
            # A restart has been told with its group; that Ready is lost by it says nothing new.
            told = {one.reason for one in restarted}
            news = [one for one in news_of(before, status) if one.reason not in told]
            log.info("status_changed", deployment=str(key), **_summary(status))
            await self.journal.write(step.document, news, step.now_s)

    def _look_again_s(self, key: ResourceKey, step: Step, look: Look) -> float | None:
        """When time alone may change something: deadlines of groups, and answers that no watch brings."""
        moments = [one.look_again_s - step.now_s for one in step.decisions.values() if one.look_again_s is not None]
        if look.apply_refusal is not None or look.shortage is not None:
            moments.append(REFUSED_LOOK_AGAIN_S)
        later_s = step.now_s + 2 * SHORT_LOOK_AGAIN_S
        is_asking = self.pools.has_open_questions(look.seen.groups, step.decisions)
        if is_asking or self.witness.is_waiting(self.store.of_owner(key), later_s):
            moments.append(SHORT_LOOK_AGAIN_S)
        if (ghosts_s := self.ghosts.next_look_s(key)) is not None:
            moments.append(ghosts_s - step.now_s)
        return max(0.05, min(moments)) if moments else None


def what_became(step: Step, outcome: Outcome) -> dict[GroupKey, GroupDecision]:
    """The decisions as far as the API server took them: a group that did not get its stamp has not restarted."""
    scene = Scene(step.seen.nodes, step.now_s)
    untaken = [one for one in step.wanted if one.key not in outcome.stamped]
    return {**step.decisions} | {
        one.key: without_stamp(one, step.seen.groups.get(one.key), scene, step.policy) for one in untaken
    }


def make_look(
    step: Step,
    seen: Observed,
    outcome: Outcome,
    measured: Mapping[GroupKey, MeasuredPools],
    shortage: str | None,
) -> Look:
    """All of a step that its status is made of."""
    metadata, desired = step.document["metadata"], step.desired
    common = Look(
        name=metadata["name"],
        namespace=metadata["namespace"],
        generation=metadata.get("generation", 0),
        now_s=step.now_s,
        seen=seen,
        previous=step.document.get("status", {}),
        apply_refusal=_refusal(outcome),
        delay=Refusal(Reason.API_UNAVAILABLE, str(outcome.unavailable)) if outcome.unavailable else None,
        wanted=step.wanted,
        decisions=step.decisions,
        measured=measured,
        shortage=shortage,
    )
    if isinstance(desired, Refusal) or step.rendered is None:
        counts = {role: len(common.of(role)) for role in Role}
        refusal = desired if isinstance(desired, Refusal) else None
        kept = read_status(common.previous)
        # What runs goes on as it was planned.
        return replace(
            common,
            refusal=refusal,
            plan=kept.plan,
            revision=kept.revision,
            revisions={Role.PREFILL: kept.prefill.revision, Role.DECODE: kept.decode.revision},
            desired=counts,
            router_replicas=seen.router.desired,
        )
    spec = desired.inputs.spec
    return replace(
        common,
        plan=desired.plan,
        revision=step.rendered.revision,
        revisions=desired.revisions,
        desired={role: spec.role(role).groups for role in Role},
        router_replicas=spec.router.replicas,
        is_paused=spec.rollout.paused,
        is_suspended=spec.suspend,
    )


def foreign_hardware(step: Step, seen: Observed, profiles: Profiles) -> str:
    """What is wrong with the nodes that pods run on; the scheduler tells no chip from another."""
    if isinstance(step.desired, Refusal):
        return ""
    names = {pod.node for group in seen.groups.values() for pod in group.current if pod.node in seen.nodes}
    nodes = [(name, seen.nodes[name].labels) for name in sorted(filter(None, names))]
    inputs = step.desired.inputs
    return "; ".join(map(str, foreign_nodes(inputs.spec, inputs.profile, profiles.known, nodes)))


def gpus_per_lane(step: Step) -> int:
    """Of both roles, as planned: tensorParallel never changes."""
    desired, before = step.desired, step.document.get("status", {})
    plan = read_status(before).plan if isinstance(desired, Refusal) else desired.plan
    return max(1, plan.decode.ranks // max(1, plan.decode.lanes)) if plan is not None else 1


def _news_of_restart(decision: GroupDecision) -> News:
    kind: Literal["Normal", "Warning"] = "Normal" if decision.reason is Reason.DRAINING else "Warning"
    num_restarts = decision.stamp.restarts if decision.stamp else 0
    group = f"{decision.key.role} group {decision.key.group}"
    return News(kind, decision.reason, f"{group} restarts ({num_restarts} so far): {decision.message}", num_restarts)


def _refusal(outcome: Outcome) -> Refusal | None:
    """What the API server did not take: told to the user, who alone can mend it."""
    if not outcome.refusals:
        return None
    conflicts = [error for error in outcome.refusals if isinstance(error, NameConflict)]
    others = [error for error in outcome.refusals if not isinstance(error, NameConflict)]
    reason = Reason.APPLY_REFUSED if others else Reason.NAME_CONFLICT
    return Refusal(reason, "; ".join(map(str, [*others, *conflicts])))


def read_status(previous: Mapping[str, object]) -> KimiDeploymentStatus:
    """A status as it was written; an empty one where it cannot be read."""
    kept = {name: previous[name] for name in ("plan", "revision", "prefill", "decode") if name in previous}
    try:
        return parse(KimiDeploymentStatus, kept, "status")
    except InvalidSpec as error:
        log.warning("status_unreadable", error=str(error))
        return KimiDeploymentStatus()


def _summary(status: Mapping[str, object]) -> dict[str, str]:
    conditions = status["conditions"]
    assert isinstance(conditions, list)
    ready = next(one for one in conditions if one["type"] == "Ready")
    return {"ready": ready["status"], "reason": ready["reason"], "message": ready.get("message", "")}
