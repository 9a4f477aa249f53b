"""The routes of the server: the one list of them, which the gate and the OpenAPI page read."""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec

from headrace.server import (
    adapters,
    anthropic_records,
    chat,
    completions,
    embeddings,
    health,
    messages,
    page,
    responses,
    responses_records,
    stats_page,
    tokens,
    worker,
)
from headrace.server import openai_records as records
from headrace.server.asgi import Call
from headrace.server.gate import Gate
from headrace.server.request_record import Observer
from headrace.server.served_model import ServedModel


class Route(NamedTuple):
    """What is done at a path."""

    method: str
    handler: Callable[[ServedModel, Call], Awaitable[None]]
    record: type[msgspec.Struct] | None = None
    """What the body is read as."""


async def openapi(served: ServedModel, call: Call) -> None:
    """The description of all routes and their fields, made of the records that read them."""
    await call.respond(description())


ROUTES = {
    "/health": Route("GET", health.ready),
    "/health/live": Route("GET", health.live),
    "/health/ready": Route("GET", health.ready),
    "/version": Route("GET", health.server_version),
    "/metrics": Route("GET", health.metrics),
    "/openapi.json": Route("GET", openapi),
    "/v1/models": Route("GET", health.models),
    "/v1/chat/completions": Route("POST", chat.chat_completions, records.ChatRequest),
    "/v1/completions": Route("POST", completions.completions, records.CompletionRequest),
    "/v1/messages": Route("POST", messages.messages, anthropic_records.MessagesRequest),
    "/v1/messages/count_tokens": Route(
        "POST", messages.count_tokens, anthropic_records.CountTokensRequest
    ),
    "/v1/responses": Route("POST", responses.responses, responses_records.ResponsesRequest),
    "/v1/embeddings": Route("POST", embeddings.embeddings, records.EmbeddingRequest),
    "/v1/load_lora_adapter": Route("POST", adapters.load_adapter, records.LoadAdapterRequest),
    "/v1/unload_lora_adapter": Route("POST", adapters.unload_adapter, records.UnloadAdapterRequest),
    "/tokenize": Route("POST", tokens.tokenize, records.TokenizeRequest),
    "/detokenize": Route("POST", tokens.detokenize, records.DetokenizeRequest),
    "/tokenizer_info": Route("GET", tokens.tokenizer_info),
    "/stats": Route("GET", stats_page.stats),
    "/stats/stream": Route("GET", stats_page.stats_stream),
    "/stats/blocks": Route("GET", stats_page.blocks),
    **{path: Route("GET", page.file) for path in page.FILES},
}
WORKER_ROUTES = {
    "/worker/generate": Route("POST", worker.generate),
    "/worker/status": Route("GET", worker.status),
}
"""Those that a worker has as well, for its frontend alone: they are not described."""
_ONE_MODEL = "/v1/models/"


def make_app(served: ServedModel, observers: Iterable[Observer] = ()) -> Gate:
    """The ASGI application; `observers` hear of every request at its end."""
    listed = ROUTES | (WORKER_ROUTES if served.settings.worker else {})
    routes = {
        path: {route.method: partial(route.handler, served)} for path, route in listed.items()
    }
    return Gate(
        routes,
        {_ONE_MODEL: partial(health.one_model, served)},
        served.settings,
        (served.metrics.request_ended, *observers),
    )


def description() -> dict[str, Any]:
    """The OpenAPI document of the server."""
    kinds = [route.record for route in ROUTES.values() if route.record]
    _, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for path, route in ROUTES.items():
        error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        operation: dict[str, Any] = {
            "summary": (route.handler.__doc__ or "").split("\n")[0],
            "responses": _responses(error),
        }
        if route.record:
            reference = {"$ref": f"#/components/schemas/{route.record.__name__}"}
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
        paths[path] = {route.method.lower(): operation}
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths[_ONE_MODEL + "{model}"] = {
        "get": {"summary": "One of them.", "parameters": [model], "responses": _responses("Error")}
    }
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version("headrace")},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": keys,
        },
        "security": [{}, {"key": []}],
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def _responses(error: str) -> dict[str, Any]:
    """What may be answered; `error`: the schema of its errors."""
    failed = {
        "description": "An error.",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}},
    }
    return {"200": {"description": "The answer."}, "4XX": failed, "5XX": failed}
