"""A local Kubernetes for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kimi_localcluster.cluster import Cluster
from kimi_localcluster.testing import temporary_namespace

ROOT = Path(__file__).parents[2]
FOLDERS = {ROOT / "examples/tiny-k3": "/opt/kimi/tiny-k3"}


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Four nodes with eight GPUs each, for the whole session; a test that breaks something mends it.

    KIMI_TEST_CLUSTER names a running cluster to use instead, which saves its start while a test is being written.
    """
    if running := os.environ.get("KIMI_TEST_CLUSTER"):
        yield Cluster.attach(running)
        return
    # A first start builds Kubernetes: its progress must be seen.
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        started = Cluster.up(f"test-{os.getpid()}", folders=FOLDERS, is_tied=True)
    with started:
        yield started


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, removed with all that is in it."""
    name = f"t-{request.node.name.replace('_', '-').replace('[', '-').rstrip(']')}"
    with temporary_namespace(cluster, name[:63].rstrip("-").lower()) as created:
        yield created
