"""Health, as load balancers and orchestrators ask for it, and what the server is."""

from importlib.metadata import version

from headrace.server.asgi import Call
from headrace.server.service import Service


async def live(service: Service, call: Call) -> None:
    """Whether this process answers and has, or is about to have, an engine; else it should be started again."""
    dead = service.engine.state == "dead"
    await call.respond({"status": "dead" if dead else "live"}, 503 if dead else 200)


async def ready(service: Service, call: Call) -> None:
    """Whether requests are taken now: the engine has a pulse, the queue has room, and the server is not about to end."""
    engine, figures = service.engine, service.engine.report.figures
    state: str = "draining" if service.draining else engine.state
    if state == "ready" and service.under_way >= service.most_sequences:
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
    await call.respond(body, 200 if state == "ready" else 503, {} if state == "ready" else {"retry-after": "1"})


async def server_version(service: Service, call: Call) -> None:
    """The version of Headrace."""
    await call.respond({"version": version("headrace")})


async def metrics(service: Service, call: Call) -> None:
    """Prometheus's page."""
    await call.respond_bytes(service.metrics.text(), "text/plain; version=1.0.0; charset=utf-8")


async def models(service: Service, call: Call) -> None:
    """The model, and the adapters that can be named in its place."""
    await call.respond({"object": "list", "data": [_model(service, name) for name in _names(service)]})


async def one_model(service: Service, call: Call) -> None:
    """One of them."""
    name = call.scope["path"].removeprefix("/v1/models/")
    service.adapter_of(name)
    await call.respond(_model(service, name))


def _names(service: Service) -> list[str]:
    return [service.settings.model_name, *service.engine.adapters]


def _model(service: Service, name: str) -> dict[str, object]:
    own = service.settings.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "headrace",
        "root": own,
        "parent": None if name == own else own,
        "max_model_len": service.prompts.max_model_len,
    }
