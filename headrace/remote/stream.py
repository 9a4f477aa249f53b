"""What comes of one request of the engine, as the API process hands it out."""

import asyncio
from collections.abc import AsyncIterator, Callable

from headrace.remote import frames
from headrace.remote.errors import EngineError, RefusedError, TooSlowError

_MOST_UNREAD = 4096
"""Events that its reader may leave unread: a reader slower than that loses its request."""


class Stream:
    """What comes of one request. `close` ends the request, unless it has ended."""

    def __init__(
        self, request_id: str, asked: frames.Add | None, abort: Callable[[str], None]
    ) -> None:
        self.id = request_id
        self.asked = asked
        """The request; None for a command of another kind."""
        self._abort = abort
        self._events: asyncio.Queue[frames.Event | EngineError] = asyncio.Queue()
        self._over = False
        self.output_tokens = 0
        self.finish_reasons: list[str] = []
        self.ended: frames.Ended | None = None
        self.error: EngineError | frames.Refused | None = None

    def put(self, event: frames.Event | EngineError) -> bool:
        """Hand over an event; whether there may be more."""
        if self._events.qsize() >= _MOST_UNREAD and not isinstance(
            event, frames.Ended | EngineError
        ):
            self._abort(self.id)
            event = TooSlowError("the client reads slower than its answer is written")
        self._note(event)
        self._over = isinstance(event, frames.Ended | EngineError)
        self._events.put_nowait(event)
        return not self._over

    async def accepted(self) -> frames.Answer:
        """Wait until the engine has done what was asked. Raises RefusedError where it cannot, or
        what has ended the engine.
        """
        event = await self._events.get()
        if isinstance(event, frames.Refused):
            self._over = True
            raise RefusedError(event.kind, event.message)
        if isinstance(event, EngineError):
            raise event
        assert isinstance(event, frames.Answer), "nothing else comes first"
        return event

    async def __aiter__(self) -> AsyncIterator[frames.StepOutput | frames.Ended]:
        """The news of the request, and how it ended, which comes last. Raises what has ended the
        engine.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, EngineError):
                raise event
            if isinstance(event, frames.StepOutput):
                yield event
            elif isinstance(event, frames.Ended):
                yield event
                return

    def close(self) -> None:
        """End the request, unless it has ended."""
        if not self._over:
            self._over = True
            self._abort(self.id)

    def _note(self, event: frames.Event | EngineError) -> None:
        match event:
            case frames.StepOutput():
                self.output_tokens += len(event.token_ids)
                if event.finish_reason:
                    self.finish_reasons.append(event.finish_reason)
            case frames.Ended():
                self.ended, self.error = event, event.error
            case EngineError():
                self.error = event
