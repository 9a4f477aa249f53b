"""Health, as load balancers and orchestrators ask for it, and what the server is."""

from importlib.metadata import version

from headrace.server.asgi import Call
from headrace.server.served_model import ServedModel


async def live(served: ServedModel, call: Call) -> None:
    """Whether this process answers and has, or is about to have, an engine; else it should be
    started again.
    """
    dead = served.engine.state == "dead"
    await call.respond({"status": "dead" if dead else "live"}, 503 if dead else 200)


async def ready(served: ServedModel, call: Call) -> None:
    """Whether requests are taken now: the engine has a pulse, the queue has room, and the server is
    not about to end.
    """
    engine, figures = served.engine, served.engine.report.figures
    state: str = "draining" if served.draining else engine.state
    if state == "ready" and served.under_way >= served.most_sequences:
        state = "overloaded"
    body = {
        "status": state,
        "running": int(figures.get("running", 0)),
        "waiting": int(figures.get("waiting", 0)),
        "kv_used": figures.get("occupancy", 0.0),
        "step_seconds": engine.step_seconds,
        "steps": int(figures.get("steps", 0)),
        "restarts": engine.restarts,
        "version": version("headrace"),
    }
    await call.respond(
        body, 200 if state == "ready" else 503, {} if state == "ready" else {"retry-after": "1"}
    )


async def server_version(served: ServedModel, call: Call) -> None:
    """The version of Headrace."""
    await call.respond({"version": version("headrace")})


async def metrics(served: ServedModel, call: Call) -> None:
    """Prometheus's page."""
    await call.respond_bytes(served.metrics.text(), "text/plain; version=1.0.0; charset=utf-8")


async def models(served: ServedModel, call: Call) -> None:
    """The model, and the adapters that can be named in its place."""
    await call.respond(
        {"object": "list", "data": [_model(served, name) for name in _names(served)]}
    )


async def one_model(served: ServedModel, call: Call) -> None:
    """One of them."""
    name = call.scope["path"].removeprefix("/v1/models/")
    served.adapter_of(name)
    await call.respond(_model(served, name))


def _names(served: ServedModel) -> list[str]:
    return [served.settings.model_name, *served.engine.adapters]


def _model(served: ServedModel, name: str) -> dict[str, object]:
    own = served.settings.model_name
    return {
        "id": name,
        "object": "model",
        "created": served.started,
        "owned_by": "headrace",
        "root": own,
        "parent": None if name == own else own,
        "max_model_len": served.prompts.max_model_len,
    }
