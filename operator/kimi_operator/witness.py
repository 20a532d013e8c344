"""Looks that the watches do not bring, taken only when something hangs: events, and GPUs that others hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from kimi_operator.cluster import Cluster
from kimi_operator.errors import KimiError
from kimi_operator.namesake import missing_pods, short_sets, why_not_ours
from kimi_operator.observe import gpus_in_use
from kimi_operator.store import Document, Store
from kimi_operator.times import parse_time

PATIENCE_S = 10.0
"""A StatefulSet makes its pods, and a pod its containers, within this time, or somebody should ask why not."""
KEEP_S = 30.0
"""How long an answer counts."""
ALIKE_S = 150.0
"""Events within this time of the latest tell of the same trouble: the kubelet tries again every two minutes."""
FORGET_S = 3600.0
_REASONS = {
    "Pod": frozenset({"FailedMount", "FailedMapVolume", "FailedAttachVolume", "FailedCreatePodSandBox"}),
    "StatefulSet": frozenset({"FailedCreate"}),
}
"""Reasons of events that say why, by kind of what hangs."""
# The kubelet's summary of volumes that time ran out for; what it says about the one at fault says more.
_SUMMARY = "Unable to attach or mount volumes"
# Names of sandboxes and containers: each attempt has another, and a message must not change at rest.
_RANDOM_ID = re.compile(r"\b[0-9a-f]{32,}\b")
log = structlog.get_logger()


@dataclass(slots=True)
class Witness:
    """Remembers its answers for a while; an answer that cannot be had is an empty one."""

    cluster: Cluster
    store: Store
    _words: dict[str, tuple[float, str]] = field(default_factory=dict)
    _gpus: dict[str, tuple[float, dict[str, int]]] = field(default_factory=dict)
    _whole: dict[str, float] = field(default_factory=dict)
    """When a StatefulSet, by uid, was last seen with all its pods."""

    async def mount_failures(self, children: Iterable[Document], now_s: float) -> dict[str, str]:
        """What events say about whatever hangs, by uid.

        Of each pod that has a node and no container: why its volumes or its network are not there. Of each
        StatefulSet that misses pods: why the API server refuses them, or whose pods have their names.
        """
        children = list(children)
        self._note_whole(children, now_s)
        hanging = {child["metadata"]["uid"]: child for child in self._hanging(children, now_s)}
        for uid, child in hanging.items():
            if now_s - self._words.get(uid, (0.0, ""))[0] > KEEP_S:
                self._words[uid] = (now_s, await self._ask_events(child) or await self._ask_names(child, children))
        self._words = {uid: entry for uid, entry in self._words.items() if now_s - entry[0] < 10 * KEEP_S}
        return {uid: self._words[uid][1] for uid in hanging}

    def is_waiting(self, children: Iterable[Document], now_s: float) -> bool:
        """Whether something will hang at `now_s` unless it moves: only another look will tell."""
        return bool(self._hanging(list(children), now_s))

    async def gpus_in_use(self, resource: str, now_s: float) -> dict[str, int]:
        """GPUs held on each node, by anybody's pods; only by this operator's where others' may not be seen."""
        at_s, held = self._gpus.get(resource, (0.0, {}))
        if now_s - at_s <= KEEP_S:
            return held
        try:
            fields = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
            pods = (await self.cluster.list("Pod", fields=fields)).documents
        except KimiError as error:
            log.info("pods_of_others_not_seen", error=str(error))
            pods = self.store.of_kind("Pod")
        held = gpus_in_use(pods, resource)
        self._gpus[resource] = (now_s, held)
        return held

    def _note_whole(self, children: list[Document], now_s: float) -> None:
        whole = {uid: at_s for uid, at_s in self._whole.items() if now_s - at_s < FORGET_S}
        short = {child["metadata"]["uid"] for child in short_sets(children)}
        sets = {child["metadata"]["uid"] for child in children if child["kind"] == "StatefulSet"}
        self._whole = whole | dict.fromkeys(sets - short, now_s)

    def _hanging(self, children: list[Document], now_s: float) -> list[Document]:
        pods = [child for child in children if is_hanging(child, now_s)]
        return pods + [one for one in short_sets(children) if now_s - self._since_s(one, now_s) > PATIENCE_S]

    def _since_s(self, child: Document, now_s: float) -> float:
        """Since when something can have hung, in seconds since 1970; what was told before is about something else."""
        created_s = parse_time(child["metadata"].get("creationTimestamp"))
        return self._whole.get(child["metadata"]["uid"], now_s if created_s is None else created_s)

    async def _ask_events(self, child: Document) -> str:
        metadata = child["metadata"]
        fields = f"involvedObject.uid={metadata['uid']},type=Warning"
        try:
            events = (await self.cluster.list("Event", namespace=metadata["namespace"], fields=fields)).documents
        except KimiError as error:
            log.info("events_not_read", about=metadata["name"], error=str(error))
            return ""
        return chosen_words(events, _REASONS[child["kind"]], self._since_s(child, 0.0))

    async def _ask_names(self, child: Document, children: Iterable[Document]) -> str:
        """Whether other pods have the names of those that a StatefulSet misses: no event tells of that.

        They are asked for by name, since a pod that lost our label is in no watch.
        """
        if child["kind"] != "StatefulSet":
            return ""
        namespace = child["metadata"]["namespace"]
        for name in missing_pods(child, children):
            try:
                pods = (await self.cluster.list("Pod", namespace=namespace, fields=f"metadata.name={name}")).documents
            except KimiError as error:
                log.info("pod_not_read", pod=name, error=str(error))
                return ""
            if words := "".join(why_not_ours(pod, child) for pod in pods):
                return words
        return ""


def is_hanging(child: Document, now_s: float) -> bool:
    """Whether a pod has a node and still no container, longer than every start takes."""
    if child["kind"] != "Pod" or not child["spec"].get("nodeName") or child["status"].get("phase") != "Pending":
        return False
    if child["metadata"].get("deletionTimestamp"):
        return False
    states = [one.get("state", {}) for one in child["status"].get("containerStatuses", ())]
    untouched = all(state.get("waiting", {}).get("reason") == "ContainerCreating" for state in states)
    return untouched and now_s - (parse_time(child["metadata"].get("creationTimestamp")) or now_s) > PATIENCE_S


def chosen_words(events: Iterable[Mapping[str, object]], reasons: frozenset[str], since_s: float) -> str:
    """What events of these reasons say; a summary only when there is nothing else, of alike ones always the same.

    Events from before `since_s` do not count (whole seconds, as Kubernetes writes times).
    """
    told = [(_time_s(event), str(event.get("message", ""))) for event in events if event.get("reason") in reasons]
    told = [(at_s, message) for at_s, message in told if at_s >= int(since_s)]
    told = [one for one in told if not one[1].startswith(_SUMMARY)] or told
    if not told:
        return ""
    latest_s = max(at_s for at_s, _ in told)
    return min(_RANDOM_ID.sub("...", message) for at_s, message in told if latest_s - at_s <= ALIKE_S)


def _time_s(event: Mapping[str, object]) -> float:
    series = event.get("series")
    last = series.get("lastObservedTime") if isinstance(series, Mapping) else None
    return parse_time(str(last or event.get("lastTimestamp") or event.get("eventTime") or "")) or 0.0
