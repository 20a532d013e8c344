"""`kimi-operator run`: wires everything, stands for election, and while it leads watches and reconciles."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf
import structlog
from kubernetes.aio import client
from pydantic import ValidationError

from kimi_operator.cluster import Cluster, connect
from kimi_operator.errors import ClusterUnavailable, KimiError
from kimi_operator.handlers import CHILD_KINDS, WATCHED_KINDS, Inbox, login, register, watch_settings
from kimi_operator.journal import Journal
from kimi_operator.lease import Candidate
from kimi_operator.limiter import RateLimit
from kimi_operator.logs import configure_logs
from kimi_operator.measure import PoolReader
from kimi_operator.metrics import Metrics
from kimi_operator.probes import Health, serve_probes
from kimi_operator.queue import QueueSettings, WorkQueue
from kimi_operator.reconcile import Reconciler
from kimi_operator.render import RenderConfig
from kimi_operator.settings import OperatorSettings
from kimi_operator.store import DEPLOYMENT_LABEL, Document, Listing, ResourceKey, Store

LAG_PERIOD_S = 1.0
log = structlog.get_logger()


@dataclass(slots=True)
class Operator:
    """The leader's parts."""

    settings: OperatorSettings
    cluster: Cluster
    inbox: Inbox
    pools: PoolReader
    metrics: Metrics
    health: Health

    async def lead(self) -> None:
        """List everything once, then watch and reconcile until asked to stop. Raises what ends a part of it."""
        await self._first_listing()
        self.health.is_synced = True
        log.info("leading", deployments=len(self.inbox.store.of_kind("KimiDeployment")))
        await first_to_end(self.inbox.queue.run(), self._relist_forever(), self._measure_lag(), self._watch())

    async def list_all(self) -> None:
        """Read every kind as it is now; what watches missed is mended."""
        for kind in WATCHED_KINDS:
            self.inbox.take_listing(kind, await self._list(kind))
        self.pools.forget_except(pod["metadata"]["uid"] for pod in self.inbox.store.of_kind("Pod"))

    async def _first_listing(self) -> None:
        while True:
            try:
                return await self.list_all()
            except ClusterUnavailable as error:
                log.warning("cluster_unavailable", error=str(error), retry_in_s=error.retry_after_s)
                await asyncio.sleep(error.retry_after_s)

    async def _list(self, kind: str) -> Listing:
        labels = DEPLOYMENT_LABEL if kind in CHILD_KINDS else None
        if kind == "Node":
            labels = self.settings.node_selector or None
        namespaces = self.settings.watch_namespaces
        if not namespaces or kind in ("Node", "HardwareProfile"):
            return await self.cluster.list(kind, labels=labels)
        listings = [await self.cluster.list(kind, namespace=one, labels=labels) for one in namespaces]
        documents: list[Document] = [document for listing in listings for document in listing.documents]
        return Listing(documents, min(listing.version for listing in listings))

    async def _relist_forever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.resync_s)
            try:
                await self.list_all()
            except ClusterUnavailable as error:
                log.warning("relist_failed", error=str(error))

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(LAG_PERIOD_S)
            self.metrics.loop_lag.set(loop.time() - before - LAG_PERIOD_S)

    async def _watch(self) -> None:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry, id="login")(login(self.settings))
        register(registry, self.inbox)
        await kopf.operator(
            registry=registry,
            settings=watch_settings(self.settings),
            standalone=True,
            clusterwide=not self.settings.watch_namespaces,
            namespaces=self.settings.watch_namespaces,
        )


def build(
    settings: OperatorSettings, api: client.ApiClient, session: aiohttp.ClientSession, metrics: Metrics, health: Health
) -> Operator:
    """Wire the parts together."""
    store = Store()
    limit = RateLimit(settings.requests_per_second, settings.request_burst)
    cluster = Cluster(api, store, limit, metrics.count_request)
    config = RenderConfig(settings.worker_image, settings.image_pull_policy, settings.image_pull_secrets)
    pools = PoolReader(session)
    journal = Journal(cluster, settings.identity or socket.gethostname())
    reconciler = Reconciler(cluster, store, config, journal, pools, metrics, settings.node_grace_s)
    queue = WorkQueue[ResourceKey](
        reconciler, QueueSettings(workers=settings.workers, resync_s=settings.resync_s), metrics
    )
    return Operator(settings, cluster, Inbox(store, queue), pools, metrics, health)


async def run(settings: OperatorSettings) -> int:
    """Run until asked to stop or the lease is lost; the exit status."""
    metrics, health = Metrics(), Health()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info("starting", **settings.model_dump(mode="json"))
    api = await connect(settings.kubeconfig)
    probes = await serve_probes(settings.http_port, health, metrics)
    candidate = Candidate(api, settings, settings.identity or socket.gethostname())
    async with aiohttp.ClientSession() as session:

        async def lead() -> None:
            await candidate.leads.wait()
            health.is_leader = True
            metrics.leader.set(1)
            await build(settings, api, session, metrics, health).lead()

        # The election goes on beside the work: when it ends, the lease is lost, and the process with it.
        election = asyncio.create_task(candidate.run())
        ended = await first_to_end(lead(), stop.wait(), _wait_for(election))
        lost = ended == 2
        if not lost:
            election.cancel()
            await candidate.release()
    await probes.cleanup()
    await api.close()
    log.info("stopped", lease_lost=lost)
    return int(lost)


async def first_to_end(*parts: Coroutine[Any, Any, Any]) -> int:
    """Run parts side by side until the first ends, then cancel the others; which one it was. Raises its error."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        done = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return tasks.index(done[0])


async def _wait_for(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
    task.result()


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="kimi-operator", description="Reconciles KimiDeployment resources.")
    parser.add_argument("command", choices=["run"], help="run: work until stopped; settings from KIMI_OPERATOR_*")
    parser.parse_args()
    try:
        settings = OperatorSettings()
        configure_logs(settings.log_level)
        sys.exit(asyncio.run(run(settings)))
    except (ValidationError, KimiError) as error:
        sys.exit(f"kimi-operator: {error}")


if __name__ == "__main__":
    main()
