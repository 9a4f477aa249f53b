"""What Prometheus reads: counters and histograms of requests, and gauges of the engine's last
report, under vLLM's names as well.
"""

from collections import deque
from collections.abc import Callable, Iterable
from time import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.server.request_record import CLIENT_LEFT, RequestRecord

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_MOST_RECENT = 256

_GAUGES = {  # figure of a report: our name, vLLM's
    "running": ("headrace_sequences_running", "vllm:num_requests_running"),
    "waiting": ("headrace_sequences_waiting", "vllm:num_requests_waiting"),
    "occupancy": ("headrace_kv_occupancy_ratio", "vllm:kv_cache_usage_perc"),
    "blocks_total": ("headrace_kv_blocks", ""),
    "blocks_free": ("headrace_kv_blocks_free", ""),
    "kv_host_bytes": ("headrace_kv_host_bytes", ""),
    "tokens_per_second": ("headrace_tokens_per_second", ""),
}
_COUNTERS = {
    "tokens": ("headrace_generated_tokens", "vllm:generation_tokens"),
    "prompt_tokens": ("headrace_prompt_tokens", "vllm:prefix_cache_queries"),
    "cached_tokens": ("headrace_cached_prompt_tokens", "vllm:prefix_cache_hits"),
    "drafted": ("headrace_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
    "accepted": ("headrace_draft_tokens_accepted", "vllm:spec_decode_num_accepted_tokens"),
    "preemptions": ("headrace_preemptions", "vllm:num_preemptions"),
    "offloaded_blocks": ("headrace_kv_blocks_offloaded", ""),
    "restored_blocks": ("headrace_kv_blocks_restored", ""),
    "failed_steps": ("headrace_failed_steps", ""),
    "steps": ("headrace_steps", ""),
    "rows": ("headrace_step_rows", ""),
}


class Metrics:
    """The registry of one server. Labels are routes, codes and reasons: nothing that a client
    chooses.
    """

    def __init__(self, report: Callable[[], dict[str, float]], restarts: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._report = report
        self._restarts = restarts
        registry = self._registry
        self.requests = Counter(
            "headrace_requests", "Requests that ended, by reason.", ["reason"], registry=registry
        )
        self.errors = Counter(
            "headrace_error_responses",
            "Responses with an error's status, by its code.",
            ["code"],
            registry=registry,
        )
        self.first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "headrace_inter_token_seconds",
            "Between the tokens of a stream.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue = Histogram(
            "headrace_queue_seconds",
            "A request's wait for its first step.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.prefill = Histogram(
            "headrace_prefill_seconds",
            "From there to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.decode = Histogram(
            "headrace_decode_seconds", "From there to its end.", buckets=_SECONDS, registry=registry
        )
        self.recent_first_tokens: deque[tuple[float, float]] = deque(maxlen=_MOST_RECENT)
        """When the last first tokens came, in seconds since the epoch, and after how many seconds.
        """
        registry.register(self)

    def request_ended(self, record: RequestRecord) -> None:
        """Count what a client was told instead of an answer."""
        if record.error and 400 <= record.status != CLIENT_LEFT:
            self.errors.labels(record.error).inc()

    def first_token_came(self, seconds: float) -> None:
        """The first token of a request has come, so long after the request."""
        self.first_token.observe(seconds)
        self.recent_first_tokens.append((time(), seconds))

    def collect(self) -> Iterable[Metric]:
        """The engine's figures, as of its last report."""
        figures = self._report()
        for name, (ours, theirs) in _GAUGES.items():
            for metric in filter(None, (ours, theirs)):
                yield GaugeMetricFamily(
                    metric, f"`{name}` of the engine.", value=figures.get(name, 0.0)
                )
        for name, (ours, theirs) in _COUNTERS.items():
            for metric in filter(None, (ours, theirs)):
                yield CounterMetricFamily(
                    metric, f"`{name}` of the engine.", value=figures.get(name, 0.0)
                )
        yield CounterMetricFamily(
            "headrace_engine_restarts",
            "Times that the engine was started again.",
            value=self._restarts(),
        )

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)
