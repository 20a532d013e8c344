"""What the log says of a Lease that cannot be read, made or written: one line, without a trace."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import structlog
from aiohttp import web
from kimi_operator.lease import PatientLock, PunctualElection
from kimi_operator.logs import configure_logs
from kubernetes.aio import client
from kubernetes.aio.leaderelection.electionconfig import Config

LEASE = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": "kimi-operator", "namespace": "kimi-system"},
    "spec": {
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "acquireTime": "2026-01-02T03:04:05.000001Z",
        "renewTime": "2026-01-02T03:04:05.000001Z",
    },
}


class Server:
    """Answers each method with a status; a read that succeeds gives a Lease that nobody holds."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        status = self.statuses[request.method]
        if status == 200:
            return web.json_response(LEASE)
        if status == 0:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"kind": "Status", "code": status, "message": "it is so"}, status=status)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@contextmanager
def real_logs() -> Iterator[None]:
    """The log as the operator writes it, to the standard output of the moment."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logs("info")
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)


FAULTS = {
    "another replica was first": ({"GET": 200, "PUT": 409}, "lease_not_updated", 409),
    "a write that is not answered": ({"GET": 200, "PUT": 0}, "lease_not_updated", None),
    "a write that fails": ({"GET": 200, "PUT": 500}, "lease_not_updated", 500),
    "a read that fails": ({"GET": 503}, "lease_not_read", 503),
    "a read that is not answered": ({"GET": 0}, "lease_not_read", 0),
    "another replica made it first": ({"GET": 404, "POST": 409}, "lease_not_created", 409),
}


@pytest.mark.parametrize(("statuses", "event", "status"), FAULTS.values(), ids=FAULTS.keys())
async def test_a_failed_try_is_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], statuses: dict[str, int], event: str, status: int | None
) -> None:
    server.statuses = statuses
    async with client.ApiClient(client.Configuration(host=server.url)) as api:
        lock = PatientLock("kimi-operator", "kimi-system", "b", api)
        election = PunctualElection(Config(lock, 15, 10.0, 2.0, asyncio.Event().wait, None))
        with real_logs():
            assert not await election.try_acquire_or_renew()
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["event"], told.get("status")) == (event, status)
    assert "exception" not in told
    assert "\\n" not in line
