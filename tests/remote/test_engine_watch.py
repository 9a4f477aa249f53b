"""The watch over the heartbeat: an engine that stopped hangs, one on a busy machine does not."""

from itertools import count, repeat
from typing import Any

import pytest

from headrace.remote.heartbeat import Pulse
from headrace.remote.watch import EngineWatch

TICK = 0.25
STALL_SECONDS = 30


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("age", "step", "ticks", "state"),
    [
        (6, 0, repeat(7), "hangs"),
        (6, 0, count(7), "stalls"),
        (4, 0, repeat(7), "stalls"),
        (4, 0, count(7), "works"),
        (31, 0, count(7), "hangs"),
        (0.1, 31, count(7), "hangs"),
        (0.1, 29, repeat(7), "works"),
    ],
)
def test_heartbeat(age: float, step: float, ticks: Any, state: str) -> None:
    clock = Clock()
    watch = EngineWatch(STALL_SECONDS, clock)
    for _ in range(200):
        watch.judge(Pulse(0.1, 0), next(ticks), is_loading=False)
        clock.now += TICK
    since = clock.now
    while clock.now < since + 5:
        verdict = watch.judge(Pulse(age, step), next(ticks), is_loading=False)
        clock.now += TICK
    assert verdict.state == state


def test_load_counts_as_no_silence() -> None:
    """Nothing writes the heartbeat while the engine loads."""
    clock = Clock()
    watch = EngineWatch(STALL_SECONDS, clock)
    begun, states = clock.now, set()
    while clock.now < begun + 90:
        states.add(watch.judge(Pulse(clock.now - begun, 0), 5, is_loading=True).state)
        clock.now += TICK
    for _ in range(4):  # the page still has the time of its creation
        states.add(watch.judge(Pulse(clock.now - begun, 0), 5, is_loading=False).state)
        clock.now += TICK
    assert states == {"works"}
    while clock.now < begun + 100:
        verdict = watch.judge(Pulse(clock.now - begun, 0), 5, is_loading=False)
        clock.now += TICK
    assert verdict.state == "hangs" and verdict.seconds == pytest.approx(10, abs=TICK)


@pytest.mark.parametrize("step", [0.0, 400.0], ids=["between steps", "in a step"])
def test_pause_of_both_processes_is_no_hang(step: float) -> None:
    """A container or a machine that is paused: the clocks go on."""
    clock = Clock()
    watch = EngineWatch(STALL_SECONDS, clock)
    watch.judge(Pulse(0.1, 0), 5, is_loading=False)
    clock.now += 400
    assert watch.judge(Pulse(400, step), 5, is_loading=False).state == "works"
    clock.now += TICK
    assert watch.judge(Pulse(0.1, step), 6, is_loading=False).state == "works"


def test_load_that_never_ends_hangs() -> None:
    clock = Clock()
    watch = EngineWatch(STALL_SECONDS, clock)
    begun = clock.now
    while watch.judge(Pulse(clock.now - begun, 0), 5, is_loading=True).state == "works":
        clock.now += 1
    assert clock.now - begun == 1801
