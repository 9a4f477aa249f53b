import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from headrace.remote import frames
from headrace.remote.errors import EngineError, RefusedError, TooSlowError

_MAX_UNREAD = 4096
"""Unread events that end the request with TooSlowError."""


class Stream:
    """The events of a request. `close` aborts it."""

    def __init__(
        self,
        request_id: str,
        request: frames.Add | None,
        abort: Callable[[str], None],
        finish: Callable[[str], None] | None = None,
    ) -> None:
        """`finish` ends the request early; without it the engine goes on to the end."""
        self.id = request_id
        self.request = request
        self.tokens_by_output = Counter[int]()
        """Output tokens by the index of their output."""
        self.finish_reasons: list[str] = []
        self.ended: frames.Ended | None = None
        self.error: EngineError | frames.Refused | None = None
        self._abort = abort
        self._finish = finish
        self._events: asyncio.Queue[frames.Event | EngineError] = asyncio.Queue()
        self._is_over = False

    @property
    def output_tokens(self) -> int:
        return self.tokens_by_output.total()

    def put(self, event: frames.Event | EngineError) -> bool:
        is_last = isinstance(event, frames.Ended | EngineError)
        if self._events.qsize() >= _MAX_UNREAD and not is_last:
            self._abort(self.id)
            event = TooSlowError("the client reads slower than the engine generates")
        self._record(event)
        self._is_over = isinstance(event, frames.Ended | EngineError)
        self._events.put_nowait(event)
        return not self._is_over

    async def reply(self) -> frames.Reply:
        """Wait for the first event. Raises RefusedError, or the error that ended the engine."""
        event = await self._events.get()
        if isinstance(event, frames.Refused):
            self._is_over = True
            raise RefusedError(event.kind, event.message)
        if isinstance(event, EngineError):
            raise event
        assert isinstance(event, frames.Reply), "the first event is a reply"
        return event

    async def __aiter__(self) -> AsyncIterator[frames.StepOutput | frames.Ended]:
        async for event in self.events():
            assert event is not None
            yield event

    async def events(
        self, quiet_seconds: float | None = None
    ) -> AsyncIterator[frames.StepOutput | frames.Ended | None]:
        """Yield the events, and None after each `quiet_seconds` without one.

        Raises the error that ends the request.
        """
        while True:
            try:
                async with asyncio.timeout(quiet_seconds):
                    event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, EngineError):
                raise event
            if isinstance(event, frames.StepOutput):
                yield event
            elif isinstance(event, frames.Ended):
                yield event
                return

    def finish(self) -> None:
        """Let the request end as if a stop string had come, if the engine can. Its last events
        follow, with the tokens that it has generated meanwhile.
        """
        if self._finish and not self._is_over:
            self._finish(self.id)

    def fail(self, error: EngineError) -> None:
        """Abort the request; its reader gets the error."""
        if not self._is_over:
            self._abort(self.id)
            self._record(error)
            self._is_over = True
            self._events.put_nowait(error)

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._abort(self.id)

    def _record(self, event: frames.Event | EngineError) -> None:
        match event:
            case frames.StepOutput():
                self.tokens_by_output[event.index] += len(event.token_ids)
                if event.finish_reason:
                    self.finish_reasons.append(event.finish_reason)
            case frames.Ended():
                self.ended, self.error = event, event.error
            case EngineError():
                self.error = event
