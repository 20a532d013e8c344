"""Acts on decisions: children are applied in order, then pods and leftovers are deleted. Nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kimi_operator.cluster import Cluster
from kimi_operator.decide.groups import GroupDecision, Stamp
from kimi_operator.decide.leftovers import find_leftovers
from kimi_operator.observe import ANNOTATION_FAILURE, ANNOTATION_RESTARTS, ANNOTATION_STREAK, Observed
from kimi_operator.render import Rendered
from kimi_operator.render.names import ANNOTATION_RESTARTED_AT, LABEL_GENERATION, GroupKey, stateful_set_name
from kimi_operator.store import Document, ObjectKey, ResourceKey, Store
from kimi_operator.times import format_time


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

        Raises InvalidSpec when the API server refuses an object, ClusterUnavailable when it cannot be reached.
        """
        owner = ResourceKey(document["metadata"]["namespace"], document["metadata"]["name"])
        await self._restamp(owner, decisions)
        if rendered is not None:
            await self._apply(owner, rendered, decisions)
        await self._delete_pods(owner, decisions)
        if rendered is not None:
            names = {manifest.key for manifest in rendered.manifests}
            uid = document["metadata"]["uid"]
            for leftover in find_leftovers(self.store.of_owner(owner), names, seen, uid):
                await self.cluster.delete(leftover)

    async def _restamp(self, owner: ResourceKey, decisions: Mapping[GroupKey, GroupDecision]) -> None:
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

    async def _apply(self, owner: ResourceKey, rendered: Rendered, decisions: Mapping[GroupKey, GroupDecision]) -> None:
        by_name = {stateful_set_name(owner.name, key): decision for key, decision in decisions.items()}
        for manifest in rendered.manifests:
            body: Document = manifest.body
            if manifest.kind == "StatefulSet":
                decision = by_name[manifest.name]
                if decision.stamp is None or decision.keep_template:
                    continue
                if not await self._may_create(ObjectKey("StatefulSet", owner.namespace, manifest.name)):
                    continue
                body = _with_annotations(body, group_annotations(decision.stamp))
            await self.cluster.apply(body)

    async def _may_create(self, key: ObjectKey) -> bool:
        """A group must never start again at generation 1 only because the watch has not shown it yet."""
        if self.store.get(key) is not None:
            return True
        return await self.cluster.read(key) is None

    async def _delete_pods(self, owner: ResourceKey, decisions: Mapping[GroupKey, GroupDecision]) -> None:
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
