from datetime import UTC, datetime
from importlib.metadata import version

from headrace.server.http_exchange import HttpExchange
from headrace.server.state import ServerState

_ANTHROPIC_HEADER = "anthropic-version"
"""Clients of Anthropic's API send it; they get models in its shape."""


async def live(http: HttpExchange, state: ServerState) -> None:
    """Liveness: 503 if the process must be restarted because its engine cannot be."""
    dead = state.engine.state == "dead"
    await http.respond({"status": "dead" if dead else "live"}, 503 if dead else 200)


async def live_while_loading(http: HttpExchange, state: object) -> None:
    await http.respond({"status": "live"})


async def not_ready_while_loading(http: HttpExchange, state: object) -> None:
    body = {"status": "loading", "restarts": 0, "version": version("headrace")}
    await http.respond(body, 503, {"retry-after": "1"})


async def ready(http: HttpExchange, state: ServerState) -> None:
    """Readiness: 200 if the engine is alive, the queue has space and the server is not draining."""
    engine, figures = state.engine, state.engine.report.figures
    status: str = "draining" if state.draining else engine.state
    if status == "ready" and state.num_sequences >= state.max_sequences:
        status = "overloaded"
    body = {
        "status": status,
        "running": int(figures.get("running", 0)),
        "waiting": int(figures.get("waiting", 0)),
        "kv_used": figures.get("occupancy", 0.0),
        "step_seconds": engine.step_seconds,
        "steps": int(figures.get("steps", 0)),
        "restarts": engine.restarts,
        "version": version("headrace"),
    }
    if status == "ready":
        await http.respond(body)
    else:
        await http.respond(body, 503, {"retry-after": "1"})


async def server_version(http: HttpExchange, state: object) -> None:
    """Version of Headrace."""
    await http.respond({"version": version("headrace")})


async def metrics(http: HttpExchange, state: ServerState) -> None:
    """Metrics in Prometheus's text format."""
    await http.respond_bytes(state.metrics.text(), "text/plain; version=1.0.0; charset=utf-8")


async def models(http: HttpExchange, state: ServerState) -> None:
    """The model and its adapters, each of which a request can name as its model."""
    names = [state.settings.model_name, *state.engine.adapters]
    data = [_model(http, state, name) for name in names]
    if http.header(_ANTHROPIC_HEADER):
        page = {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        await http.respond(page)
    else:
        await http.respond({"object": "list", "data": data})


async def model(http: HttpExchange, state: ServerState) -> None:
    """One model or adapter."""
    name = http.path.removeprefix("/v1/models/")
    state.resolve_adapter(name)
    await http.respond(_model(http, state, name))


def _model(http: HttpExchange, state: ServerState, name: str) -> dict[str, object]:
    base_name = state.settings.model_name
    if http.header(_ANTHROPIC_HEADER):
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(state.started, UTC).isoformat(),
            "lifecycle": "active",
            "max_tokens": state.prompt_reader.max_model_len,
            "max_input_tokens": state.prompt_reader.max_model_len,
        }
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "headrace",
        "root": base_name,
        "parent": None if name == base_name else base_name,
        "max_model_len": state.prompt_reader.max_model_len,
    }
