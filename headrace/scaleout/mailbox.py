"""What an engine says, carried from its thread to the streams of an event loop: all that is new of
a request at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from queue import Empty, SimpleQueue

from headrace.remote import frames
from headrace.remote.outbox import merge

Event = frames.Accepted | frames.Refused | frames.StepOutput | frames.Ended | frames.Blocks


class _Box:
    """The events of one request that its reader has not had."""

    def __init__(self) -> None:
        self.events: list[frames.Event] = []
        self.filled = asyncio.Event()


class Mailroom:
    """The events of one engine, by request. It is made in the event loop whose streams read
    them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: SimpleQueue[frames.Event] = SimpleQueue()
        self._is_called = False
        """Whether the loop is to hand out what has arrived: it is called once for all that a step
        brings.
        """
        self._boxes: dict[str, _Box] = {}

    def put(self, event: frames.Event) -> None:
        """Take an event, in any thread."""
        self._arrived.put(event)
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop is closed, and nothing is read any more
                self._loop.call_soon_threadsafe(self._hand_out)

    def open(self, request_id: str) -> None:
        """Keep the events of a request from now on."""
        self._boxes[request_id] = _Box()

    def close(self, request_id: str) -> None:
        """Drop them from now on."""
        self._boxes.pop(request_id, None)

    async def read(self, request_id: str) -> AsyncIterator[list[frames.Event]]:
        """The events of a request that was opened, as many as there are at a time, to the last."""
        box = self._boxes[request_id]
        while True:
            await box.filled.wait()
            box.filled.clear()
            events, box.events = merge(box.events), []
            yield events
            if isinstance(events[-1], frames.Ended | frames.Refused):
                return

    def _hand_out(self) -> None:
        self._is_called = False
        with suppress(Empty):
            while True:
                event = self._arrived.get_nowait()
                box = (
                    self._boxes.get(event.id)
                    if not isinstance(event, frames.EngineInfo | frames.Report)
                    else None
                )
                if box:
                    box.events.append(event)
                    box.filled.set()
