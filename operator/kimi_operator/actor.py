"""Acts on decisions: children are applied in order, then pods and leftovers are deleted. Nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from kimi_operator.cluster import Cluster
from kimi_operator.decide.groups import GroupDecision, Stamp
from kimi_operator.decide.leftovers import find_leftovers
from kimi_operator.errors import ClusterUnavailable, InvalidSpec, Problem, ResourceGone
from kimi_operator.observe import ANNOTATION_FAILURE, ANNOTATION_RESTARTS, ANNOTATION_STREAK, Observed, PodSeen
from kimi_operator.render import Manifest, Rendered
from kimi_operator.render.names import (
    ANNOTATION_RESTARTED_AT,
    LABEL_GENERATION,
    LABEL_REVISION,
    GroupKey,
    Owner,
    stateful_set_name,
)
from kimi_operator.store import Document, ObjectKey, ResourceKey, Store, controller_of
from kimi_operator.times import format_time


class NameConflict(InvalidSpec):
    """An object that a deployment needs exists already and is not its own."""

    def __init__(self, key: ObjectKey, holder: str) -> None:
        problem = Problem(
            f"{key.kind} {key.namespace}/{key.name}",
            f"an object that belongs to {holder}",
            "no such object, or one of this KimiDeployment",
            "delete it, or give the KimiDeployment another name",
        )
        super().__init__((problem,))


@dataclass(slots=True)
class Outcome:
    """What came of acting on decisions. One object that is refused does not hold up the others."""

    stamped: set[GroupKey] = field(default_factory=set)
    """Groups whose StatefulSet bears the generation that was decided."""
    refusals: list[InvalidSpec] = field(default_factory=list)
    unavailable: ClusterUnavailable | None = None
    """Why some of it must be tried again."""
    num_errors: int = 0

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note an error about one object and go on; raises one that says that the API server does not answer."""
        try:
            yield
        except InvalidSpec as error:
            self.num_errors += 1
            self.refusals.append(error)
        except ClusterUnavailable as error:
            self.num_errors += 1
            self.unavailable = self.unavailable or error
            if not error.is_answer:
                raise


@dataclass(slots=True)
class Actor:
    """The hand of the reconcile loop."""

    cluster: Cluster
    store: Store

    async def act(
        self,
        document: Document,
        rendered: Rendered | None,
        decisions: Mapping[GroupKey, GroupDecision],
        seen: Observed,
    ) -> Outcome:
        """Do what was decided; every step may be repeated. Nothing rendered: only what exists is healed.

        Raises ResourceGone when the KimiDeployment is no more.
        """
        metadata = document["metadata"]
        owner = Owner(metadata["name"], metadata["namespace"], metadata["uid"])
        outcome = Outcome()
        # An API server that does not answer has been noted; nothing more is asked of it.
        with suppress(ClusterUnavailable):
            await self._act(owner, rendered, decisions, seen, outcome)
        outcome.stamped = {key for key, decision in decisions.items() if self._is_stamped(owner, decision)}
        return outcome

    async def _act(
        self,
        owner: Owner,
        rendered: Rendered | None,
        decisions: Mapping[GroupKey, GroupDecision],
        seen: Observed,
        outcome: Outcome,
    ) -> None:
        await self._restamp(owner, decisions, outcome)
        if rendered is not None:
            await self._apply(owner, rendered, decisions, outcome)
        await self._delete_pods(owner, decisions, outcome)
        if rendered is not None:
            names = {manifest.key for manifest in rendered.manifests}
            children = self.store.of_owner(ResourceKey(owner.namespace, owner.name))
            for leftover in find_leftovers(children, names, seen, owner.uid):
                with outcome.collect():
                    await self.cluster.delete(leftover)

    async def _restamp(self, owner: Owner, decisions: Mapping[GroupKey, GroupDecision], outcome: Outcome) -> None:
        """Groups that keep their template: only generation, size and notes change."""
        for decision in decisions.values():
            live = self._stateful_set(owner, decision)
            if live is None or decision.stamp is None or not decision.keep_template:
                continue
            annotations = group_annotations(decision.stamp)
            known = {name: live["metadata"].get("annotations", {}).get(name) for name in annotations}
            same = _generation(live) == str(decision.stamp.generation) and known == annotations
            if same and live["spec"]["replicas"] == decision.replicas:
                continue
            template = {"metadata": {"labels": {LABEL_GENERATION: str(decision.stamp.generation)}}}
            change = {
                "metadata": {"annotations": annotations},
                "spec": {"replicas": decision.replicas, "template": template},
            }
            with outcome.collect():
                await self.cluster.restamp(live, change)

    async def _apply(
        self, owner: Owner, rendered: Rendered, decisions: Mapping[GroupKey, GroupDecision], outcome: Outcome
    ) -> None:
        if any(self.store.get(_key(manifest)) is None for manifest in rendered.manifests):
            with outcome.collect():
                await self._check_alive(owner)
        by_name = {stateful_set_name(owner.name, key): decision for key, decision in decisions.items()}
        lacks_basis = False
        for manifest in rendered.manifests:
            decision = by_name[manifest.name] if manifest.kind == "StatefulSet" else None
            # Pods must not be moved to a template whose ConfigMap or Service is not there.
            if decision is not None and lacks_basis and not self._has_revision(owner, decision, manifest):
                continue
            num_errors = outcome.num_errors
            with outcome.collect():
                await self._apply_one(owner, manifest, decision)
            lacks_basis |= decision is None and outcome.num_errors > num_errors

    async def _apply_one(self, owner: Owner, manifest: Manifest, decision: GroupDecision | None) -> None:
        body: Document = manifest.body
        key = _key(manifest)
        was_known = self.store.get(key) is not None
        if not body.get("immutable"):  # the name of one that is follows from its content
            await self._check_owner(owner, key)
        if decision is not None:
            # One that the watch had not shown yet: what was decided for a missing group does not hold for it.
            appeared = not was_known and self.store.get(key) is not None
            if decision.stamp is None or decision.keep_template or appeared:
                return
            body = _with_annotations(body, group_annotations(decision.stamp))
        await self.cluster.apply(body)

    async def _check_alive(self, owner: Owner) -> None:
        """A child is to be made: perhaps all of them went with an owner whose end no watch has told. ResourceGone then.

        Children made after that would only be collected again.
        """
        named = f"metadata.name={owner.name}"
        found = (await self.cluster.list("KimiDeployment", namespace=owner.namespace, fields=named)).documents
        if not any(one["metadata"]["uid"] == owner.uid for one in found):
            raise ResourceGone(f"KimiDeployment {owner.namespace}/{owner.name} was deleted")

    async def _check_owner(self, owner: Owner, key: ObjectKey) -> None:
        """Nothing that belongs to somebody else is written to. Raises NameConflict, or ClusterUnavailable to wait."""
        live = self.store.get(key) or await self.cluster.read(key)
        if live is None:
            return
        holder = controller_of(live)
        if holder.get("uid") == owner.uid:
            return
        if (holder.get("kind"), holder.get("name")) == ("KimiDeployment", owner.name):
            raise ClusterUnavailable(f"{key.kind} {key.name} of the previous {owner.name} is still there", 1.0)
        raise NameConflict(key, f"{holder['kind']} {holder['name']}" if holder else "nobody")

    async def _delete_pods(self, owner: Owner, decisions: Mapping[GroupKey, GroupDecision], outcome: Outcome) -> None:
        for decision in decisions.values():
            live = self._stateful_set(owner, decision)
            chosen = [(pod, decision.grace_s) for pod in decision.delete]
            chosen += [(pod, 0) for pod in decision.force_delete]
            for pod, grace_s in chosen:
                # Only once the group bears another generation is the successor told apart from the pod; one that is
                # deleted before would be taken for the next failure.
                if live is not None and _generation(live) != str(pod.generation):
                    with outcome.collect():
                        await self._delete_pod(owner, pod, grace_s)

    async def _delete_pod(self, owner: Owner, pod: PodSeen, grace_s: int | None) -> None:
        live = self.store.get(ObjectKey("Pod", owner.namespace, pod.name))
        if live is not None and live["metadata"]["uid"] == pod.uid:
            await self.cluster.delete(live, grace_s)

    def _stateful_set(self, owner: Owner, decision: GroupDecision) -> Document | None:
        return self.store.get(ObjectKey("StatefulSet", owner.namespace, stateful_set_name(owner.name, decision.key)))

    def _has_revision(self, owner: Owner, decision: GroupDecision, manifest: Manifest) -> bool:
        live = self._stateful_set(owner, decision)
        return live is not None and _label(live, LABEL_REVISION) == _label(manifest.body, LABEL_REVISION)

    def _is_stamped(self, owner: Owner, decision: GroupDecision) -> bool:
        live = self._stateful_set(owner, decision)
        if decision.stamp is None or live is None:
            return decision.stamp is None
        return _generation(live) == str(decision.stamp.generation)


def _key(manifest: Manifest) -> ObjectKey:
    return ObjectKey(manifest.kind, manifest.namespace, manifest.name)


def _generation(stateful_set: Document) -> str:
    return _label(stateful_set, LABEL_GENERATION)


def _label(stateful_set: Document, name: str) -> str:
    return str(stateful_set["spec"]["template"]["metadata"].get("labels", {}).get(name, ""))


def group_annotations(stamp: Stamp) -> dict[str, str]:
    """What a StatefulSet remembers of its group; written whole each time, so that nothing stale stays."""
    notes = {ANNOTATION_RESTARTS: str(stamp.restarts), ANNOTATION_STREAK: str(stamp.streak)}
    if stamp.restarted_s is not None:
        notes[ANNOTATION_RESTARTED_AT] = format_time(stamp.restarted_s)
    if stamp.failure is not None:
        notes[ANNOTATION_FAILURE] = json.dumps(asdict(stamp.failure), sort_keys=True)
    return notes


def _with_annotations(body: Document, annotations: Mapping[str, str]) -> dict[str, Any]:
    metadata = body["metadata"]
    return {**body, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}}
