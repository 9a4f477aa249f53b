"""OpenTelemetry spans of requests, with child spans for queue, prefill and decode.

Names follow OpenTelemetry's conventions for generative AI, then vLLM's.
"""

from typing import TYPE_CHECKING

from headrace.errors import RequestError
from headrace.server.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


def otlp_exporter(endpoint: str) -> "SpanExporter":
    """Make an exporter over HTTP. Raises RequestError if a package is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise RequestError(
            f"otlp_endpoint needs the package {error.name}; pip install 'headrace[otel]'"
        ) from None
    return OTLPSpanExporter(endpoint=endpoint)


class Tracer:
    """Makes spans from request records. A thread exports them, so no request waits."""

    def __init__(self, exporter: "SpanExporter", model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "headrace", "gen_ai.request.model": model})
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headrace")
        self._context = TraceContextTextMapPropagator()

    def __call__(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        if not record.prompt_tokens:
            return
        attributes: dict[str, str | int | float | list[str]] = {
            "http.request.method": record.method,
            "http.route": record.path,
            "http.response.status_code": record.status,
            "gen_ai.response.model": record.model,
            "gen_ai.response.id": record.id,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.latency.time_in_queue": record.queue,
            "gen_ai.latency.time_to_first_token": record.queue + record.prefill,
            "gen_ai.latency.e2e": record.seconds,
        }
        attributes |= {f"headrace.latency.{part}": value for part, value in record.parts.items()}
        context = self._context.extract({"traceparent": record.traceparent})
        start, end = _nanoseconds(record.begun), _nanoseconds(record.begun + record.seconds)
        span = self._tracer.start_span(
            "llm_request", context, SpanKind.SERVER, attributes, start_time=start
        )
        if record.error or record.status >= 500:
            span.set_status(StatusCode.ERROR, record.error)

        # The time before the queue is spent on reading the prompt. Text is made between the steps.
        phases = {
            "queue": record.queue,
            "prefill": record.prefill,
            "decode": record.decode + record.detokenise,
        }
        phase_start = end - _nanoseconds(sum(phases.values()))
        for name, seconds in phases.items():
            phase_end = phase_start + _nanoseconds(seconds)
            phase = self._tracer.start_span(name, set_span_in_context(span), start_time=phase_start)
            phase.end(phase_end)
            phase_start = phase_end
        span.end(end)

    def close(self) -> None:
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
