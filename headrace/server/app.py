"""The HTTP routes: one table for dispatch and OpenAPI. A new route is a handler `async def
name(http, state)` and a row in `ROUTES`.
"""

from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec

from headrace.remote.errors import NotReadyError
from headrace.server import (
    adapters,
    anthropic_records,
    chat,
    completions,
    embeddings,
    health,
    messages,
    responses,
    responses_records,
    sessions,
    stats_routes,
    tokens,
    web_page,
    worker,
)
from headrace.server import openai_records as records
from headrace.server.asgi_app import AsgiApp
from headrace.server.http_exchange import Handler, HttpExchange
from headrace.server.request_record import Observer
from headrace.server.settings import Settings
from headrace.server.state import ServerState

_StatelessHandler = Callable[[HttpExchange, object], Awaitable[None]]


class Route(NamedTuple):
    method: str
    handler: Callable[[HttpExchange, ServerState], Awaitable[None]]
    """The first line of its docstring is the route's summary in OpenAPI."""
    record: type[msgspec.Struct] | None = None
    """Type of the JSON body; None if the route takes none."""


async def openapi(http: HttpExchange, state: object) -> None:
    await http.respond(openapi_document())


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
    "/v1/sessions": Route("POST", sessions.create, records.SessionRequest),
    "/v1/sessions/extend": Route("POST", sessions.extend, records.SessionExtendRequest),
    "/v1/sessions/fork": Route("POST", sessions.fork, records.SessionForkRequest),
    "/v1/sessions/rollback": Route("POST", sessions.rollback, records.SessionRollbackRequest),
    "/v1/sessions/sample": Route("POST", sessions.sample, records.SessionSampleRequest),
    "/v1/sessions/score": Route("POST", sessions.score, records.SessionScoreRequest),
    "/v1/sessions/close": Route("POST", sessions.close_node, records.SessionNodeRequest),
    "/v1/load_lora_adapter": Route("POST", adapters.load_adapter, records.LoadAdapterRequest),
    "/v1/unload_lora_adapter": Route("POST", adapters.unload_adapter, records.UnloadAdapterRequest),
    "/tokenize": Route("POST", tokens.tokenize, records.TokenizeRequest),
    "/detokenize": Route("POST", tokens.detokenize, records.DetokenizeRequest),
    "/tokenizer_info": Route("GET", tokens.tokenizer_info),
    "/stats": Route("GET", stats_routes.stats),
    "/stats/stream": Route("GET", stats_routes.stats_stream),
    "/stats/blocks": Route("GET", stats_routes.blocks),
    **{path: Route("GET", web_page.page_file) for path in web_page.FILES},
}
WORKER_ROUTES = {
    "/worker/generate": Route("POST", worker.generate),
    "/worker/status": Route("GET", worker.status),
}
"""Routes for a worker's frontend, absent from OpenAPI."""
_WHILE_LOADING: dict[str, _StatelessHandler] = {
    "/health": health.not_ready_while_loading,
    "/health/live": health.live_while_loading,
    "/health/ready": health.not_ready_while_loading,
    "/version": health.server_version,
    "/openapi.json": openapi,
    **dict.fromkeys(web_page.FILES, web_page.page_file),
}
_PREFIX_ROUTES = {
    "/v1/models/": Route("GET", health.model),
    "/v1/sessions/": Route("DELETE", sessions.delete),
}
"""Routes whose paths end in a name."""
_NAMES = {"/v1/models/": "model", "/v1/sessions/": "session"}
"""Names of these names in OpenAPI."""


def make_app(state: ServerState, observers: Iterable[Observer] = ()) -> AsgiApp:
    table = ROUTES | (WORKER_ROUTES if state.settings.worker else {})

    def handler(route: Route) -> Handler:
        return lambda http: route.handler(http, state)

    return AsgiApp(
        {path: {route.method: handler(route)} for path, route in table.items()},
        {path: {route.method: handler(route)} for path, route in _PREFIX_ROUTES.items()},
        state.settings,
        (state.metrics.request_ended, *observers),
    )


def make_loading_app(settings: Settings, observers: Iterable[Observer] = ()) -> AsgiApp:
    """Make the app for the time until the model is loaded: most routes respond with 503."""

    def handler(path: str) -> Handler:
        return lambda http: _WHILE_LOADING.get(path, _not_loaded)(http, None)

    table = ROUTES | (WORKER_ROUTES if settings.worker else {})
    return AsgiApp(
        {path: {route.method: handler(path)} for path, route in table.items()},
        {path: {route.method: handler(path)} for path, route in _PREFIX_ROUTES.items()},
        settings,
        observers,
    )


async def _not_loaded(http: HttpExchange, state: object) -> None:
    raise NotReadyError("loading", "")


def openapi_document() -> dict[str, Any]:
    record_types = [route.record for route in ROUTES.values() if route.record]
    _, schemas = msgspec.json.schema_components(
        record_types, ref_template="#/components/schemas/{name}"
    )
    paths = {
        path: {route.method.lower(): _operation(path, route)} for path, route in ROUTES.items()
    }
    for prefix, route in _PREFIX_ROUTES.items():
        name = _NAMES[prefix]
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation = {"parameters": [parameter]} | _operation(prefix, route)
        paths[f"{prefix}{{{name}}}"] = {route.method.lower(): operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version("headrace")},
        "paths": paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, route: Route) -> dict[str, Any]:
    error_schema = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    reference = {"$ref": f"#/components/schemas/{error_schema}"}
    error = {
        "description": "Error.",
        "content": {"application/json": {"schema": reference}},
    }
    operation: dict[str, Any] = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "responses": {"200": {"description": "Success."}, "4XX": error, "5XX": error},
    }
    if route.record:
        schema = {"$ref": f"#/components/schemas/{route.record.__name__}"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


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
