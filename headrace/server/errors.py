"""Errors in the shapes of OpenAI's and Anthropic's APIs.

OpenAI's clients retry 408, 409, 429 and 5xx unless a header forbids it. 500, 504 and the end of
an engine carry that header.
"""

import re
from dataclasses import fields
from typing import Any

from headrace.errors import HeadraceError
from headrace.messages import MessageError
from headrace.remote.errors import EngineDeadError, NotReadyError, RefusedError, TooSlowError
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams


class ApiError(Exception):
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
        """`param` names the wrong field; `kind` is the error's `type`."""
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
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


_ANTHROPIC_TYPES = {
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
    default_type = "invalid_request_error" if error.status < 500 else "api_error"
    error_type = _ANTHROPIC_TYPES.get(error.status, default_type)
    return {"type": "error", "error": {"type": error_type, "message": error.message}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Make the error of a malformed request (status 400)."""
    return ApiError(400, code, message, param=param)


def message_error(error: MessageError) -> ApiError:
    code = "unsupported_parameter" if error.is_unsupported else "invalid_value"
    return invalid(str(error), re.split(r"[.\[]", error.field)[0], code)


def prompt_too_long(
    num_tokens: int, max_tokens: int | None, max_model_len: int, param: str
) -> ApiError:
    """Make the error of a prompt and `max_tokens` that together exceed the context."""
    if max_tokens and num_tokens < max_model_len:
        # Claude Code and other clients read the numbers of Anthropic's message. LangChain takes
        # "prompt is too long" as advice to shorten the conversation, which helps only if
        # `max_tokens` alone fits.
        fits_alone = max_tokens < max_model_len
        advice = f"the prompt is too long for this {param}; shorten it or " if fits_alone else ""
        return invalid(
            f"input length and `max_tokens` exceed context limit: {num_tokens} + {max_tokens} > "
            f"{max_model_len}; this model's maximum context length is {max_model_len:,} tokens; "
            f"{advice}decrease {param}",
            param,
            "context_length_exceeded",
        )
    output = f"max_tokens is {max_tokens:,}" if max_tokens else "that leaves no space for an output"
    return context_exceeded(f"the prompt has {num_tokens:,}, and {output}", max_model_len, param)


def context_exceeded(reason: str, max_model_len: int, param: str) -> ApiError:
    """Make the error of a request that exceeds the context. Clients recognise its first words."""
    return invalid(
        f"the prompt is too long: this model's maximum context length is {max_model_len:,} tokens; "
        f"{reason}",
        param,
        "context_length_exceeded",
    )


def as_api_error(error: Exception) -> ApiError:
    """Convert any exception to an error response; internal errors reveal no details."""
    match error:
        case ApiError():
            return error
        case NotReadyError(state="closed"):
            return ApiError(
                503, "server_shutting_down", "the server is shutting down", retry_after=5
            )
        case NotReadyError(state="loading"):
            return ApiError(
                503, "model_loading", "the model is loading; try again later", retry_after=1
            )
        case NotReadyError(state="no_replica"):
            return ApiError(503, "no_replica", str(error), retry_after=5)
        case NotReadyError(state="full"):
            return ApiError(503, "server_overloaded", str(error), retry_after=1)
        case NotReadyError():
            return ApiError(
                503, "engine_dead", "the engine does not respond; try again later", retry_after=5
            )
        case EngineDeadError() | RefusedError(kind="closed"):
            return ApiError(503, "engine_dead", "the engine ended during this request")
        case RefusedError(kind="rank_lost"):
            return ApiError(503, "rank_lost", str(error), retry_after=60)
        case TooSlowError():
            return ApiError(408, "client_too_slow", str(error))
        case RefusedError(kind="not_finite"):
            return ApiError(500, "not_finite", str(error))
        case RefusedError(kind="quarantined"):
            return ApiError(500, "request_quarantined", str(error))
        case RefusedError(kind="request"):
            return request_error(str(error))
        case MessageError():
            return message_error(error)
        case HeadraceError() if error.exit_code == 2:
            return request_error(str(error))
        case HeadraceError() if error.exit_code == 3:  # the chat template failed
            return invalid(str(error), "messages")
    return ApiError(500, "internal_error", "the request failed because of an internal error")


_FIRST_WORD = re.compile(r"[a-z][a-z_]*")
# A field of a request: `tools[0].type must be function`, `regex cannot be compiled`.
_FIELD = re.compile(r"([a-z][a-z_]*)(?:[\[.:]| (?:must|has|is|names|needs|cannot|repeats)\b)")
_PARAMETERS = {
    *(field.name for record in (SamplingParams, RequestOptions) for field in fields(record)),
    "prompt_token_ids",
}


def request_error(message: str) -> ApiError:
    word, field = _FIRST_WORD.match(message), _FIELD.match(message)
    if word and word[0] in _PARAMETERS:
        return invalid(message, word[0])
    return invalid(message, field[1] if field else None)
