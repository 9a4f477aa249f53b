"""Requests during which replicas died: they continue at once after one death, run alone after two,
and are refused after three.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.remote import frames
from headrace.remote.errors import NotReadyError, RefusedError
from headrace.sampling_params import SamplingParams
from headrace.scaleout import fleet_quarantine
from headrace.scaleout.fleet_quarantine import FleetQuarantine

A, B, C = (frames.Add(prompt_token_ids=[token], params=SamplingParams()) for token in range(3))


def run(test: Callable[[FleetQuarantine], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(FleetQuarantine()), 10)

    asyncio.run(limited())


async def runs_now(quarantine: FleetQuarantine, request: frames.Add) -> bool:
    """Whether a request is admitted without a wait."""

    async def enter() -> None:
        async with quarantine.admit(request):
            pass

    entering = asyncio.ensure_future(enter())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    is_admitted = entering.done()
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    return is_admitted


def test_suspects_run_one_at_a_time_and_are_refused_after_three_deaths() -> None:
    async def test(quarantine: FleetQuarantine) -> None:
        for boot_id in ("1", "2"):
            assert await runs_now(quarantine, A) and await runs_now(quarantine, B)
            for request in (A, B):
                quarantine.replica_died(request, boot_id)
        async with quarantine.admit(A):
            assert not await runs_now(quarantine, B) and await runs_now(quarantine, C)
            quarantine.finished(A)
        assert await runs_now(quarantine, B)
        async with quarantine.admit(B):
            assert await runs_now(quarantine, A), "A has finished"
            quarantine.replica_died(B, "3")
        with pytest.raises(RefusedError, match="several engines ended"):
            async with quarantine.admit(B):
                pass

    run(test)


def test_wait_of_a_suspect_is_bounded() -> None:
    async def test(quarantine: FleetQuarantine) -> None:
        for request in (A, B):
            quarantine.replica_died(request, "1")
            quarantine.replica_died(request, "2")
        async with quarantine.admit(A):
            with pytest.raises(NotReadyError, match="had no turn before its timeout"):
                async with quarantine.admit(B, 0.01):
                    pass
        async with quarantine.admit(B, 0.01):
            pass

    run(test)


def test_death_of_one_replica_counts_once() -> None:
    async def test(quarantine: FleetQuarantine) -> None:
        for _ in range(5):
            quarantine.replica_died(A, "1")
        async with quarantine.admit(A):
            assert await runs_now(quarantine, A)

    run(test)


def test_progress_does_not_change_the_identity_of_a_request() -> None:
    continued = frames.Add(
        id="7", prompt_token_ids=[0], params=SamplingParams(), output_token_ids=[[5, 6]]
    )

    async def test(quarantine: FleetQuarantine) -> None:
        for boot_id in ("1", "2", "3"):
            quarantine.replica_died(continued, boot_id)
        with pytest.raises(RefusedError):
            async with quarantine.admit(A):
                pass

    run(test)


def test_deaths_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(fleet_quarantine, "monotonic", lambda: now[0])

    async def test(quarantine: FleetQuarantine) -> None:
        for boot_id in ("1", "2", "3"):
            quarantine.replica_died(A, boot_id)
            now[0] += 1
        now[0] = 601.5
        assert await runs_now(quarantine, A)
        assert len(quarantine._deaths) == 1
        now[0] = 700
        assert await runs_now(quarantine, A) and not quarantine._deaths

    run(test)
