"""Quarantine: after two deaths a request runs alone among suspects, after three it is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from headrace.remote import frames
from headrace.remote.errors import NotReadyError, RefusedError
from headrace.remote.quarantine import request_key

_MEMORY_SECONDS = 600.0
_DEATHS_ALONE = 2
_DEATHS_REFUSED = 3


class FleetQuarantine:
    def __init__(self) -> None:
        self._deaths: dict[bytes, dict[str, float]] = {}
        """Expiry time by boot id of the dead replica, on the system's monotonic clock."""
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def admit(self, request: frames.Add, seconds: float | None = None) -> AsyncIterator[None]:
        """Wait until a request may run.

        Raises RefusedError after too many deaths, NotReadyError after `seconds`.
        """
        if self._num_deaths(request) < _DEATHS_ALONE:
            yield
            return
        try:
            async with asyncio.timeout(seconds):
                await self._alone.acquire()
        except TimeoutError:
            raise NotReadyError(
                "full",
                "requests that may have ended engines run one at a time, and this one had no turn "
                "before its timeout; send it again later",
            ) from None
        try:
            if self._num_deaths(request) >= _DEATHS_REFUSED:
                raise RefusedError(
                    "quarantined",
                    "several engines ended during this request; send it again in 10 minutes",
                )
            yield
        finally:
            self._alone.release()

    def replica_died(self, request: frames.Add, boot_id: str) -> None:
        expiry = monotonic() + _MEMORY_SECONDS
        self._deaths.setdefault(request_key(request), {})[boot_id] = expiry

    def finished(self, request: frames.Add) -> None:
        if self._deaths:
            self._deaths.pop(request_key(request), None)

    def _num_deaths(self, request: frames.Add) -> int:
        if not self._deaths:
            return 0
        now = monotonic()
        kept = {
            key: {boot_id: expiry for boot_id, expiry in deaths.items() if expiry > now}
            for key, deaths in self._deaths.items()
        }
        self._deaths = {key: deaths for key, deaths in kept.items() if deaths}
        return len(self._deaths.get(request_key(request), ()))
