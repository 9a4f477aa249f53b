"""What the page shows of the engine: its last report as JSON, the same twice a second as events,
and its map of KV blocks.
"""

import asyncio
from collections.abc import AsyncGenerator
from importlib.metadata import version
from time import time
from typing import Any

import msgspec

from headrace.server.asgi import Call, event
from headrace.server.errors import ApiError
from headrace.server.served_model import ServedModel

_PERIOD = 0.5
"""Seconds between two events."""
_SPAN = 120.0
"""Seconds for which a first token is told of."""
_MOST_WATCHERS = 32
"""Streams at a time."""


async def stats(served: ServedModel, call: Call) -> None:
    """The engine's last report, what it said of itself at its start, times to first tokens, and
    where its last step stands.
    """
    await call.respond(_stats(served))


async def stats_stream(served: ServedModel, call: Call) -> None:
    """The same as events, twice a second, until the client leaves or the server ends. The engine is
    not asked for any of them.
    """
    if served.watchers >= _MOST_WATCHERS:
        raise ApiError(
            503,
            "server_overloaded",
            "too many pages are open already",
            kind="server_error",
            retry_after=10,
        )
    served.watchers += 1
    try:
        await call.stream(_events(served), served.settings.keepalive_seconds)
    finally:
        served.watchers -= 1


async def blocks(served: ServedModel, call: Call) -> None:
    """Which request holds which blocks of KV, as the engine says between two steps; blocks as runs:
    first, number, first, number, ...
    """
    block_map = await call.while_connected(served.engine.block_map())
    await call.respond({"block_size": block_map.block_size, "groups": block_map.groups})


async def _events(served: ServedModel) -> AsyncGenerator[bytes]:
    while not served.draining:
        yield event(_stats(served))
        await asyncio.sleep(_PERIOD)


def _stats(served: ServedModel) -> dict[str, Any]:
    engine = served.engine
    report, roofline, now = engine.report, served.roofline, time()
    return {
        "time": now,
        "status": "draining" if served.draining else engine.state,
        "model": served.settings.model_name,
        "version": version("headrace"),
        "started": served.started,
        "restarts": engine.restarts,
        "advised_sampling": served.advised_sampling,
        "engine": msgspec.structs.asdict(engine.hello) if engine.hello else None,
        "figures": report.figures,
        "adapters": report.adapters,
        "drafts": {
            name: {"steps": s, "proposed": p, "accepted": a}
            for name, (s, p, a) in report.drafts.items()
        },
        "first_tokens": [
            (round(at, 2), round(after, 4))
            for at, after in served.metrics.recent_first_tokens
            if at > now - _SPAN
        ],
        "roofline": {"limits": roofline.limits(), "standing": roofline.standing(report.figures)},
    }
