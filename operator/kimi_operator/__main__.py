"""`kimi-operator run`: wires everything, stands for election, and while it leads watches and reconciles."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

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
from kimi_operator.render.names import LABEL_DEPLOYMENT
from kimi_operator.settings import LEAVE_S, OperatorSettings
from kimi_operator.store import Document, Listing, ResourceKey, Store
from kimi_operator.webhook import Certificate, Webhook

LAG_PERIOD_S = 1.0
SETTLE_S = 15.0
"""Until the other watches have begun too: what went between our last list and their own, they never tell."""
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
        labels = LABEL_DEPLOYMENT if kind in CHILD_KINDS else None
        if kind == "Node":
            labels = self.settings.node_selector or None
        namespaces = self.settings.watch_namespaces
        if not namespaces or kind in ("Node", "HardwareProfile"):
            return await self.cluster.list(kind, labels=labels)
        listings = [await self.cluster.list(kind, namespace=one, labels=labels) for one in namespaces]
        documents: list[Document] = [document for listing in listings for document in listing.documents]
        return Listing(documents, min(listing.version for listing in listings))

    async def _relist_forever(self) -> None:
        began, resync_s = self.inbox.watch_began, self.settings.resync_s
        began.set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(resync_s):
                    await began.wait()
                    await asyncio.sleep(SETTLE_S)
            began.clear()
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


def make_webhook(settings: OperatorSettings, api: client.ApiClient, metrics: Metrics, port: int) -> Webhook:
    """The endpoint of a replica; it shares nothing with the leader's work but the connection."""
    limit = RateLimit(settings.requests_per_second, settings.request_burst)
    cluster = Cluster(api, Store(), limit, metrics.count_request)
    certificate = Certificate(settings.webhook_cert_dir)
    return Webhook(cluster, certificate, metrics.count_admission, port, settings.node_selector)


async def run(settings: OperatorSettings) -> int:
    """Run until asked to stop or the lease is lost; the exit status."""
    metrics, health = Metrics(), Health()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info("starting", **settings.model_dump(mode="json"))
    async with AsyncExitStack() as resources:
        api = await resources.enter_async_context(await connect(settings.kubeconfig))
        probes = await serve_probes(settings.http_port, health, metrics)
        resources.push_async_callback(probes.cleanup)
        session = await resources.enter_async_context(aiohttp.ClientSession())
        candidate = Candidate(api, settings, settings.identity or socket.gethostname())

        async def lead() -> None:
            await candidate.leads.wait()
            health.is_leader = True
            metrics.leader.set(1)
            await build(settings, api, session, metrics, health).lead()

        parts = [candidate.run(), lead(), stop.wait()]
        if settings.webhook_port is not None:
            # In every replica: the API server may ask any of them.
            parts.append(make_webhook(settings, api, metrics, settings.webhook_port).serve())
        # The election goes on beside the work: when it ends, the lease is lost, and the process with it.
        lost = await first_to_end(*parts) == 0
        if not lost:
            await candidate.release()
    log.info("stopped", lease_lost=lost)
    return int(lost)


async def first_to_end(*parts: Coroutine[Any, Any, Any]) -> int:
    """Run parts side by side until the first ends, then cancel the others; which one it was. Raises its error."""
    tasks = [asyncio.create_task(part) for part in parts]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    # A watch that failed may hold kopf's tasks for ever; whoever waits longer risks two leaders.
    _, hanging = await asyncio.wait(tasks, timeout=LEAVE_S)
    if hanging:
        log.error("parts_hang", parts=len(hanging))
    for task in done:
        task.result()
    return min(tasks.index(task) for task in done)


async def run_and_leave(settings: OperatorSettings) -> NoReturn:
    """Run, then end the process whatever tasks are left: the loop's own way out would wait for them."""
    status = 1
    try:
        status = await run(settings)
    except KimiError as error:
        log.error("stopped_by_error", error=str(error))
    except Exception:  # the edge of the process
        log.exception("stopped_by_bug")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="kimi-operator", description="Reconciles KimiDeployment resources.")
    parser.add_argument("command", choices=["run"], help="run: work until stopped; settings from KIMI_OPERATOR_*")
    parser.parse_args()
    try:
        settings = OperatorSettings()
    except ValidationError as error:
        sys.exit(f"kimi-operator: {error}")
    configure_logs(settings.log_level)
    asyncio.run(run_and_leave(settings))


if __name__ == "__main__":
    main()
