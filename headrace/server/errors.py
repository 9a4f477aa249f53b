"""Errors of the server in the shape of OpenAI's and Anthropic's APIs.

The status of an error decides what clients do: those of OpenAI send 408, 409, 429 and all from 500
on again, unless a header says no. So 500, 504 and the end of an engine have that header: a request
that breaks something must not come three times.
"""

import re
from typing import Any

from headrace.errors import HeadraceError
from headrace.remote.errors import EngineDeadError, NotReadyError, RefusedError, TooSlowError


class ApiError(Exception):
    """What a client is told: status, and the fields of an OpenAI error."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        kind: str = "",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)
        if status in (500, 504) or (status == 503 and retry_after is None):
            self.headers["x-should-retry"] = "false"
        if status == 401:
            self.headers["www-authenticate"] = 'Basic realm="headrace"'

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """An error in the shape of Anthropic's API."""
    kind = _ANTHROPIC.get(
        error.status, "invalid_request_error" if error.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that cannot be served as written."""
    return ApiError(400, code, message, param=param)


def prompt_too_long(tokens: int, max_tokens: int | None, context: int, param: str) -> ApiError:
    """A prompt that, with the answer that is asked for, does not fit in the context."""
    more = (
        f", and the answer may have {max_tokens:,}"
        if max_tokens
        else ", which leaves no place for an answer"
    )
    return context_exceeded(f"the prompt has {tokens:,}{more}", context, param)


def context_exceeded(what: str, context: int, param: str) -> ApiError:
    """What does not fit in the context. Clients that shorten a conversation then, or change the
    model, know it by the first words alone.
    """
    message = (
        f"the prompt is too long: this model's maximum context length is {context:,} tokens; {what}"
    )
    return invalid(message, param, "context_length_exceeded")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error. Of one that is our own fault it hears nothing but that."""
    match error:
        case ApiError():
            return error
        case NotReadyError(state="closed"):
            return ApiError(
                503, "server_shutting_down", "the server is shutting down", retry_after=5
            )
        case NotReadyError(state="loading"):
            return ApiError(503, "model_loading", "the model is being loaded", retry_after=1)
        case NotReadyError(state="no_replica"):
            return ApiError(503, "no_replica", str(error), retry_after=5)
        case NotReadyError():
            return ApiError(503, "engine_dead", "the engine does not answer", retry_after=5)
        case EngineDeadError():
            return ApiError(503, "engine_dead", "the engine ended while it served this request")
        case TooSlowError():
            return ApiError(408, "client_too_slow", str(error))
        case RefusedError(kind="not_finite"):
            return ApiError(500, "not_finite", str(error))
        case RefusedError(kind="closed"):
            return ApiError(503, "engine_dead", "the engine ended while it served this request")
        case RefusedError(kind="quarantined"):
            return ApiError(500, "request_quarantined", str(error))
        case RefusedError(kind="request"):
            return request_error(str(error))
        case HeadraceError() if error.exit_code == 2:
            return request_error(str(error))
        case HeadraceError() if error.exit_code == 3:  # of a template that does what it must not
            return invalid(str(error), "messages")
    return ApiError(500, "internal_error", "the server failed at this request")


_FIELD = re.compile(r"([a-z][a-z_]*)(?:[\[.:]| (?:must|has|is|names|needs|cannot|repeats)\b)")


def request_error(message: str, param: str | None = None) -> ApiError:
    """A RequestError. Its message begins with the name of the field that is wrong, where it
    is one.
    """
    named = _FIELD.match(message)
    return invalid(message, param or (named[1] if named else None))
