"""One KimiDeployment on the small API server, and the operator as `kimi-operator run` wires it."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from api_server import ApiServer, Key
from kimi_operator.__main__ import Operator, build
from kimi_operator.errors import ClusterUnavailable
from kimi_operator.metrics import Metrics
from kimi_operator.probes import Health
from kimi_operator.reconcile import Reconciler
from kimi_operator.settings import OperatorSettings
from kimi_operator.store import ResourceKey
from kubernetes.aio import client

ROOT = Path(__file__).parents[3]
K3 = ResourceKey("ns", "k3")
Document = dict[str, Any]


def example(name: str) -> Document:
    document: Document = yaml.safe_load((ROOT / "examples" / "local" / name).read_text())
    return document


@dataclass
class Stage:
    """The server, and the operator of the moment."""

    server: ApiServer
    api: client.ApiClient
    session: aiohttp.ClientSession
    operator: Operator

    @classmethod
    @asynccontextmanager
    async def of(cls, server: ApiServer) -> AsyncIterator[Stage]:
        """The local example in namespace ns, with its profile and four nodes."""
        document = example("2p2d.yaml")
        document["metadata"]["namespace"] = "ns"
        for one in (document, example("profile.yaml"), *(node(f"node{i}") for i in range(4))):
            server.put(one)
        configuration = client.Configuration(host=server.url)
        async with client.ApiClient(configuration) as api, aiohttp.ClientSession() as session:
            yield cls(server, api, session, _build(api, session))

    @property
    def reconciler(self) -> Reconciler:
        reconciler = self.operator.inbox.queue.reconcile
        assert isinstance(reconciler, Reconciler)
        return reconciler

    def restart_operator(self) -> None:
        """Another process takes over; it knows nothing."""
        self.operator = _build(self.api, self.session)

    async def look(self, num: int = 1) -> float | None:
        """List everything, as after events, and reconcile; some times over. The answer is when to look again."""
        answer = None
        for _ in range(num):
            await self.operator.list_all()
            answer = await self.reconcile()
        return answer

    async def reconcile(self) -> float | None:
        """Reconcile with what the operator knows already."""
        self.reconciler.clock = lambda: self.server.now_s
        return await self.reconciler(K3)

    async def look_in_vain(self) -> None:
        """A look whose list may succeed, and that ends in a back-off."""
        try:
            await self.look()
        except ClusterUnavailable:
            return
        raise AssertionError("nothing was unavailable")

    async def settle(self) -> None:
        """Let pods leave, come and become ready until the operator has nothing left to write."""
        for _ in range(20):
            before = len(self.server.writes)
            await self.look()
            self.server.end_deleted_pods()
            self.server.make_pods()
            self.server.start_pods()
            self.server.start_router()
            await self.look()
            if len(self.server.writes) == before:
                return
        raise AssertionError(f"still writing: {self.server.writes[-20:]}")

    # -- what is there -----------------------------------------------------------

    def status(self) -> Document:
        found: Document = self.server.get("KimiDeployment", "k3").get("status", {})
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        one = self._condition(kind)
        return one["status"], one["reason"]

    def message(self, kind: str) -> str:
        """What a condition says."""
        return str(self._condition(kind).get("message", ""))

    def _condition(self, kind: str) -> Document:
        found: Document = next(one for one in self.status()["conditions"] if one["type"] == kind)
        return found

    def group(self, role: str) -> Document:
        found: Document = self.status()[role]["groups"][0]
        return found

    def generation(self, name: str) -> int:
        labels = self.server.get("StatefulSet", name)["spec"]["template"]["metadata"]["labels"]
        return int(labels["kimi-operator.io/generation"])

    def notes(self, name: str) -> tuple[str, str]:
        """Restarts, and restarts in a row, as they stand on a group's StatefulSet."""
        annotations = self.server.get("StatefulSet", name)["metadata"]["annotations"]
        return annotations["kimi-operator.io/restarts"], annotations["kimi-operator.io/restarts-in-a-row"]

    def num_restarts(self, role: str) -> float:
        """What the metric of this operator says."""
        labels = {"namespace": "ns", "deployment": "k3", "role": role}
        registry = self.operator.metrics.registry
        return registry.get_sample_value("kimi_operator_group_restarts_total", labels) or 0.0

    def events(self, reason: str) -> list[str]:
        return [one["message"] for one in self.server.of("Event") if one["reason"] == reason]

    def change_spec(self, **fields: Any) -> None:
        """Edit the KimiDeployment's spec; top-level fields."""
        spec = copy.deepcopy(self.server.get("KimiDeployment", "k3")["spec"])
        self.server.edit("KimiDeployment", "k3", spec=spec | fields)

    def deployment_key(self) -> Key:
        return Key("KimiDeployment", "ns", "k3")


def node(name: str, ready: str = "True", **labels: str) -> Document:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2027-01-01T00:00:00Z"}
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {},
        "status": {"conditions": [condition], "allocatable": {"amd.com/gpu": "8"}},
    }  # fmt: skip


def _build(api: client.ApiClient, session: aiohttp.ClientSession) -> Operator:
    settings = OperatorSettings(identity="test", node_grace_s=60.0)
    return build(settings, api, session, Metrics(), Health())
