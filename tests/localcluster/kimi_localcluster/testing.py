"""Helpers that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kimi_localcluster.kube import Kube


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
