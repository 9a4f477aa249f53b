"""Prometheus metrics: each measurement under our name and under vLLM's.

Ours have the labels `model_name` and `version`, vLLM's `model_name` and `engine`. The names of
vLLM are those of its dashboards and autoscalers. Clients cannot choose the value of any label.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from time import time
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.planner.money import per_million
from headrace.remote.engine import RemoteEngine
from headrace.remote.stream import Stream
from headrace.server.request_record import CLIENT_LEFT, RequestRecord
from headrace.server.step_watch import StepWatch
from headrace.stats import STEP_KINDS

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960),
)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_MAX_RECENT = 256


class _Name(NamedTuple):
    ours: str
    theirs: tuple[str, ...]
    text: str


# By figure of the engine's report.
_GAUGES = {
    "running": _Name(
        "headrace_sequences_running", ("vllm:num_requests_running",), "Sequences with KV."
    ),
    "waiting": _Name(
        "headrace_sequences_waiting",
        ("vllm:num_requests_waiting",),
        "Sequences that wait for their first step, or that were preempted.",
    ),
    "occupancy": _Name(
        "headrace_kv_occupancy_ratio",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "Share of the KV memory that sequences hold, from 0 to 1.",
    ),
    "blocks_total": _Name("headrace_kv_blocks", (), "KV blocks."),
    "blocks_free": _Name(
        "headrace_kv_blocks_free", (), "KV blocks that no sequence holds, cached ones included."
    ),
    "kept_paths": _Name("headrace_kept_paths", (), "Paths of sessions whose KV is kept."),
    "kept_blocks": _Name("headrace_kv_blocks_kept", (), "KV blocks of these paths."),
    "kv_host_bytes": _Name(
        "headrace_kv_host_bytes", (), "Bytes of host memory in use for offloaded KV."
    ),
    "kv_disk_bytes": _Name(
        "headrace_kv_disk_bytes", (), "Bytes of kv_cache_dir, for all models and processes."
    ),
    "grammar_bytes": _Name(
        "headrace_grammar_bytes", (), "Estimated bytes of grammar states of structured outputs."
    ),
    "adapter_bytes": _Name("headrace_adapter_bytes", (), "Bytes of the loaded adapters."),
    "tokens_per_second": _Name(
        "headrace_tokens_per_second", (), "Output tokens per second, in the last few seconds."
    ),
    "step_seconds": _Name("headrace_step_seconds", (), "Duration of the last step in seconds."),
}
_COUNTERS = {
    "tokens": _Name("headrace_generated_tokens", ("vllm:generation_tokens",), "Output tokens."),
    "prompt_tokens": _Name(
        "headrace_prompt_tokens",
        ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
        "Prompt tokens of admitted requests, cached ones included.",
    ),
    "cached_tokens": _Name(
        "headrace_cached_prompt_tokens",
        ("vllm:prefix_cache_hits",),
        "Prompt tokens whose KV came from the prefix cache.",
    ),
    "draft_steps": _Name(
        "headrace_draft_steps", ("vllm:spec_decode_num_drafts",), "Drafts in steps."
    ),
    "drafted": _Name(
        "headrace_draft_tokens", ("vllm:spec_decode_num_draft_tokens",), "Draft tokens in steps."
    ),
    "accepted": _Name(
        "headrace_draft_tokens_accepted",
        ("vllm:spec_decode_num_accepted_tokens",),
        "Accepted draft tokens.",
    ),
    "preemptions": _Name(
        "headrace_preemptions",
        ("vllm:num_preemptions",),
        "Sequences that lost their KV to others, and were computed again.",
    ),
    "offloaded_blocks": _Name(
        "headrace_kv_blocks_offloaded", (), "KV blocks copied to host memory."
    ),
    "restored_blocks": _Name(
        "headrace_kv_blocks_restored", (), "KV blocks copied back from host memory."
    ),
    "disk_saved_blocks": _Name(
        "headrace_kv_disk_blocks_saved", (), "KV blocks written to kv_cache_dir."
    ),
    "disk_loaded_blocks": _Name(
        "headrace_kv_disk_blocks_loaded", (), "KV blocks read from kv_cache_dir."
    ),
    "disk_dropped_blocks": _Name(
        "headrace_kv_disk_blocks_dropped",
        (),
        "KV blocks that left memory before they were written.",
    ),
    "failed_steps": _Name(
        "headrace_failed_steps",
        (),
        "Steps that failed; the engine recomputed their requests, or ended one with an error.",
    ),
    "learning.tokens": _Name(
        "headrace_draft_learning_tokens", (), "Output tokens that `learn_drafts` may learn from."
    ),
    "learning.swaps": _Name("headrace_draft_swaps", (), "New weights of the learning drafter."),
    "learning.rollbacks": _Name(
        "headrace_draft_rollbacks", (), "Times that a drafter got its earlier weights again."
    ),
    "steps": _Name("headrace_steps", (), "Steps of the engine."),
    "rows": _Name("headrace_step_rows", (), "Rows (tokens) of all steps."),
}
_HISTOGRAMS = {
    "first_token": _Name(
        "headrace_time_to_first_token_seconds",
        ("vllm:time_to_first_token_seconds",),
        "Seconds from the arrival of a request to its first token.",
    ),
    "between_tokens": _Name(
        "headrace_inter_token_seconds",
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "Seconds between two tokens of a sequence.",
    ),
    "per_token": _Name(
        "headrace_seconds_per_output_token",
        ("vllm:request_time_per_output_token_seconds",),
        "Mean seconds of a request between two tokens.",
    ),
    "latency": _Name(
        "headrace_request_seconds",
        ("vllm:e2e_request_latency_seconds",),
        "Seconds from the arrival of a request to its end.",
    ),
    "queue": _Name(
        "headrace_queue_seconds",
        ("vllm:request_queue_time_seconds",),
        "Seconds that a request waits for its first step.",
    ),
    "prefill": _Name(
        "headrace_prefill_seconds",
        ("vllm:request_prefill_time_seconds",),
        "Seconds of the steps of a request until its first token.",
    ),
    "decode": _Name(
        "headrace_decode_seconds",
        ("vllm:request_decode_time_seconds",),
        "Seconds of the steps of a request after its first token.",
    ),
    "detokenise": _Name(
        "headrace_detokenise_seconds",
        (),
        "Seconds of a request after the results of its steps: tokens and text of all requests.",
    ),
    "tokenise": _Name(
        "headrace_tokenise_seconds",
        (),
        "Seconds from the body of a request to its queue: JSON, template, tokens.",
    ),
    "network": _Name(
        "headrace_network_seconds",
        (),
        "Other seconds of a request at this server: its body, its response, and other requests.",
    ),
    "inference": _Name(
        "headrace_inference_seconds",
        ("vllm:request_inference_time_seconds",),
        "Seconds from the first step of a request to its end.",
    ),
    "request_prompt": _Name(
        "headrace_request_prompt_tokens",
        ("vllm:request_prompt_tokens",),
        "Prompt tokens of a request.",
    ),
    "request_output": _Name(
        "headrace_request_output_tokens",
        ("vllm:request_generation_tokens",),
        "Output tokens of a request.",
    ),
    "longest_output": _Name(
        "headrace_request_longest_output_tokens",
        ("vllm:request_max_num_generation_tokens",),
        "Tokens of the longest output of a request.",
    ),
    "max_tokens": _Name(
        "headrace_request_max_tokens",
        ("vllm:request_params_max_tokens",),
        "The field `max_tokens` of requests that set it.",
    ),
    "num_outputs": _Name(
        "headrace_request_outputs", ("vllm:request_params_n",), "Outputs (`n`) of a request."
    ),
}
_SHARES = ("mbu", "mfu")
_STEP_GAUGES = {
    "seconds": _Name("headrace_mean_step_seconds", (), "Mean seconds of the last steps."),
    "predicted": _Name(
        "headrace_predicted_step_seconds", (), "Seconds that the planner predicts for these steps."
    ),
    "mbu": _Name(
        "headrace_mbu_ratio", (), "Share of the bandwidth that the last steps needed, by roof."
    ),
    "mfu": _Name(
        "headrace_mfu_ratio", (), "Share of the arithmetic that the last steps needed, by roof."
    ),
    "dollars": _Name(
        "headrace_dollars_per_million_tokens",
        (),
        "Price of the last steps for a million tokens of a prompt, or of an output.",
    ),
}
_TOKEN_HISTOGRAMS = (
    *("request_prompt", "request_output", "longest_output"),
    *("max_tokens", "num_outputs"),
)
_ENDED = _Name(
    "headrace_requests", (), "Ended requests: completed, aborted by the client, or failed."
)
_FINISHED = _Name(
    "headrace_sequences_finished", ("vllm:request_success",), "Ended sequences by reason."
)
_ERRORS = _Name("headrace_error_responses", (), "Error responses by code.")


class Metrics:
    """The metrics of one server."""

    def __init__(
        self,
        engine: RemoteEngine,
        model_name: str,
        watch: StepWatch | None = None,
        price: float | None = None,
    ) -> None:
        """`price` is that of the machine, in dollars per hour."""
        self._engine = engine
        self._watch = watch
        self._price = price
        self._ours = {"model_name": model_name, "version": version("headrace")}
        self._theirs = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._histograms = {
            name: Histogram(
                name, "", buckets=_TOKENS if name in _TOKEN_HISTOGRAMS else _SECONDS, registry=None
            )
            for name in _HISTOGRAMS
        }
        self._ended = Counter("ended", "", ["reason"], registry=None)
        self._finished = Counter("finished", "", ["finished_reason"], registry=None)
        self._errors = Counter("errors", "", ["code"], registry=None)
        for reason in ("completed", "aborted", "error"):
            self._ended.labels(reason)
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(reason)
        self.recent_first_tokens: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)
        """Epoch seconds and time to first token in seconds, of the latest requests."""
        self.recent_parts: deque[tuple[float, dict[str, float]]] = deque(maxlen=_MAX_RECENT)
        """Epoch seconds of the end, and parts in seconds, of the latest requests."""

    def request_ended(self, record: RequestRecord) -> None:
        if record.engine_seconds:
            self._observe("tokenise", record.tokenise)
            self._observe("network", record.network)
            self.recent_parts.append((time(), record.parts))
        if record.error and 400 <= record.status != CLIENT_LEFT:
            self._errors.labels(record.error).inc()

    def observe_first_token(self, seconds: float) -> None:
        self._observe("first_token", seconds)
        self.recent_first_tokens.append((time(), seconds))

    def observe_tokens(self, seconds: float, count: int) -> None:
        """Count tokens that arrived together, `seconds` after the last ones of their sequence."""
        for _ in range(count):
            self._observe("between_tokens", seconds / count)

    def stream_ended(self, stream: Stream, seconds: float) -> None:
        """Count a request to the engine that took `seconds`."""
        ended, num_tokens, by_output = stream.ended, stream.output_tokens, stream.tokens_by_output
        if ended is None or ended.error:
            reason = "error" if stream.error else "abort"
            self._ended.labels("error" if stream.error else "aborted").inc()
            self._finished.labels(reason).inc()
            return
        self._ended.labels("completed").inc()
        for reason in stream.finish_reasons or ["stop"]:
            self._finished.labels(reason).inc()
        self._observe("latency", seconds)
        self._observe("queue", ended.queue)
        self._observe("prefill", ended.prefill)
        self._observe("decode", ended.decode)
        self._observe("detokenise", ended.detokenise)
        self._observe("inference", ended.prefill + ended.decode + ended.detokenise)
        self._observe("request_prompt", ended.prompt_tokens)
        self._observe("request_output", num_tokens)
        self._observe("longest_output", max(by_output.values(), default=0))
        params = stream.request.params if stream.request else None
        if params:
            self._observe("num_outputs", params.n)
        if params and params.max_tokens is not None:
            self._observe("max_tokens", params.max_tokens)
        per_sequence = num_tokens / max(1, len(stream.finish_reasons))
        if per_sequence > 1:
            seconds = ended.decode + ended.detokenise
            self._observe("per_token", seconds / (per_sequence - 1))

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def collect(self) -> Iterable[Metric]:
        report = self._engine.report
        figures = {"draft_steps": sum(counts[0] for counts in report.drafts.values())}
        figures |= report.figures
        for figure, name in _GAUGES.items():
            for metric, labels in self._names(name):
                gauge = GaugeMetricFamily(metric, name.text, labels=list(labels))
                gauge.add_metric(list(labels.values()), figures.get(figure, 0.0))
                yield gauge
        for figure, name in _COUNTERS.items():
            for metric, labels in self._names(name):
                counter = CounterMetricFamily(metric, name.text, labels=list(labels))
                counter.add_metric(list(labels.values()), figures.get(figure, 0.0))
                yield counter
        for key, name in _HISTOGRAMS.items():
            yield from self._renamed(self._histograms[key], name, "histogram")
        for counts, name in (
            (self._ended, _ENDED),
            (self._finished, _FINISHED),
            (self._errors, _ERRORS),
        ):
            yield from self._renamed(counts, name, "counter")
        restarts = CounterMetricFamily(
            "headrace_engine_restarts", "Restarts of the engine.", labels=list(self._ours)
        )
        restarts.add_metric(list(self._ours.values()), self._engine.restarts)
        yield restarts
        yield from self._step_uses(report.figures)
        yield from self._cache_config()

    def _step_uses(self, figures: Mapping[str, float]) -> Iterator[Metric]:
        """The use of the machine by the last seconds' steps; 0 without a step."""
        uses = self._watch.uses(figures) if self._watch else {}
        labels = [*self._ours, "steps"]
        gauges = {
            key: GaugeMetricFamily(
                name.ours, name.text, labels=[*labels, *(["roof"] if key in _SHARES else [])]
            )
            for key, name in _STEP_GAUGES.items()
        }
        for kind in STEP_KINDS:
            use, values = uses.get(kind), [*self._ours.values(), kind.removesuffix("_steps")]
            gauges["seconds"].add_metric(values, use.seconds if use else 0.0)
            if use is None:
                continue
            if use.predicted:
                gauges["predicted"].add_metric(values, use.predicted)
            if self._price is not None and use.tokens:
                cost = per_million(self._price, use.seconds, use.tokens)
                gauges["dollars"].add_metric(values, cost)
            for key in _SHARES:
                for roof, share in getattr(use, key).items():
                    gauges[key].add_metric([*values, roof], share)
        yield from gauges.values()

    def _names(self, name: _Name) -> Iterator[tuple[str, Mapping[str, str]]]:
        yield name.ours, self._ours
        for theirs in name.theirs:
            yield theirs, self._theirs

    def _renamed(self, source: Counter | Histogram, name: _Name, kind: str) -> Iterator[Metric]:
        (collected,) = source.collect()
        for metric_name, labels in self._names(name):
            metric = Metric(metric_name, name.text, kind)
            for sample in collected.samples:
                suffix = sample.name.removeprefix(collected.name)
                if suffix != "_created":
                    metric.add_sample(
                        metric_name + suffix, {**sample.labels, **labels}, sample.value
                    )
            yield metric

    def _cache_config(self) -> Iterator[Metric]:
        info = self._engine.info
        if info is None:
            return
        labels = {
            **self._theirs,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.kv_tokens // info.block_size),
            "cache_dtype": info.kv_dtype,
            "enable_prefix_caching": "True",
        }
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache.", labels=list(labels)
        )
        config.add_metric(list(labels.values()), 1.0)
        yield config

    def text(self) -> bytes:
        return generate_latest(self._registry)
