"""Quarantine of requests that were running when an engine ended.

Suspects run with few other suspects. A request that alone ended an engine is refused.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import NamedTuple

import msgspec

from headrace.remote import frames
from headrace.remote.errors import NotReadyError, RefusedError

_SUSPECT_SECONDS = 600.0
_MAX_SUSPECTS = 8


class _Suspicion(NamedTuple):
    until: float
    max_suspects: int
    """Including this request; 0 refuses it."""


class Quarantine:
    def __init__(self) -> None:
        self._suspicions: dict[bytes, _Suspicion] = {}
        self._running = Counter[bytes]()
        self._changed = asyncio.Event()

    async def enter(self, request: frames.Add) -> None:
        """Wait until a request may run.

        Raises RefusedError if it has ended engines, NotReadyError if it waits for its `timeout`.
        """
        try:
            async with asyncio.timeout(request.options.timeout):
                await self._enter(request)
        except TimeoutError:
            raise NotReadyError(
                "full",
                "requests that may have ended the engine run a few at a time, and this one had no "
                "turn before its timeout; send it again later",
            ) from None

    async def _enter(self, request: frames.Add) -> None:
        if not self._suspicions:
            return
        key, now = request_key(request), monotonic()
        self._suspicions = {
            other: suspicion
            for other, suspicion in self._suspicions.items()
            if suspicion.until > now
        }
        while suspicion := self._suspicions.get(key):
            if self._running.total() < self._limit(suspicion):
                break
            if not suspicion.max_suspects:
                raise RefusedError(
                    "quarantined",
                    "the engine ended twice during this request; send it again in 10 minutes",
                )
            await self._changed.wait()
        if suspicion:
            self._running[key] += 1

    def finished(self, request: frames.Add) -> None:
        if self._running:
            self._suspicions.pop(request_key(request), None)
            self.leave(request)

    def leave(self, request: frames.Add) -> None:
        if self._running:
            self._running -= Counter([request_key(request)])
            self._notify()

    def engine_ended(self, running: Iterable[frames.Add]) -> None:
        """Blame the running suspects for an engine's end; without any, all running requests."""
        blamed = set(self._running) or {request_key(request) for request in running}
        if len(blamed) > _MAX_SUSPECTS:
            max_suspects = _MAX_SUSPECTS
        else:
            max_suspects = 0 if self._running.total() == 1 else 1
        suspicion = _Suspicion(monotonic() + _SUSPECT_SECONDS, max_suspects)
        self._suspicions |= dict.fromkeys(blamed, suspicion)
        self._running.clear()
        self._notify()

    def _limit(self, suspicion: _Suspicion) -> int:
        running = [self._suspicions[key] for key in self._running if key in self._suspicions]
        return min(other.max_suspects for other in (suspicion, *running))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def request_key(request: frames.Add) -> bytes:
    """Return the identity of a request, which stays if the request is sent again or continues.

    Its id, progress and time limit do not count.
    """
    if request.mark:
        return request.mark
    options = replace(request.options, timeout=None)
    content = msgspec.structs.replace(request, id="", output_token_ids=[], options=options)
    return blake2b(frames.encode(content), digest_size=16).digest()
