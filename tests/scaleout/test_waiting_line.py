"""Requests that wait for a replica."""

import asyncio

import pytest

from headrace.errors import NoReplicaError, ReplicasFullError
from headrace.scaleout.waiting_line import WaitingLines


async def wait_in(
    lines: WaitingLines, adapter: str | None, priority: int, number: int, done: list[int]
) -> None:
    with lines.waiting(adapter, priority, number) as place:
        await lines.turn(adapter, place, 10, None)
        done.append(number)


def test_priority_and_then_arrival() -> None:
    """One change of the replicas lets all through that are accepted."""

    async def test() -> None:
        lines, done = WaitingLines(), list[int]()
        tasks = [
            asyncio.ensure_future(wait_in(lines, None, priority, number, done))
            for number, priority in enumerate([0, 0, 5, -1])
        ]
        tasks.append(asyncio.ensure_future(wait_in(lines, "a", 9, 4, done)))
        await asyncio.sleep(0)
        assert lines.has_line(None) and lines.has_line("a") and not done
        lines.wake()
        await asyncio.gather(*tasks)
        assert done.index(4) < 2, "an adapter has its own line"
        assert [number for number in done if number != 4] == [3, 0, 1, 2]
        assert lines.is_empty

    asyncio.run(test())


def test_only_the_first_tries_and_a_later_one_may_pass() -> None:
    async def test() -> None:
        lines, done = WaitingLines(), list[int]()
        with lines.waiting(None, 0, 1) as place:
            later = asyncio.ensure_future(wait_in(lines, None, 0, 2, done))
            await asyncio.sleep(0)
            for _ in range(3):
                lines.wake()
                await lines.turn(None, place, 10, None)
                await asyncio.sleep(0)
            assert not done
            urgent = asyncio.ensure_future(wait_in(lines, None, -1, 3, done))
            await asyncio.sleep(0)
            lines.wake()
            await urgent
            assert done == [3]
        await later
        assert done == [3, 2]

    asyncio.run(test())


def test_reason_of_a_wait_that_was_too_long() -> None:
    async def test() -> None:
        lines = WaitingLines()
        with lines.waiting(None, 0, 1) as first, lines.waiting(None, 0, 2) as second:
            full = ReplicasFullError("all are full")
            with pytest.raises(ReplicasFullError, match="all are full"):
                await lines.turn(None, first, 0.01, full)
            lines.wake()
            for seconds in (0.01, 0, -1):
                with pytest.raises(NoReplicaError, match="all are full"):
                    await lines.turn(None, second, seconds, None)

    asyncio.run(test())
