"""Pods that should be gone: a watch that was broken for a while never tells of their end, so somebody must ask."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from kimi_operator.cluster import Cluster
from kimi_operator.errors import KimiError
from kimi_operator.render.names import LABEL_DEPLOYMENT
from kimi_operator.store import Document, ResourceKey, Store
from kimi_operator.times import parse_time

OVERDUE_S = 5.0
"""A pod that was deleted is gone this long after its grace, unless its node is lost."""
ASK_AGAIN_S = 30.0
log = structlog.get_logger()


@dataclass(slots=True)
class Ghosts:
    """Looks for deleted pods that outlive their grace."""

    cluster: Cluster
    store: Store
    _asked: dict[str, float] = field(default_factory=dict)
    """When each pod, by uid, was last asked for; seconds since 1970."""

    async def dispel(self, owner: ResourceKey, now_s: float) -> None:
        """Ask for the overdue pods of a deployment; those that are gone leave the store."""
        self._asked = {uid: at_s for uid, at_s in self._asked.items() if now_s - at_s < 10 * ASK_AGAIN_S}
        overdue = [pod for pod in self._leaving(owner) if now_s >= self._due_s(pod)]
        if not overdue:
            return
        self._asked |= {pod["metadata"]["uid"]: now_s for pod in overdue}
        try:
            listing = await self.cluster.list("Pod", owner.namespace, labels=f"{LABEL_DEPLOYMENT}={owner.name}")
        except KimiError as error:
            log.info("pods_not_listed", deployment=str(owner), error=str(error))
            return
        alive = {pod["metadata"]["uid"] for pod in listing.documents}
        for pod in overdue:
            if pod["metadata"]["uid"] not in alive:
                self.store.remove(pod)

    def next_look_s(self, owner: ResourceKey) -> float | None:
        """When, in seconds since 1970, to ask next; None while no pod of the deployment is leaving."""
        return min(map(self._due_s, self._leaving(owner)), default=None)

    def _leaving(self, owner: ResourceKey) -> list[Document]:
        children = self.store.of_owner(owner)
        return [one for one in children if one["kind"] == "Pod" and one["metadata"].get("deletionTimestamp")]

    def _due_s(self, pod: Document) -> float:
        # The time of deletion that the API server writes has the grace in it.
        overdue_s = (parse_time(pod["metadata"]["deletionTimestamp"]) or 0.0) + OVERDUE_S
        return max(overdue_s, self._asked.get(pod["metadata"]["uid"], 0.0) + ASK_AGAIN_S)
