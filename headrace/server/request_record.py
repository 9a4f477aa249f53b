"""Facts of a request, without any of its text, for the log, metrics and tracing."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from time import time
from uuid import uuid4

from headrace.remote.errors import EngineError
from headrace.remote.stream import Stream
from headrace.server.errors import as_api_error
from headrace.server.stopwatch import Stopwatch, engine_parts

_log = logging.getLogger("headrace.requests")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_UNLOGGED_PREFIXES = (
    "/health",
    "/metrics",
    "/stats",
    "/page",
    "/v1/models",
    "/version",
    "/openapi.json",
    "/worker/status",
)

PARTS = ("tokenise", "queue", "prefill", "decode", "detokenise", "network")
"""Parts of the time of a request, which sum to it."""
CLIENT_LEFT = 499
"""Status of a request whose client disconnected before the response, as in nginx."""


@dataclass(kw_only=True)
class RequestRecord:
    """Facts of one request, in seconds. The field names are keys of the JSON log."""

    id: str
    """The request's `x-request-id`, or a random one; the response repeats it."""
    method: str
    path: str
    traceparent: str = ""
    """Parent span, in the format of W3C Trace Context."""
    begun: float = field(default_factory=time)
    """Arrival, in seconds since the epoch."""
    seconds: float = 0.0
    status: int = CLIENT_LEFT
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    # Parts of the time; the engine's are 0 if the client left. Of several prompts the one that
    # took longest counts.
    tokenise: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    detokenise: float = 0.0
    network: float = 0.0
    error: str = ""

    @classmethod
    def of(cls, method: str, path: str, headers: Mapping[str, str]) -> "RequestRecord":
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid4().hex
        traceparent = headers.get("traceparent", "")
        return cls(id=request_id, method=method, path=path, traceparent=traceparent)

    def add_stream(self, stream: Stream) -> None:
        self.output_tokens += stream.output_tokens
        self.finish_reasons += stream.finish_reasons
        if isinstance(stream.error, EngineError):
            self.error = self.error or as_api_error(stream.error).code
        elif stream.error:
            self.error = self.error or stream.error.kind
        if ended := stream.ended:
            self.cached_tokens += ended.cached_tokens
            parts = engine_parts(ended)
            if sum(parts.values()) > self.engine_seconds:
                self.queue, self.prefill, self.decode, self.detokenise = parts.values()

    @property
    def engine_seconds(self) -> float:
        return self.queue + self.prefill + self.decode + self.detokenise

    @property
    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in PARTS}

    def end(self, stopwatch: Stopwatch) -> None:
        self.seconds, self.tokenise = stopwatch.seconds, stopwatch.tokenise
        if self.engine_seconds:
            self.network = max(0.0, self.seconds - self.tokenise - self.engine_seconds)


Observer = Callable[[RequestRecord], None]


def log_request(record: RequestRecord) -> None:
    """Log one line about a request; quoting keeps the path from forging lines."""
    failed = record.status >= 400 or record.error
    if not failed and (record.path == "/" or record.path.startswith(_UNLOGGED_PREFIXES)):
        return
    line = f"{record.method} {json.dumps(record.path)} {record.status} {record.seconds:.3f} s"
    if record.model:
        line += f", {json.dumps(record.model)}"
    if record.prompt_tokens:
        line += (
            f", {record.prompt_tokens} prompt tokens ({record.cached_tokens} cached), "
            f"{record.output_tokens} output tokens"
        )
    if record.error:
        line += f", {record.error}"
    line += f", id {record.id}"
    _log.info("%s", line, extra={"request": record})


class JsonFormatter(logging.Formatter):
    """Formats log lines as JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
        }
        request = getattr(record, "request", None)
        if isinstance(request, RequestRecord):
            values = {item.name: getattr(request, item.name) for item in fields(request)}
            line |= {name: value for name, value in values.items() if value not in ("", [])}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
