"""Two replicas and one Lease in virtual time, on an API server that hangs now and then: never two leaders."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from kimi_operator.lease import PunctualElection
from kimi_operator.settings import LEAVE_S, OperatorSettings
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection import leaderelection
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from pydantic import ValidationError
from virtual_time import run_virtual

DURATION_S, RENEW_S, RETRY_S = 15, 10.0, 2.0
ABSENT = json.dumps({"code": 404})


@dataclass
class Lease:
    """The Lease in the API server. Calls of a replica take their time, or hang."""

    rng: random.Random
    record: LeaderElectionRecord | None = None
    version: int = 0
    hangs_until_s: dict[str, float] = field(default_factory=dict)

    async def travel(self, identity: str) -> None:
        await asyncio.sleep(self.rng.choice([0.01, 0.01, 0.01, 1.0, 4.0]))
        now_s = asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, self.hangs_until_s.get(identity, 0.0) - now_s))


@dataclass
class Lock:
    """One replica's way to it; as a LeaseLock, but a hang may fall before or after the server has acted."""

    lease: Lease
    identity: str
    name: str = "kimi-operator"
    namespace: str = "kimi-system"
    read_version: int = -1

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        await self.lease.travel(self.identity)
        self.read_version = self.lease.version
        if self.lease.record is None:
            error = ApiException(status=404, reason="absent")
            error.body = ABSENT
            return False, error
        return True, copy.copy(self.lease.record)

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        return await self.update(name, namespace, election_record)

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        await self.lease.travel(self.identity)
        if self.lease.version != self.read_version:
            return False
        self.lease.record, self.lease.version = updated_record, self.lease.version + 1
        await self.lease.travel(self.identity)
        return True


@dataclass
class Replica:
    """Stands for election again and again; notes when it led, the time that it takes to end included."""

    lease: Lease
    identity: str
    terms: list[tuple[float, float]] = field(default_factory=list)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s: list[float] = []

            async def start(began_s: list[float] = began_s) -> None:
                began_s.append(loop.time())

            lock = Lock(self.lease, self.identity)
            await PunctualElection(Config(lock, DURATION_S, RENEW_S, RETRY_S, start, None)).run()
            self.terms.append((began_s[0], loop.time() + LEAVE_S))
            await asyncio.sleep(LEAVE_S + 5.0)


@contextmanager
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library reads the time of day."""
    with monkeypatch.context() as patch:
        patch.setattr(leaderelection, "time", SimpleNamespace(time=lambda: asyncio.get_running_loop().time()))
        yield


@pytest.mark.parametrize("seed", range(20))
def test_there_are_never_two_leaders(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        lease = Lease(rng)
        replicas = [Replica(lease, name) for name in ("a", "b")]
        tasks = [asyncio.create_task(one.run()) for one in replicas]
        for _ in range(40):
            await asyncio.sleep(rng.uniform(0, 60))
            until_s = asyncio.get_running_loop().time() + rng.choice([3.0, 8.0, 30.0])
            for identity in rng.choice([["a"], ["b"], ["a", "b"]]):
                lease.hangs_until_s[identity] = until_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        terms = sorted(term for one in replicas for term in one.terms)
        assert len(terms) > 5
        for (_, end_s), (next_s, _) in pairwise(terms):
            assert end_s <= next_s

    with virtual_clock(monkeypatch):
        run_virtual(main)


def test_a_leader_survives_a_hang_that_is_shorter_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        lease = Lease(random.Random(0))
        lease.rng.choice = lambda options: 0.01  # type: ignore[method-assign,assignment,misc]
        replica = Replica(lease, "a")
        task = asyncio.create_task(replica.run())
        for _ in range(50):
            await asyncio.sleep(20.0)
            lease.hangs_until_s["a"] = asyncio.get_running_loop().time() + 4.0
        assert replica.terms == []
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with virtual_clock(monkeypatch):
        run_virtual(main)


CONTRADICTIONS = {
    "renewal too late": ({"lease_duration_s": 15, "lease_renew_s": 15.0}, ("lease_duration_s", "lease_renew_s")),
    "no time to leave": ({"lease_duration_s": 15, "lease_renew_s": 12.5}, ("lease_duration_s", "lease_renew_s")),
    "one try only": ({"lease_renew_s": 10.0, "lease_retry_s": 9.0}, ("lease_renew_s", "lease_retry_s")),
}


@pytest.mark.parametrize(("times", "fields"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_times_that_contradict_one_another_are_refused_by_name(
    times: dict[str, float], fields: tuple[str, ...]
) -> None:
    with pytest.raises(ValidationError) as refused:
        OperatorSettings.model_validate(times)
    assert all(name in str(refused.value) for name in fields)


def test_the_default_times_are_taken() -> None:
    settings = OperatorSettings.model_validate({})
    assert (settings.lease_duration_s, settings.lease_renew_s, settings.lease_retry_s) == (DURATION_S, RENEW_S, RETRY_S)
