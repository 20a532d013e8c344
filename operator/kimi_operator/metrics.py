"""The operator's metrics. No label grows with the number of resources but those that name one."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from kimi_operator.api.deployment import Role
from kimi_operator.api.status import GroupState
from kimi_operator.decide.groups import GroupDecision
from kimi_operator.render.names import GroupKey
from kimi_operator.store import ResourceKey

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """All series, in a registry of their own. Also the hooks of the work queue."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._depth = Gauge("kimi_operator_queue_depth", "Keys that are due or will be.", registry=self.registry)
        self._waited = self._histogram("kimi_operator_queue_wait_seconds", "From due to served.")
        self._took = self._histogram("kimi_operator_reconcile_seconds", "Duration of a reconcile.")
        self._failures = self._counter("kimi_operator_reconcile_failures_total", "Reconciles that ended in an error.")
        self.requests = self._counter("kimi_operator_api_requests_total", "Requests sent.", "verb", "kind")
        self.restarts = self._counter(
            "kimi_operator_group_restarts_total", "Groups restarted: one failed, or a pod of it had to leave.",
            "namespace", "deployment", "role",
        )  # fmt: skip
        self.admissions = self._counter(
            "kimi_operator_admissions_total", "Questions of the API server, by answer: allowed, warned, refused.",
            "answer",
        )  # fmt: skip
        self.groups = Gauge(
            "kimi_operator_groups", "Groups by state.", ("namespace", "deployment", "role", "state"),
            registry=self.registry,
        )  # fmt: skip
        self.leader = Gauge("kimi_operator_leader", "1 while this replica leads.", registry=self.registry)
        self.loop_lag = Gauge(
            "kimi_operator_loop_lag_seconds", "How late the event loop woke last.", registry=self.registry
        )

    def depth(self, keys: int) -> None:
        """Keys that are due or will be."""
        self._depth.set(keys)

    def started(self, waited_s: float) -> None:
        """A key is handed out."""
        self._waited.observe(waited_s)

    def finished(self, took_s: float, *, failed: bool) -> None:
        """A reconcile ended."""
        self._took.observe(took_s)
        if failed:
            self._failures.inc()

    def count_request(self, verb: str, kind: str) -> None:
        """A request is sent to the API server."""
        self.requests.labels(verb, kind).inc()

    def count_admission(self, answer: str) -> None:
        """The API server has asked about a KimiDeployment."""
        self.admissions.labels(answer).inc()

    def set_groups(self, key: ResourceKey, decisions: Mapping[GroupKey, GroupDecision]) -> None:
        """How many groups of a deployment are in which state."""
        counts = Counts((one.key.role.value, one.state.value) for one in decisions.values())
        for role in Role:
            for state in GroupState:
                self.groups.labels(*key, role.value, state.value).set(counts[role.value, state.value])

    def forget_groups(self, key: ResourceKey) -> None:
        """A deployment is gone, and its series with it."""
        for role in Role:
            with suppress(KeyError):
                self.restarts.remove(*key, role.value)
            for state in GroupState:
                with suppress(KeyError):
                    self.groups.remove(*key, role.value, state.value)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(name, help_text, buckets=_SECONDS, registry=self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)
