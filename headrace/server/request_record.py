"""What became of a request, without any of its text: for the log, and for spans."""

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

_log = logging.getLogger("headrace.requests")
_GIVEN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_QUIET = (
    "/health",
    "/metrics",
    "/stats",
    "/page",
    "/v1/models",
    "/version",
    "/openapi.json",
    "/worker/status",
)
"""Beginnings of the routes that are asked again and again, and of which nothing is said if they are
well.
"""


CLIENT_LEFT = 499
"""The status of a request whose client has left before there was one, as nginx has it."""


@dataclass(kw_only=True)
class RequestRecord:
    """A request, from its arrival to its end. Times are seconds."""

    id: str
    """Its own `x-request-id`, or one that was made up; it is sent back in that header."""
    method: str
    path: str
    traceparent: str = ""
    """Of the span that it belongs to, as W3C's Trace Context has it."""
    begun: float = field(default_factory=time)
    """Since the epoch."""
    seconds: float = 0.0
    status: int = CLIENT_LEFT
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    """Of the prompt that took longest, if there are several."""
    error: str = ""
    """The code of an error that came after the status, or instead of the answer."""

    @classmethod
    def of(cls, method: str, path: str, headers: Mapping[str, str]) -> "RequestRecord":
        """The record of a request that has just come."""
        given = headers.get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else uuid4().hex
        return cls(
            id=request_id, method=method, path=path, traceparent=headers.get("traceparent", "")
        )

    def add_stream(self, stream: Stream) -> None:
        """Add the tokens, times and error of one engine request, up to now."""
        self.output_tokens += stream.output_tokens
        self.finish_reasons += stream.finish_reasons
        if isinstance(stream.error, EngineError):
            self.error = self.error or as_api_error(stream.error).code
        elif stream.error:
            self.error = self.error or stream.error.kind
        if ended := stream.ended:
            self.cached_tokens += ended.cached_tokens
            times = [(one.queue, one.prefill, one.decode) for one in (self, ended)]
            self.queue, self.prefill, self.decode = max(times, key=sum)


Observer = Callable[[RequestRecord], None]
"""Called at the end of every request."""


def log_request(record: RequestRecord) -> None:
    """Write a line on a request; what its client chose is quoted, so that it can be no line of its
    own.
    """
    if (
        record.status < 400
        and not record.error
        and (record.path == "/" or record.path.startswith(_QUIET))
    ):
        return
    said = f"{record.method} {json.dumps(record.path)} {record.status} {record.seconds:.3f} s"
    if record.prompt_tokens:
        said += (
            f", {record.prompt_tokens} prompt tokens ({record.cached_tokens} cached), "
            f"{record.output_tokens} output tokens"
        )
    if record.error:
        said += f", {record.error}"
    _log.info("%s", said, extra={"request": record})


class JsonFormatter(logging.Formatter):
    """A line of the log as an object of JSON; what is said of a request has its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
        }
        request = getattr(record, "request", None)
        if isinstance(request, RequestRecord):
            line |= {
                one.name: value
                for one in fields(request)
                if (value := getattr(request, one.name)) not in ("", [])
            }
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
