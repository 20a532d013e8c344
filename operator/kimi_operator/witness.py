"""Looks that the watches do not bring, taken only when something hangs: volume events, and GPUs that others hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from kimi_operator.cluster import Cluster
from kimi_operator.errors import KimiError
from kimi_operator.observe import gpus_in_use
from kimi_operator.store import Document, Store
from kimi_operator.times import parse_time

PATIENCE_S = 10.0
"""A pod makes its containers within this time, or somebody should ask why not."""
KEEP_S = 30.0
"""How long an answer counts."""
log = structlog.get_logger()


@dataclass(slots=True)
class Witness:
    """Remembers its answers for a while; an answer that cannot be had is an empty one."""

    cluster: Cluster
    store: Store
    _mounts: dict[str, tuple[float, str]] = field(default_factory=dict)
    _gpus: dict[str, tuple[float, dict[str, int]]] = field(default_factory=dict)

    async def mount_failures(self, children: Iterable[Document], now_s: float) -> dict[str, str]:
        """By uid of each pod that hangs before its containers are made: what the kubelet says about its volumes."""
        hanging = {child["metadata"]["uid"]: child for child in children if is_hanging(child, now_s)}
        for uid, pod in hanging.items():
            if now_s - self._mounts.get(uid, (0.0, ""))[0] > KEEP_S:
                self._mounts[uid] = (now_s, await self._ask_events(pod))
        self._mounts = {uid: entry for uid, entry in self._mounts.items() if now_s - entry[0] < 10 * KEEP_S}
        return {uid: self._mounts[uid][1] for uid in hanging}

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

    async def _ask_events(self, pod: Document) -> str:
        metadata = pod["metadata"]
        fields = f"involvedObject.uid={metadata['uid']},reason=FailedMount"
        try:
            events = (await self.cluster.list("Event", namespace=metadata["namespace"], fields=fields)).documents
        except KimiError as error:
            log.info("events_not_read", pod=metadata["name"], error=str(error))
            return ""
        latest = max(events, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default=None)
        return str(latest.get("message", "")) if latest else ""


def is_hanging(child: Document, now_s: float) -> bool:
    """Whether a pod has a node and still no container, longer than every start takes."""
    if child["kind"] != "Pod" or not child["spec"].get("nodeName") or child["status"].get("phase") != "Pending":
        return False
    if child["metadata"].get("deletionTimestamp"):
        return False
    states = [one.get("state", {}) for one in child["status"].get("containerStatuses", ())]
    untouched = all(state.get("waiting", {}).get("reason") == "ContainerCreating" for state in states)
    return untouched and now_s - (parse_time(child["metadata"].get("creationTimestamp")) or now_s) > PATIENCE_S
