"""Acts on decisions: children are applied in order, then pods and leftovers are deleted. Nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kimi_operator.cluster import Cluster
from kimi_operator.decide.groups import GroupDecision, Stamp
from kimi_operator.decide.leftovers import find_leftovers
from kimi_operator.errors import ClusterUnavailable, InvalidSpec, Problem
from kimi_operator.observe import ANNOTATION_FAILURE, ANNOTATION_RESTARTS, ANNOTATION_STREAK, Observed
from kimi_operator.render import Rendered
from kimi_operator.render.names import ANNOTATION_RESTARTED_AT, LABEL_GENERATION, GroupKey, Owner, stateful_set_name
from kimi_operator.store import Document, ObjectKey, ResourceKey, Store
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
    ) -> None:
        """Do what was decided; every step may be repeated. Nothing rendered: only what exists is healed.

        Raises NameConflict, InvalidSpec when the API server refuses an object, ClusterUnavailable to try again.
        """
        metadata = document["metadata"]
        owner = Owner(metadata["name"], metadata["namespace"], metadata["uid"])
        await self._restamp(owner, decisions)
        if rendered is not None:
            await self._apply(owner, rendered, decisions)
        await self._delete_pods(owner, decisions)
        if rendered is not None:
            names = {manifest.key for manifest in rendered.manifests}
            children = self.store.of_owner(ResourceKey(owner.namespace, owner.name))
            for leftover in find_leftovers(children, names, seen, owner.uid):
                await self.cluster.delete(leftover)

    async def _restamp(self, owner: Owner, decisions: Mapping[GroupKey, GroupDecision]) -> None:
        """Groups that keep their template: only generation, size and notes change."""
        for key, decision in decisions.items():
            live = self.store.get(ObjectKey("StatefulSet", owner.namespace, stateful_set_name(owner.name, key)))
            if live is None or decision.stamp is None or not decision.keep_template:
                continue
            labels = live["spec"]["template"]["metadata"]["labels"]
            annotations = group_annotations(decision.stamp)
            known = {name: live["metadata"].get("annotations", {}).get(name) for name in annotations}
            same = labels[LABEL_GENERATION] == str(decision.stamp.generation) and known == annotations
            if same and live["spec"]["replicas"] == decision.replicas:
                continue
            template = {"metadata": {"labels": {LABEL_GENERATION: str(decision.stamp.generation)}}}
            change = {
                "metadata": {"annotations": annotations},
                "spec": {"replicas": decision.replicas, "template": template},
            }
            await self.cluster.restamp(live, change)

    async def _apply(self, owner: Owner, rendered: Rendered, decisions: Mapping[GroupKey, GroupDecision]) -> None:
        by_name = {stateful_set_name(owner.name, key): decision for key, decision in decisions.items()}
        for manifest in rendered.manifests:
            body: Document = manifest.body
            key = ObjectKey(manifest.kind, manifest.namespace, manifest.name)
            was_known = self.store.get(key) is not None
            if not body.get("immutable"):  # the name of one that is follows from its content
                await self._check_owner(owner, key)
            if manifest.kind == "StatefulSet":
                decision = by_name[manifest.name]
                # One that the watch had not shown yet: what was decided for a missing group does not hold for it.
                appeared = not was_known and self.store.get(key) is not None
                if decision.stamp is None or decision.keep_template or appeared:
                    continue
                body = _with_annotations(body, group_annotations(decision.stamp))
            await self.cluster.apply(body)

    async def _check_owner(self, owner: Owner, key: ObjectKey) -> None:
        """Nothing that belongs to somebody else is written to. Raises NameConflict, or ClusterUnavailable to wait."""
        live = self.store.get(key) or await self.cluster.read(key)
        if live is None:
            return
        holder = next((one for one in live["metadata"].get("ownerReferences", ()) if one.get("controller")), None)
        if holder is not None and holder["uid"] == owner.uid:
            return
        if holder is not None and (holder["kind"], holder["name"]) == ("KimiDeployment", owner.name):
            raise ClusterUnavailable(f"{key.kind} {key.name} of the previous {owner.name} is still there", 1.0)
        raise NameConflict(key, f"{holder['kind']} {holder['name']}" if holder else "nobody")

    async def _delete_pods(self, owner: Owner, decisions: Mapping[GroupKey, GroupDecision]) -> None:
        for decision in decisions.values():
            chosen = [(pod, decision.grace_s) for pod in decision.delete]
            chosen += [(pod, 0) for pod in decision.force_delete]
            for pod, grace_s in chosen:
                live = self.store.get(ObjectKey("Pod", owner.namespace, pod.name))
                if live is not None and live["metadata"]["uid"] == pod.uid:
                    await self.cluster.delete(live, grace_s)


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
