"""A local Kubernetes for the tests of this folder."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kimi_localcluster.cluster import Cluster
from kimi_localcluster.testing import telling, temporary_namespace

ROOT = Path(__file__).parents[2]
FOLDERS = {ROOT / "examples/tiny-k3": "/opt/kimi/tiny-k3"}
OPERATOR = "system:serviceaccount:kimi-system:kimi-operator"
WRITES = ("create", "update", "patch", "delete", "deletecollection")


@pytest.fixture(scope="package")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Four nodes with eight GPUs each, for all tests of this folder; a test that breaks something mends it.

    KIMI_TEST_CLUSTER names a running cluster to use instead, which saves its start while a test is being written.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if name := os.environ.get("KIMI_TEST_CLUSTER"):
        running = Cluster.attach(name)
        with telling(running, capture):
            yield running
        return
    # A first start builds Kubernetes: its progress must be seen.
    with capture.global_and_fixture_disabled():
        started = Cluster.up(f"test-{os.getpid()}", folders=FOLDERS, is_tied=True)
    with started, telling(started, capture):
        yield started


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, removed with all that is in it."""
    name = f"t-{request.node.name.replace('_', '-').replace('[', '-').rstrip(']')}"
    with temporary_namespace(cluster, name[:63].rstrip("-").lower()) as created:
        yield created


@pytest.fixture
def written_by_operator(cluster: Cluster) -> Callable[[float, str], Counter[tuple[str, str]]]:
    """Watches for some seconds what the operator writes, in the API server's own audit log.

    Lease renewals aside, and other namespaces than the given one aside: those of earlier tests may still be going.
    """

    def watch(for_s: float, namespace: str) -> Counter[tuple[str, str]]:
        log = cluster.logs("audit")
        start, end = log.stat().st_size, time.monotonic() + for_s
        cluster.wait_for("the end of the watch", lambda: time.monotonic() > end, timeout_s=for_s + 30)
        with log.open() as file:
            file.seek(start)
            entries = [json.loads(line) for line in file if line.endswith("\n")]
        own = [one for one in entries if one["user"].get("username") == OPERATOR]
        assert own, "the operator's lease renewals must be in the log, or it is not the log"
        here = [one for one in own if one["objectRef"].get("namespace", "") in ("", "kimi-system", namespace)]
        writes = Counter((one["verb"], one["objectRef"]["resource"]) for one in here if one["verb"] in WRITES)
        writes.pop(("update", "leases"), None)
        return writes

    return watch
