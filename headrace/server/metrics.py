"""Prometheus metrics, also under vLLM's names."""

from collections import deque
from collections.abc import Callable, Iterable
from time import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.server.request_record import CLIENT_LEFT, RequestRecord

_SECONDS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
)

_MAX_RECENT = 256

# Figure of the engine's report: our name, vLLM's name or "".
_GAUGES = {
    "running": ("headrace_sequences_running", "vllm:num_requests_running"),
    "waiting": ("headrace_sequences_waiting", "vllm:num_requests_waiting"),
    "occupancy": ("headrace_kv_occupancy_ratio", "vllm:kv_cache_usage_perc"),
    "blocks_total": ("headrace_kv_blocks", ""),
    "blocks_free": ("headrace_kv_blocks_free", ""),
    "kv_host_bytes": ("headrace_kv_host_bytes", ""),
    "grammar_bytes": ("headrace_grammar_bytes", ""),
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
    """The metrics of one server. Clients cannot choose the value of any label."""

    def __init__(self, report: Callable[[], dict[str, float]], restarts: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._report = report
        self._restarts = restarts
        registry = self._registry
        self.requests = Counter(
            "headrace_requests", "Ended requests by reason.", ["reason"], registry=registry
        )
        self.errors = Counter(
            "headrace_error_responses",
            "Error responses by code.",
            ["code"],
            registry=registry,
        )
        self.first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "headrace_inter_token_seconds",
            "Seconds between two tokens of a sequence.",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue = Histogram(
            "headrace_queue_seconds",
            "Seconds that a request waits for its first step.",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.prefill = Histogram(
            "headrace_prefill_seconds",
            "Seconds from the first step of a request to its first token.",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.decode = Histogram(
            "headrace_decode_seconds",
            "Seconds from the first token of a request to its end.",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.recent_first_tokens: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)
        """Epoch seconds and time to first token in seconds, of the latest requests."""
        registry.register(self)

    def request_ended(self, record: RequestRecord) -> None:
        if record.error and 400 <= record.status != CLIENT_LEFT:
            self.errors.labels(record.error).inc()

    def observe_first_token(self, seconds: float) -> None:
        self.first_token.observe(seconds)
        self.recent_first_tokens.append((time(), seconds))

    def collect(self) -> Iterable[Metric]:
        figures = self._report()
        for name, (ours, theirs) in _GAUGES.items():
            for metric in filter(None, (ours, theirs)):
                yield GaugeMetricFamily(
                    metric, f"Figure `{name}` of the engine.", value=figures.get(name, 0.0)
                )
        for name, (ours, theirs) in _COUNTERS.items():
            for metric in filter(None, (ours, theirs)):
                yield CounterMetricFamily(
                    metric, f"Figure `{name}` of the engine.", value=figures.get(name, 0.0)
                )
        yield CounterMetricFamily(
            "headrace_engine_restarts",
            "Restarts of the engine.",
            value=self._restarts(),
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
