"""Requests under which replicas died: at once after one death, one at a time after two, not at all
after a third.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.sampling_params import SamplingParams
from headrace.scaleout import suspects
from headrace.scaleout.suspects import Suspects

A, B, C = (frames.Add(prompt_token_ids=[token], params=SamplingParams()) for token in range(3))


def within(work: Callable[[Suspects], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(Suspects()), 10))  # type: ignore[arg-type]


async def passes(suspects: Suspects, asked: frames.Add) -> bool:
    """Whether a request may pass now."""

    async def enter() -> None:
        async with suspects.turn(asked):
            pass

    entering = asyncio.ensure_future(enter())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    has_passed = entering.done()
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    return has_passed


def test_one_at_a_time() -> None:
    async def work(suspects: Suspects) -> None:
        for boot_id in ("1", "2"):
            assert await passes(suspects, A) and await passes(suspects, B)
            for asked in (A, B):
                suspects.died_under(asked, boot_id)
        async with suspects.turn(A):
            assert not await passes(suspects, B) and await passes(suspects, C)
            suspects.ended_well(A)
        assert await passes(suspects, B)
        async with suspects.turn(B):
            assert await passes(suspects, A), "it has ended well since"
            suspects.died_under(B, "3")
        with pytest.raises(RefusedError, match="again and again"):
            async with suspects.turn(B):
                pass

    within(work)


def test_the_death_of_one_replica_counts_once() -> None:
    async def work(suspects: Suspects) -> None:
        for _ in range(5):
            suspects.died_under(A, "1")
        async with suspects.turn(A):
            assert await passes(suspects, A)

    within(work)


def test_it_is_the_same_request_however_far_it_is() -> None:
    async def work(suspects: Suspects) -> None:
        for boot_id in ("1", "2", "3"):
            suspects.died_under(
                frames.Add(
                    id="7", prompt_token_ids=[0], params=SamplingParams(), output_token_ids=[[5, 6]]
                ),
                boot_id,
            )
        with pytest.raises(RefusedError):
            async with suspects.turn(A):
                pass

    within(work)


def test_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(suspects, "monotonic", lambda: now[0])

    async def work(suspects: Suspects) -> None:
        for boot_id in ("1", "2", "3"):
            suspects.died_under(A, boot_id)
            now[0] += 1
        now[0] = 601.5
        assert await passes(suspects, A)
        assert len(suspects._boot_ids) == 1
        now[0] = 700
        assert await passes(suspects, A) and not suspects._boot_ids

    within(work)
