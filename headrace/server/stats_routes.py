"""Engine statistics for the web page."""

import asyncio
from collections.abc import AsyncGenerator
from importlib.metadata import version
from time import time
from typing import Any

import msgspec

from headrace.server.errors import ApiError
from headrace.server.http_exchange import HttpExchange, sse_event
from headrace.server.state import ServerState

_EVENT_SECONDS = 0.5
_FIRST_TOKEN_SECONDS = 120.0
"""Seconds."""
_MAX_STREAMS = 32


async def stats(http: HttpExchange, state: ServerState) -> None:
    """Engine statistics: latest report, configuration, times to first token, roofline."""
    await http.respond(_stats(state))


async def stats_stream(http: HttpExchange, state: ServerState) -> None:
    """The statistics of `/stats` as a stream of events, two per second."""
    if state.num_stats_streams >= _MAX_STREAMS:
        raise ApiError(
            503,
            "server_overloaded",
            f"{_MAX_STREAMS} streams of statistics are already open; close a page",
            kind="server_error",
            retry_after=10,
        )
    state.num_stats_streams += 1
    try:
        await http.stream_events(_events(state), state.settings.keepalive_seconds)
    finally:
        state.num_stats_streams -= 1


async def blocks(http: HttpExchange, state: ServerState) -> None:
    """KV blocks of each request; runs of blocks are listed as first block, number of blocks."""
    block_map = await http.while_connected(state.engine.block_map())
    await http.respond({"block_size": block_map.block_size, "groups": block_map.groups})


async def _events(state: ServerState) -> AsyncGenerator[bytes]:
    while not state.draining:
        yield sse_event(_stats(state))
        await asyncio.sleep(_EVENT_SECONDS)


def _stats(state: ServerState) -> dict[str, Any]:
    engine, now = state.engine, time()
    report, roofline = engine.report, state.roofline
    return {
        "time": now,
        "status": "draining" if state.draining else engine.state,
        "model": state.settings.model_name,
        "version": version("headrace"),
        "started": state.started,
        "restarts": engine.restarts,
        "advised_sampling": state.advised_sampling,
        "engine": msgspec.structs.asdict(engine.info) if engine.info else None,
        "figures": report.figures,
        "adapters": report.adapters,
        "drafts": {
            name: {"steps": steps, "proposed": proposed, "accepted": accepted}
            for name, (steps, proposed, accepted) in report.drafts.items()
        },
        "first_tokens": [
            (round(when, 2), round(seconds, 4))
            for when, seconds in state.metrics.recent_first_tokens
            if when > now - _FIRST_TOKEN_SECONDS
        ],
        "roofline": {
            "limits": roofline.limits(),
            "standing": roofline.last_step(report.figures),
        },
    }
