"""The client's watch over the heartbeat: it kills a stopped engine, not one on a busy machine."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.remote import client as engine_client
from headrace.remote.client import EngineClient
from headrace.remote.heartbeat import Pulse


class Pulses:
    """A heartbeat with given readings; cancels the watch after the last."""

    def __init__(self, pulses: Iterator[Pulse]) -> None:
        self._pulses = pulses

    def read(self) -> Pulse:
        pulse = next(self._pulses, None)
        if pulse is None:
            raise asyncio.CancelledError
        return pulse


@pytest.mark.parametrize(
    ("pulse", "ticks", "state"),
    [
        (Pulse(6, 0), repeat(7), "killed"),
        (Pulse(6, 0), count(7), "stalled"),
        (Pulse(4, 0), repeat(7), "stalled"),
        (Pulse(4, 0), count(7), "ready"),
        (Pulse(31, 0), count(7), "killed"),
        (Pulse(0.1, 31), count(7), "killed"),
        (Pulse(0.1, 29), repeat(7), "ready"),
    ],
)
def test_heartbeat_watch(
    monkeypatch: pytest.MonkeyPatch, pulse: Pulse, ticks: Iterator[int], state: str
) -> None:
    monkeypatch.setattr(engine_client, "_WATCH_SECONDS", 0)
    monkeypatch.setattr(engine_client, "cpu_ticks", lambda pid: next(ticks))
    killed: list[str] = []

    async def watch() -> str:
        client: Any = EngineClient("model", EngineConfig(), {}, stall_seconds=30)
        client.state = "ready"
        client._process = SimpleNamespace(
            pid=1, send_signal=lambda number: None, kill=lambda: killed.append("killed")
        )
        with suppress(asyncio.CancelledError):  # after the last reading
            await client._watch(Pulses(chain([Pulse(0.1, 0)], repeat(pulse, 20))))
        return str(client.state)

    assert [asyncio.run(watch()), *killed][-1] == state


@pytest.mark.parametrize("seed", [0, 7, None])
def test_a_restarted_engine_has_another_base_seed(seed: int | None) -> None:
    client: Any = EngineClient("model", EngineConfig(seed=seed), {}, stall_seconds=30)
    seeds = []
    for client.restarts in range(3):
        seeds.append(client._seeded_config().seed)
    if seed is None:
        assert seeds == [None] * 3  # the engine draws one
    else:
        assert seeds[0] == seed and len(set(seeds)) == 3
