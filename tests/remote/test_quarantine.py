"""Which requests may be under way together after an engine has ended under them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.remote import frames, quarantine
from headrace.remote.errors import RefusedError
from headrace.remote.quarantine import Quarantine


def asked(number: int) -> frames.Add:
    return frames.Add(prompt_token_ids=[number])


def in_loop(test: Callable[[Quarantine], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(asyncio.wait_for(_run(test), 60))


async def _run(test: Callable[[Quarantine], Coroutine[Any, Any, None]]) -> None:
    await test(Quarantine())


async def enters(kept: Quarantine, number: int) -> bool:
    """Whether a request may pass now."""
    task = asyncio.ensure_future(kept.enter(asked(number)))
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        await task
        return True
    task.cancel()
    return False


async def the_one_that_was_alone_is_refused(kept: Quarantine) -> None:
    assert [await enters(kept, i) for i in range(3)] == [True] * 3
    kept.engine_ended([asked(i) for i in range(3)])
    assert [await enters(kept, i) for i in (0, 1, 7)] == [True, False, True]
    kept.ended_well(asked(0))
    assert [await enters(kept, i) for i in (1, 0, 2)] == [
        True,
        True,
        False,
    ]  # 0 is no suspect any more
    kept.engine_ended([asked(1), asked(7), asked(0)])
    assert [await enters(kept, i) for i in (7, 0, 2)] == [True] * 3
    with pytest.raises(RefusedError, match="twice under this request"):
        await enters(kept, 1)


async def many_are_tried_a_few_at_a_time_and_then_one(kept: Quarantine) -> None:
    kept.engine_ended([asked(i) for i in range(20)])
    assert [await enters(kept, i) for i in range(10)] == [True] * 8 + [False] * 2
    kept.left(asked(3))
    assert [await enters(kept, i) for i in (3, 8)] == [True, False]
    kept.engine_ended([asked(i) for i in range(8)])
    assert [await enters(kept, i) for i in (5, 6, 9)] == [True, False, False]
    kept.engine_ended([asked(5)])
    assert [await enters(kept, i) for i in range(9, 18)] == [True] * 8 + [False]
    assert not await enters(kept, 6)  # it would have to be alone


async def one_that_waits_passes_in_its_turn(kept: Quarantine) -> None:
    kept.engine_ended([asked(i) for i in range(2)])
    assert await enters(kept, 0)
    waiting = asyncio.ensure_future(kept.enter(asked(1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    kept.ended_well(asked(0))
    await waiting
    kept.left(asked(1))
    assert await enters(kept, 1)


async def the_same_request_counts_each_time(kept: Quarantine) -> None:
    kept.engine_ended([asked(i) for i in range(9)])
    assert [await enters(kept, 0) for _ in range(9)] == [True] * 8 + [False]
    kept.left(asked(0))
    assert [await enters(kept, 0) for _ in range(2)] == [True, False]


test_the_one_that_was_alone_is_refused = in_loop(the_one_that_was_alone_is_refused)
test_many_are_tried_a_few_at_a_time_and_then_one = in_loop(
    many_are_tried_a_few_at_a_time_and_then_one
)
test_one_that_waits_passes_in_its_turn = in_loop(one_that_waits_passes_in_its_turn)
test_the_same_request_counts_each_time = in_loop(the_same_request_counts_each_time)


def test_what_was_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(quarantine, "monotonic", lambda: now[0])

    async def test(kept: Quarantine) -> None:
        for _ in range(2):
            await kept.enter(asked(0))
            kept.engine_ended([asked(0)])
        now[0] = 604.0
        with pytest.raises(RefusedError):
            await kept.enter(asked(0))
        now[0] = 606.0
        await kept.enter(asked(0))

    in_loop(test)()
