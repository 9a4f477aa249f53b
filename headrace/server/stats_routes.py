"""Engine statistics for the web page."""

import asyncio
from collections.abc import AsyncGenerator
from importlib.metadata import version
from statistics import mean
from time import time
from typing import Any

import msgspec

from headrace.planner.money import per_million
from headrace.server.errors import ApiError
from headrace.server.http_exchange import HttpExchange, sse_event
from headrace.server.request_record import PARTS
from headrace.server.state import ServerState
from headrace.stats import ratio

_EVENT_SECONDS = 0.5
_RECENT_SECONDS = 120.0
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


def _mean_parts(state: ServerState, now: float) -> dict[str, float]:
    """Mean parts of the latest requests, in seconds; empty without one."""
    recent = [parts for when, parts in state.metrics.recent_parts if when > now - _RECENT_SECONDS]
    return {name: mean(parts[name] for parts in recent) for name in (PARTS if recent else ())}


def _memory(state: ServerState) -> dict[str, float]:
    """Bytes by what they hold; they sum to the memory that was available before the start."""
    info, figures = state.engine.info, state.engine.report.figures
    if info is None or not info.memory:
        return {}
    held = figures.get("kv_bytes_used", 0.0)
    cached = info.kv_bytes * ratio(
        figures.get("blocks_cached", 0.0), figures.get("blocks_total", 0.0)
    )
    parts = {
        "weights": info.weight_bytes,
        "KV held": held,
        "KV cached": cached,
        "KV free": info.kv_bytes - held - cached,
        "runtime": info.runtime,
    }
    return parts | {"rest": max(0.0, info.memory - sum(parts.values()))}


def _steps(state: ServerState) -> dict[str, Any]:
    """Use of the machine by the last seconds' steps, and their price, by kind."""
    price, found = state.settings.price, dict[str, Any]()
    for kind, use in state.watch.uses(state.engine.report.figures).items():
        dollars = None
        if price is not None and use.tokens:
            dollars = per_million(price, use.seconds, use.tokens)
        found[kind] = use.facts() | {"dollars_per_million": dollars}
    return found


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
            if when > now - _RECENT_SECONDS
        ],
        "latency": _mean_parts(state, now),
        "memory": _memory(state),
        "steps": _steps(state),
        "roofline": {
            "limits": roofline.limits(),
            "standing": roofline.last_step(report.figures),
        },
    }
