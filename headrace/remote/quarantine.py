"""Requests under which the engine ended: those that come back are tried a few at a time, and the
one that ends it again is refused.

A request is known by its prompt, its parameters and its adapter, so it makes no difference which
client sends it again.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from time import monotonic
from typing import NamedTuple

import msgspec

from headrace.remote import frames
from headrace.remote.errors import RefusedError

_SECONDS = 600.0
"""For how long a request is remembered."""
_FEW = 8
"""Suspects that may be under way at once, before an engine ends under them, too."""


class _Record(NamedTuple):
    until: float
    """By the system's monotonic clock."""
    most: int
    """Suspects that may be under way at once where it is one of them; 0: it is refused."""


class Quarantine:
    """What is remembered of engines that ended."""

    def __init__(self) -> None:
        self._records: dict[bytes, _Record] = {}
        self._inside = Counter[bytes]()
        """Suspects that are under way."""
        self._changed = asyncio.Event()

    async def enter(self, asked: frames.Add) -> None:
        """Let a request pass once it may. Raises RefusedError for one that is known to end
        engines.
        """
        if not self._records:
            return
        mark, now = mark_of(asked), monotonic()
        self._records = {one: record for one, record in self._records.items() if record.until > now}
        while (record := self._records.get(mark)) and self._inside.total() >= self._most(record):
            if not record.most:
                raise RefusedError(
                    "quarantined",
                    "the engine ended twice under this request, which is not tried again "
                    "for a while",
                )
            await self._changed.wait()
        if record:
            self._inside[mark] += 1

    def ended_well(self, asked: frames.Add) -> None:
        """A request has come to its end."""
        if self._inside:
            self._records.pop(mark_of(asked), None)
            self.left(asked)

    def left(self, asked: frames.Add) -> None:
        """A request is not under way any more: its client has left, or the engine did not
        take it.
        """
        if self._inside:
            self._inside -= Counter([mark_of(asked)])
            self._change()

    def engine_ended(self, under_way: Iterable[frames.Add]) -> None:
        """The engine has ended under these. It is one of the suspects among them, if there are any;
        if that is one alone, it is refused.
        """
        blamed = set(self._inside) or {mark_of(asked) for asked in under_way}
        most = _FEW if len(blamed) > _FEW else 0 if self._inside.total() == 1 else 1
        self._records |= dict.fromkeys(blamed, _Record(monotonic() + _SECONDS, most))
        self._inside.clear()
        self._change()

    def _most(self, record: _Record) -> int:
        """Suspects that there may be, this one and those that are under way included."""
        return min(
            [
                record.most,
                *(self._records[mark].most for mark in self._inside if mark in self._records),
            ]
        )

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def mark_of(asked: frames.Add) -> bytes:
    """By which a request is known: the same for all that ask for the same."""
    return blake2b(
        frames.encode(msgspec.structs.replace(asked, id="", output_token_ids=[])), digest_size=16
    ).digest()
