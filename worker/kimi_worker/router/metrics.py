"""What the router counts."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kimi_worker.router.bodies import Bodies
from kimi_worker.router.pool import Pool
from kimi_worker.settings import Role


class Metrics:
    """One registry a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = Gauge("kimi_router_requests_in_flight", "Requests being answered", registry=self.registry)
        self._requests = Counter(
            "kimi_router_requests",
            "Answers to clients: each once, by its status, or client_gone or broken",
            ["result"],
            registry=self.registry,
        )
        self.refusals = Counter(
            "kimi_router_refusals",
            "Answers of pods after which another pair was asked",
            ["code"],
            registry=self.registry,
        )

    def watch(self, pool: Pool) -> None:
        """Show the pool's lanes too."""
        self.registry.register(_PoolCollector(pool))

    def watch_bodies(self, bodies: Bodies) -> None:
        """Show the bytes of requests that wait for the first byte of their answer."""
        held = Gauge("kimi_router_held_bytes", "Bodies of requests whose answer has not begun", registry=self.registry)
        held.set_function(lambda: bodies.num_bytes)

    def count(self, result: str) -> None:
        """An answer, or what became of it."""
        self._requests.labels(result).inc()

    def text(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)


class _PoolCollector(Collector):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("kimi_router_ready_lanes", "Lanes that take requests", labels=["role"])
        for role in (Role.PREFILL, Role.DECODE):
            family.add_metric([role.value], len(self._pool.lanes(role)))
        yield family
