"""What the API process makes of the engine's pulse: one that is stopped is ended, one that hardly gets to run is not."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.server import engine_client
from headrace.server.engine_client import EngineClient
from headrace.server.heartbeat import Pulse


class Pulses:
    def __init__(self, pulses: Iterator[Pulse]) -> None:
        self._pulses = pulses

    def read(self) -> Pulse:
        found = next(self._pulses, None)
        if found is None:
            raise asyncio.CancelledError
        return found


@pytest.mark.parametrize(
    ("pulse", "ticks", "is_killed"),
    [
        (Pulse(6, 0), repeat(7), True),
        (Pulse(6, 0), count(7), False),
        (Pulse(4, 0), repeat(7), False),
        (Pulse(31, 0), count(7), True),
        (Pulse(0.1, 31), count(7), True),
        (Pulse(0.1, 29), repeat(7), False),
    ],
)
def test_watch(monkeypatch: pytest.MonkeyPatch, pulse: Pulse, ticks: Iterator[int], is_killed: bool) -> None:
    monkeypatch.setattr(engine_client, "_WATCH", 0)
    monkeypatch.setattr(engine_client, "cpu_ticks", lambda pid: next(ticks))
    killed: list[bool] = []

    async def kill() -> None:
        killed.append(True)

    async def watch() -> None:
        client: Any = EngineClient("model", EngineConfig(), {}, stall_seconds=30)
        client.state, client._process, client._kill = "ready", SimpleNamespace(pid=1), kill
        with suppress(asyncio.CancelledError):  # at the last pulse
            await client._watch(Pulses(chain([Pulse(0.1, 0)], repeat(pulse, 20))))

    asyncio.run(watch())
    assert bool(killed) == is_killed
