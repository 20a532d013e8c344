"""Kubernetes Events about a KimiDeployment: only news, and never more than one of a kind in ten minutes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from kimi_operator.api.conditions import Reason
from kimi_operator.api.deployment import Role
from kimi_operator.cluster import Cluster
from kimi_operator.errors import KimiError, ResourceGone
from kimi_operator.store import Document
from kimi_operator.times import format_time

REPEAT_S = 600.0
NOT_AS_PLANNED = (Reason.HARDWARE_DIFFERS, Reason.POOLS_DIFFER, Reason.MEMORY_DIFFERS)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class News:
    """One thing that happened."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str
    occasion: int = 0
    """Tells apart what happens again in the same words and must be told again, such as a group's restarts."""


@dataclass(slots=True)
class Journal:
    """Writes Events; the same news about the same object is written once in ten minutes."""

    cluster: Cluster
    reporter: str
    _written: dict[tuple[str, News], float] = field(default_factory=dict)

    async def write(self, about: Document, news: list[News], now_s: float) -> None:
        """Write what is new. An Event that cannot be written is logged: it must not hold up the work it tells of.

        Raises ResourceGone in a namespace that is being deleted.
        """
        self._written = {key: at for key, at in self._written.items() if now_s - at < REPEAT_S}
        for one in news:
            key = (about["metadata"]["uid"], one)
            if key in self._written:
                continue
            self._written[key] = now_s
            try:
                await self.cluster.create_event(about["metadata"]["namespace"], self._event(about, one, now_s))
            except ResourceGone:
                raise
            except KimiError as error:
                log.warning("event_not_written", reason=one.reason, error=str(error))

    def _event(self, about: Document, news: News, now_s: float) -> dict[str, Any]:
        metadata = about["metadata"]
        time = format_time(now_s)
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": news.kind,
            "reason": news.reason,
            "message": news.message[:1024],
            "source": {"component": "kimi-operator", "host": self.reporter},
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }


def news_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[News]:
    """What a change of status tells: Ready reached or lost, what is not as planned, and what waits for a person."""
    old = {one["type"]: one for one in before.get("conditions", ())}
    num_restarts = sum(group["restarts"] for role in Role for group in after.get(role.value, {}).get("groups", ()))
    found = []
    for condition in after["conditions"]:
        was = old.get(condition["type"], {})
        if was.get("status") == condition["status"] and was.get("reason") == condition["reason"]:
            continue
        match condition["type"], condition["status"]:
            case "Ready", "True":
                # Each restart was told, so its end is too.
                found.append(News("Normal", "Ready", "all groups and the router are ready", num_restarts))
            case "Stalled", "True":
                found.append(_warning(condition))
            case (("CapacityAvailable" | "WeightsReady"), "False"):
                found.append(_warning(condition))
            case "PlanResolved", "True" if condition["reason"] in NOT_AS_PLANNED:
                found.append(_warning(condition))
            case "Ready", _ if was.get("status") == "True":
                found.append(_warning(condition))
    return found


def _warning(condition: Mapping[str, str]) -> News:
    return News("Warning", condition["reason"], condition.get("message", ""))
