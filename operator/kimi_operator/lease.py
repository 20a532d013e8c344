"""One leader among the replicas, by a Lease. A leader that loses it ends its process: nothing may act twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import structlog
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from kimi_operator.settings import LEAVE_S, OperatorSettings

log = structlog.get_logger()


class PatientLock(LeaseLock):  # type: ignore[misc]
    """A LeaseLock for which an API server that is away is a failed try and not the end; each is one line of the log.

    The library's own `create` and `update` log their errors with a trace; its `create` (37.0.2) also passes a
    pretty=True that its own validation refuses.
    """

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        """The Lease's record; (False, error) when there is none or nobody answers."""
        try:
            is_there, found = await super().get(name, namespace)
        except (aiohttp.ClientError, OSError) as error:
            is_there, found = False, ApiException(status=0, reason=repr(error))
        if not is_there and found.status != HTTPStatus.NOT_FOUND:
            log.warning("lease_not_read", status=found.status, error=found.reason)
        return is_there, found

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        """Whether the Lease was made."""
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        return await _is_done("lease_not_created", self.api_instance.create_namespaced_lease(namespace, lease))

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        """Whether the Lease was renewed or taken."""
        lease = self.lease_reference
        assert lease is not None, "the election reads the Lease before it writes it"
        lease.spec = self.update_lease(updated_record, lease.spec)
        return await _is_done("lease_not_updated", self.api_instance.replace_namespaced_lease(name, namespace, lease))

    async def release(self, within_s: float) -> None:
        """Hand the Lease back, so that a standby need not wait for its end."""
        if self.lease_reference is None:
            return
        self.lease_reference.spec.holder_identity = ""
        self.lease_reference.spec.lease_duration_seconds = 1
        with suppress(ApiException, aiohttp.ClientError, TimeoutError, OSError):
            async with asyncio.timeout(within_s):
                await self.api_instance.replace_namespaced_lease(self.name, self.namespace, self.lease_reference)


async def _is_done(otherwise: str, write: Awaitable[object]) -> bool:
    """Whether a write succeeded; `otherwise` is the event to log. 409: another replica has written before."""
    try:
        await write
    except ApiException as error:
        log.warning(otherwise, status=error.status, error=error.reason)
    except (aiohttp.ClientError, OSError) as error:
        log.warning(otherwise, error=repr(error))
    else:
        return True
    return False


class PunctualElection(LeaderElection):  # type: ignore[misc]
    """An election whose leader has given up `renew_deadline` after it began its last renewal, whatever hangs.

    The library's own loop counts from the end of a renewal and lets a try that has begun run on. A standby counts from
    the moment when it sees a renewal, which is not before that renewal began.
    """

    def __init__(self, config: Config) -> None:
        """See Config."""
        super().__init__(config)
        # A try is a read and a write. It may take half of the leader's time, so that there is always a second one.
        self._try_s = max(config.retry_period, config.renew_deadline / 2)
        self._renewed_s = 0.0

    async def try_acquire_or_renew(self) -> bool:
        """Whether the Lease is held now; a try that takes too long has failed."""
        return await self._try(asyncio.get_running_loop().time() + self._try_s)

    async def renew_loop(self) -> None:
        """Renew until that fails for too long."""
        loop, config = asyncio.get_running_loop(), self.election_config
        while (deadline_s := self._renewed_s + config.renew_deadline) > loop.time():
            await asyncio.sleep(min(config.retry_period, deadline_s - loop.time()))
            await self._try(min(loop.time() + self._try_s, deadline_s))

    async def _try(self, until_s: float) -> bool:
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(until_s):
                is_held = bool(await super().try_acquire_or_renew())
        except TimeoutError:
            log.warning("lease_try_timed_out", after_s=round(asyncio.get_running_loop().time() - began_s, 1))
            return False
        if is_held:
            self._renewed_s = began_s
        return is_held


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
        self._lock = PatientLock(settings.lease_name, settings.lease_namespace, self.identity, self.api)
        await PunctualElection(
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
            await self._lock.release(within_s=LEAVE_S)

    async def _start(self) -> None:
        log.info("lease_acquired", identity=self.identity)
        self.leads.set()
