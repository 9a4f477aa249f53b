"""Requests under which replicas died. That of one may be chance, and the request goes on elsewhere
at once; after the second death they are tried one at a time, and the one under which a replica dies
then is refused, so that it does not end the whole fleet.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from headrace.remote import frames
from headrace.remote.errors import RefusedError
from headrace.remote.quarantine import request_key

_SECONDS = 600.0
"""For how long a request is remembered."""
_SUSPECT, _REFUSED = 2, 3
"""Replicas that died under a request when it is tried alone, and when it is refused."""


class Suspects:
    """What is remembered of replicas that died. A request is known by what it asks for, whichever
    client sends it again.
    """

    def __init__(self) -> None:
        self._boot_ids: dict[bytes, dict[str, float]] = {}
        """Of the replicas that died under a request, each with the time at which that is forgotten,
        by the system's monotonic clock.
        """
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, asked: frames.Add) -> AsyncIterator[None]:
        """Let a request pass once it may. Raises RefusedError for one under which too many replicas
        died.
        """
        if self._deaths(asked) < _SUSPECT:
            yield
            return
        async with self._alone:
            if self._deaths(asked) >= _REFUSED:
                raise RefusedError(
                    "quarantined",
                    "engines ended again and again under this request, which is not tried "
                    "again for a while",
                )
            yield

    def died_under(self, asked: frames.Add, boot_id: str) -> None:
        """A replica has died under this request, and under others, it may be."""
        self._boot_ids.setdefault(request_key(asked), {})[boot_id] = monotonic() + _SECONDS

    def ended_well(self, asked: frames.Add) -> None:
        """A request has come to its end."""
        if self._boot_ids:
            self._boot_ids.pop(request_key(asked), None)

    def _deaths(self, asked: frames.Add) -> int:
        if not self._boot_ids:
            return 0
        now = monotonic()
        kept = {
            mark: {boot_id: until for boot_id, until in boot_ids.items() if until > now}
            for mark, boot_ids in self._boot_ids.items()
        }
        self._boot_ids = {mark: boot_ids for mark, boot_ids in kept.items() if boot_ids}
        return len(self._boot_ids.get(request_key(asked), ()))
