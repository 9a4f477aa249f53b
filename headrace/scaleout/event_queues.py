import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from queue import Empty, SimpleQueue

from headrace.remote import frames
from headrace.remote.outbox import merge


class _RequestQueue:
    def __init__(self) -> None:
        self.events: list[frames.Event] = []
        self.filled = asyncio.Event()


class EventQueues:
    """The events of one engine, by request. The reading event loop creates it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: SimpleQueue[frames.Event] = SimpleQueue()
        self._is_scheduled = False
        """One call of `_distribute` handles all events of a step."""
        self._queues: dict[str, _RequestQueue] = {}

    def put(self, event: frames.Event) -> None:
        self._arrived.put(event)
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._distribute)

    def open(self, request_id: str) -> None:
        self._queues[request_id] = _RequestQueue()

    def close(self, request_id: str) -> None:
        self._queues.pop(request_id, None)

    async def read(self, request_id: str) -> AsyncIterator[list[frames.Event]]:
        queue = self._queues[request_id]
        while True:
            await queue.filled.wait()
            queue.filled.clear()
            events, queue.events = merge(queue.events), []
            yield events
            if isinstance(events[-1], frames.Ended | frames.Refused):
                return

    def _distribute(self) -> None:
        self._is_scheduled = False
        with suppress(Empty):
            while True:
                event = self._arrived.get_nowait()
                if isinstance(event, frames.EngineInfo | frames.Log | frames.Report):
                    continue
                if queue := self._queues.get(event.id):
                    queue.events.append(event)
                    queue.filled.set()
