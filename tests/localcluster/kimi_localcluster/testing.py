"""Helpers that several tests share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kimi_localcluster.kube import Kube
from kimi_localcluster.paths import current_test
from kimi_localcluster.progress import format_seconds

TELL_EVERY_S = 30.0
MAX_STEP_CHARS = 120


@contextmanager
def telling(cluster: Kube, capture: Any, *, every_s: float = TELL_EVERY_S) -> Iterator[None]:
    """While the block runs, say now and then which test runs and what it waits for.

    It goes to the standard error that the test run was started with, past pytest's capture (its plugin
    "capturemanager"): a worker of `pytest -n` shares that with the run itself.
    """
    with capture.global_and_fixture_disabled():
        stderr = os.dup(2)
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every_s):
            step = cluster.doing
            words = " ".join(step.title.split())[:MAX_STEP_CHARS] if step else "between two steps"
            time = f" ({format_seconds(step.elapsed_s)})" if step else ""
            # On a line of its own, for dots may stand before it.
            os.write(stderr, f"\n{current_test()}: {words}{time}\n".encode())

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        os.close(stderr)


@contextmanager
def temporary_namespace(cluster: Kube, name: str) -> Iterator[str]:
    """A namespace in which pods can be made; at the end its pods are gone and the rest of it is going."""
    cluster.kubectl("create", "namespace", name)
    cluster.wait_for(f"service account of {name}", lambda: cluster.find("serviceaccount", "default", namespace=name))
    try:
        yield name
    finally:
        # The API server takes 10 s and more to finish a namespace; only its pods hold what others need.
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        # Nothing makes new ones in it now, and nobody waits for what these would still answer.
        cluster.kubectl("delete", "pods", "--all", "--namespace", name, "--grace-period=1", "--wait=false")
        cluster.wait_for(f"end of the pods of {name}", lambda: not cluster.get("pods", namespace=name))
