"""What a pod's API process counts; vLLM's names where the meaning is the same."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kimi_worker.protocol.engine import LaneState
from kimi_worker.server.lanes import Lanes

_LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_DURATION_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)


class Metrics:
    """One registry a process."""

    def __init__(self, model: str, lanes: Lanes) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of answered requests")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens sent to clients")
        self.success = Counter(
            "vllm:request_success", "Finished requests", ["model_name", "finished_reason"], registry=self.registry
        )
        self.failures = Counter(
            "kimi_request_failures", "Requests without a full answer", ["code"], registry=self.registry
        )
        self.first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "From request to first token", _LATENCY_S
        )
        self.between_tokens_s = self._histogram("vllm:inter_token_latency_seconds", "Between two outputs", _LATENCY_S)
        self.per_token_s = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean over a request, without the first token", _LATENCY_S
        )
        self.request_s = self._histogram("vllm:e2e_request_latency_seconds", "From request to last token", _DURATION_S)
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.output_length = self._histogram("vllm:request_generation_tokens", "Output tokens of a request", _TOKENS)
        self.handoff_bytes = self._counter("kimi_handoff_bytes", "Bytes that prefill wrote into this pod")
        self.handoff_s = self._histogram(
            "kimi_handoff_seconds", "From prefill's first write to its last completion or fence", _LATENCY_S
        )
        self.reserved_s = self._histogram(
            "kimi_handoff_reserved_seconds",
            "From reservation to activation: prefill's queue, prompt, writes",
            _DURATION_S,
        )
        self.in_flight = Gauge("kimi_requests_in_flight", "Requests being answered", registry=self.registry)
        self.registry.register(_LaneCollector(model, lanes))

    def text(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)

    def count_success(self, reason: str) -> None:
        self.success.labels(self._model, reason).inc()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self.registry)
        return family.labels(self._model)


class _LaneCollector(Collector):
    """The lanes' last states as gauges. All but the pools' sizes return to zero when the pod is idle."""

    def __init__(self, model: str, lanes: Lanes) -> None:
        self._model = model
        self._lanes = lanes

    def collect(self) -> Iterator[Metric]:
        states = self._lanes.states
        yield self._vllm("num_requests_running", "Running requests", [(s, s.running) for s in states])
        yield self._vllm("num_requests_waiting", "Queued requests", [(s, s.waiting) for s in states])
        yield self._vllm(
            "kv_cache_usage_perc",
            "Share of the pages in use, 0 to 1",
            [(s, 1 - s.free_pages / s.num_pages) for s in states],
        )
        preemptions = CounterMetricFamily("vllm:num_preemptions", "Preempted requests", labels=["model_name", "engine"])
        for state in states:
            preemptions.add_metric([self._model, str(state.lane)], state.preemptions)
        yield preemptions
        for name, text, values in (
            ("pages_total", "Pages of a lane", [s.num_pages for s in states]),
            ("pages_used", "Pages in use", [s.num_pages - s.free_pages for s in states]),
            ("slots_total", "State slots of a lane", [s.num_slots for s in states]),
            ("slots_used", "State slots in use", [s.num_slots - s.free_slots for s in states]),
            (
                "reservations",
                "Requests that hold memory and do not run: at prefill, in a handoff or quarantined",
                [s.reserved for s in states],
            ),
            ("queued_tokens", "Prompt tokens not yet computed", [s.queued_tokens for s in states]),
            ("transfers_in_flight", "Handoffs in flight", [s.transfers for s in states]),
            ("quarantined", "Reservations in quarantine", [s.quarantined for s in states]),
            ("steps", "Steps since start", [s.steps for s in states]),
            ("step_seconds", "Duration of the last step", [s.step_s for s in states]),
        ):
            family = GaugeMetricFamily(f"kimi_lane_{name}", text, labels=["lane"])
            for state, value in zip(states, values, strict=True):
                family.add_metric([str(state.lane)], value)
            yield family

    def _vllm(self, name: str, text: str, values: list[tuple[LaneState, float]]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
        for state, value in values:
            family.add_metric([self._model, str(state.lane)], value)
        return family
