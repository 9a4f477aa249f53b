"""Limits on suspect requests after an engine has ended."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from headrace.remote import frames, quarantine
from headrace.remote.errors import NotReadyError, RefusedError
from headrace.remote.quarantine import Quarantine
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams


def request(number: int) -> frames.Add:
    return frames.Add(prompt_token_ids=[number])


def requests(numbers: range) -> list[frames.Add]:
    return [request(number) for number in numbers]


def run(test: Callable[[Quarantine], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(Quarantine()), 60)

    asyncio.run(limited())


async def enters(quarantine: Quarantine, number: int) -> bool:
    """Whether a request may run now."""
    task = asyncio.ensure_future(quarantine.enter(request(number)))
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        await task
        return True
    task.cancel()
    return False


async def enter_each(quarantine: Quarantine, *numbers: int) -> list[bool]:
    return [await enters(quarantine, number) for number in numbers]


def test_suspect_that_ran_alone_is_refused() -> None:
    async def test(quarantine: Quarantine) -> None:
        assert await enter_each(quarantine, 0, 1, 2) == [True] * 3
        quarantine.engine_ended(requests(range(3)))
        assert await enter_each(quarantine, 0, 1, 7) == [True, False, True]
        quarantine.finished(request(0))  # which is no suspect now
        assert await enter_each(quarantine, 1, 0, 2) == [True, True, False]
        quarantine.engine_ended([request(1), request(7), request(0)])
        assert await enter_each(quarantine, 7, 0, 2) == [True] * 3
        with pytest.raises(RefusedError, match="twice during this request"):
            await enters(quarantine, 1)

    run(test)


def test_many_suspects_run_a_few_at_a_time_and_then_alone() -> None:
    async def test(quarantine: Quarantine) -> None:
        quarantine.engine_ended(requests(range(20)))
        assert await enter_each(quarantine, *range(10)) == [True] * 8 + [False] * 2
        quarantine.leave(request(3))
        assert await enter_each(quarantine, 3, 8) == [True, False]
        quarantine.engine_ended(requests(range(8)))
        assert await enter_each(quarantine, 5, 6, 9) == [True, False, False]
        quarantine.engine_ended([request(5)])
        assert await enter_each(quarantine, *range(9, 18)) == [True] * 8 + [False]
        assert not await enters(quarantine, 6)  # which must run alone

    run(test)


def test_waiting_suspect_runs_after_the_running_one_has_finished() -> None:
    async def test(quarantine: Quarantine) -> None:
        quarantine.engine_ended(requests(range(2)))
        assert await enters(quarantine, 0)
        waiting = asyncio.ensure_future(quarantine.enter(request(1)))
        await asyncio.sleep(0)
        assert not waiting.done()
        quarantine.finished(request(0))
        await waiting
        quarantine.leave(request(1))
        assert await enters(quarantine, 1)

    run(test)


def test_equal_requests_count_separately() -> None:
    async def test(quarantine: Quarantine) -> None:
        quarantine.engine_ended(requests(range(9)))
        assert await enter_each(quarantine, *[0] * 9) == [True] * 8 + [False]
        quarantine.leave(request(0))
        assert await enter_each(quarantine, 0, 0) == [True, False]

    run(test)


def test_suspicion_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(quarantine, "monotonic", lambda: now[0])

    async def test(quarantine: Quarantine) -> None:
        for _ in range(2):
            await quarantine.enter(request(0))
            quarantine.engine_ended([request(0)])
        now[0] = 604.0
        with pytest.raises(RefusedError):
            await quarantine.enter(request(0))
        now[0] = 606.0
        await quarantine.enter(request(0))

    run(test)


def test_wait_of_a_suspect_is_bounded() -> None:
    async def test(quarantine: Quarantine) -> None:
        quarantine.engine_ended(requests(range(2)))
        assert await enters(quarantine, 0)
        options = RequestOptions(timeout=0.01)
        late = msgspec.structs.replace(request(1), options=options)
        with pytest.raises(NotReadyError, match="had no turn before its timeout") as refused:
            await quarantine.enter(late)
        assert refused.value.state == "full"

    run(test)


def test_mark_of_a_frontend_is_the_identity() -> None:
    marked = msgspec.structs.replace(request(0), mark=quarantine.request_key(request(0)))
    seeded = msgspec.structs.replace(marked, params=SamplingParams(seed=5))
    assert quarantine.request_key(seeded) == quarantine.request_key(request(0))
    assert quarantine.request_key(request(1)) != quarantine.request_key(request(0))
