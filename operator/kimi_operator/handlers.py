"""Watches, by kopf: each event puts an object into the store and marks whom it concerns. Nothing else happens here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import kopf

from kimi_operator.cluster import KINDS
from kimi_operator.queue import WorkQueue
from kimi_operator.render.names import LABEL_DEPLOYMENT
from kimi_operator.settings import OperatorSettings
from kimi_operator.store import Document, Listing, ResourceKey, Store, key_of, owner_of

WATCHED_KINDS = (
    "KimiDeployment", "HardwareProfile", "Node", "StatefulSet", "Deployment", "Service", "ConfigMap",
    "PodDisruptionBudget", "Pod",
)  # fmt: skip
CHILD_KINDS = WATCHED_KINDS[3:]


@dataclass(slots=True)
class Inbox:
    """Where watches and lists deliver."""

    store: Store
    queue: WorkQueue[ResourceKey]
    watch_began: asyncio.Event = field(default_factory=asyncio.Event)
    """Some watch has listed its kind, at its start or after it broke: what went before that, it never tells."""

    def take(self, event_type: str | None, document: Document) -> None:
        """One event of a watch; one of what it lists has no type."""
        if event_type is None:
            self.watch_began.set()
        before = self.store.get(key_of(document))
        changed = self.store.remove(document) if event_type == "DELETED" else self.store.put(document)
        if changed and not _is_own_echo(document, before, event_type):
            self.mark(document, before)

    def take_listing(self, kind: str, listing: Listing) -> None:
        """A full list of a kind: what a broken watch has missed."""
        for document in self.store.replace_kind(kind, listing):
            self.mark(document, None)

    def mark(self, document: Document, before: Document | None) -> None:
        """Mark the deployment that an object belongs to; all of them for what they share."""
        owner = owner_of(document)
        if owner is None:
            for one in self.store.of_kind("KimiDeployment"):
                self.queue.add(ResourceKey(one["metadata"]["namespace"], one["metadata"]["name"]))
            return
        is_new_spec = document["kind"] == "KimiDeployment" and _generation(before) != _generation(document)
        self.queue.add(owner, fresh=is_new_spec)
        former = owner_of(before) if before is not None else None
        if former is not None and former != owner:
            self.queue.add(former)


def register(registry: kopf.OperatorRegistry, inbox: Inbox) -> None:
    """Watch every kind that decisions depend on. `on.event` only: no annotations, no finalizers, no stored state."""
    for name in WATCHED_KINDS:
        kind = KINDS[name]
        kopf.on.event(kind.group, kind.version, kind.plural, id=f"watch-{kind.plural}", registry=registry)(
            _handler(name, inbox)
        )


def watch_settings(settings: OperatorSettings) -> kopf.OperatorSettings:
    """kopf's own settings: server-side selectors, no posting of events, no scanning for new kinds or namespaces."""
    watching = kopf.OperatorSettings()
    watching.posting.enabled = False
    watching.scanning.disabled = True
    watching.peering.standalone = True
    watching.watching.server_timeout = 300  # whole seconds: it goes into the query as it is
    watching.watching.client_timeout = 310.0
    watching.watching.connect_timeout = 30.0
    watching.watching.chunk_size = 500
    watching.networking.request_timeout = 60.0
    # kopf keeps a task an object for this long after its last event; ours have nothing to remember.
    watching.queueing.idle_timeout = 0.5
    for name in CHILD_KINDS:
        kind = KINDS[name]
        watching.watching.label_selectors[kind.group, kind.version, kind.plural] = LABEL_DEPLOYMENT
    if settings.node_selector:
        watching.watching.label_selectors["", "v1", "nodes"] = settings.node_selector
    return watching


def login(settings: OperatorSettings) -> Callable[..., kopf.ConnectionInfo | None]:
    """kopf's credentials, from where our own client takes them too."""

    def fetch(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if settings.kubeconfig:
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.login_with_service_account(**kwargs)

    return fetch


def _handler(name: str, inbox: Inbox) -> Callable[..., Awaitable[None]]:
    # Asynchronous, or kopf would run it in a thread, where neither store nor queue may be touched.
    async def on_event(event: dict[str, Any], **_: Any) -> None:
        inbox.take(event["type"], {"kind": name, **event["object"]})

    return on_event


def _is_own_echo(document: Document, before: Document | None, event_type: str | None) -> bool:
    """A change of nothing but the status of a KimiDeployment: our own write coming back."""
    if document["kind"] != "KimiDeployment" or before is None or event_type == "DELETED":
        return False
    return (
        _generation(before) == _generation(document)
        and before["metadata"]["uid"] == document["metadata"]["uid"]
        and before["metadata"].get("deletionTimestamp") == document["metadata"].get("deletionTimestamp")
    )


def _generation(document: Document | None) -> int:
    return int(document["metadata"].get("generation", 0)) if document is not None else -1
