"""Requests that wait for a replica: in one line per adapter, by priority, then by arrival.

Only the first of a line tries, when a replica may have room. If it is accepted the next one tries
at once.
"""

import asyncio
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import NoReplicaError


class Place:
    def __init__(self, priority: int, number: int) -> None:
        self.order = priority, number
        self.may_try = asyncio.Event()


class _Line:
    def __init__(self) -> None:
        self.places: list[Place] = []
        self.reason = NoReplicaError("no worker can accept the request")

    def wake_first(self) -> None:
        if self.places:
            self.places[0].may_try.set()


class WaitingLines:
    def __init__(self) -> None:
        self._lines: dict[str | None, _Line] = {}

    @property
    def is_empty(self) -> bool:
        return not self._lines

    def has_line(self, adapter: str | None) -> bool:
        return adapter in self._lines

    def wake(self) -> None:
        """Let the first request of each line try: a replica may have room."""
        for line in self._lines.values():
            line.wake_first()

    @contextmanager
    def waiting(self, adapter: str | None, priority: int, number: int) -> Iterator[Place]:
        """Take a place in the line of an adapter until the end of the context."""
        line, place = self._lines.setdefault(adapter, _Line()), Place(priority, number)
        insort(line.places, place, key=lambda other: other.order)
        try:
            yield place
        finally:
            line.places.remove(place)
            line.wake_first()
            if not line.places:
                del self._lines[adapter]

    async def turn(
        self, adapter: str | None, place: Place, seconds: float, reason: NoReplicaError | None
    ) -> None:
        """Wait until a place is the first and may try; `reason`: why its last try failed.

        Raises the reason of the last try in its line after `seconds`.
        """
        line = self._lines[adapter]
        line.reason = reason or line.reason
        if seconds <= 0:
            raise line.reason
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await place.may_try.wait()
                    place.may_try.clear()
                    if line.places[0] is place:
                        return
        except TimeoutError:
            raise line.reason from None
