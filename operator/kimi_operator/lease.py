"""One leader among the replicas, by a Lease. A leader that loses it ends its process: nothing may act twice."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import structlog
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from kimi_operator.settings import OperatorSettings

log = structlog.get_logger()


class PatientLock(LeaseLock):  # type: ignore[misc]
    """A LeaseLock for which an API server that is away, or hangs, is a failed try and not the end."""

    def __init__(self, name: str, namespace: str, identity: str, api: client.ApiClient, try_s: float) -> None:
        """`try_s`: a try that takes longer has failed."""
        super().__init__(name, namespace, identity, api)
        self._try_s = try_s

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        """The Lease's record; (False, error) when there is none or nobody answers."""
        try:
            async with asyncio.timeout(self._try_s):
                found: tuple[bool, Any] = await super().get(name, namespace)
                return found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return False, ApiException(status=0, reason=repr(error))

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        """Whether the Lease was made."""
        # Not super().create: the client's 37.0.2 passes pretty=True there, which its own validation refuses.
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            async with asyncio.timeout(self._try_s):
                await self.api_instance.create_namespaced_lease(namespace, lease)
                return True
        except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("lease_not_created", error=repr(error))
            return False

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        """Whether the Lease was renewed or taken."""
        try:
            async with asyncio.timeout(self._try_s):
                return bool(await super().update(name, namespace, updated_record))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("lease_not_updated", error=repr(error))
            return False

    async def release(self) -> None:
        """Hand the Lease back, so that a standby need not wait for its end."""
        if self.lease_reference is None:
            return
        self.lease_reference.spec.holder_identity = ""
        self.lease_reference.spec.lease_duration_seconds = 1
        with suppress(ApiException, aiohttp.ClientError, TimeoutError, OSError):
            async with asyncio.timeout(self._try_s):
                await self.api_instance.replace_namespaced_lease(self.name, self.namespace, self.lease_reference)


@dataclass(slots=True)
class Candidate:
    """This replica in the election."""

    api: client.ApiClient
    settings: OperatorSettings
    identity: str
    leads: asyncio.Event = field(default_factory=asyncio.Event)
    _lock: PatientLock | None = None

    async def run(self) -> None:
        """Stand for election; `leads` is set once elected. Returns only when the lease was lost."""
        settings = self.settings
        # A try may take half of the time after which the leader gives up, so that there is always a second one.
        try_s = max(settings.lease_retry_s, settings.lease_renew_s / 2)
        self._lock = PatientLock(settings.lease_name, settings.lease_namespace, self.identity, self.api, try_s)
        await LeaderElection(
            Config(
                self._lock,
                lease_duration=settings.lease_duration_s,
                renew_deadline=settings.lease_renew_s,
                retry_period=settings.lease_retry_s,
                onstarted_leading=self._start,
                onstopped_leading=None,
            )
        ).run()
        log.error("lease_lost", identity=self.identity)

    async def release(self) -> None:
        """Give the lease back, if it is held."""
        if self._lock is not None and self.leads.is_set():
            await self._lock.release()

    async def _start(self) -> None:
        log.info("lease_acquired", identity=self.identity)
        self.leads.set()
