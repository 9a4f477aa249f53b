"""What the engine process has to say, until it is written: what comes while the API process is busy
is put together.
"""

import socket
from contextlib import suppress
from queue import Empty, SimpleQueue

from headrace.remote import frames


class Outbox:
    """A queue of events. Any thread may put some in, and waits for nothing; one thread takes them
    out.
    """

    def __init__(self) -> None:
        self._events: SimpleQueue[frames.Event | None] = SimpleQueue()

    def put(self, event: frames.Event) -> None:
        """Add an event."""
        self._events.put(event)

    def close(self) -> None:
        """Let the thread that writes end once it has written what is there."""
        self._events.put(None)

    def write_next(self, connection: socket.socket) -> bool:
        """Wait for events, and write all that are there; whether there may be more. Raises OSError
        where the other end has closed.

        A reader that is behind so gets fewer events, not later ones.
        """
        events, is_open = [self._events.get()], True
        with suppress(Empty):
            while events[-1] is not None:
                events.append(self._events.get_nowait())
        if events[-1] is None:
            events.pop()
            is_open = False
        connection.sendall(frames.encode(*merged([event for event in events if event])))
        return is_open


def merged(events: list[frames.Event]) -> list[frames.Event]:
    """The same events, with all that is new of one continuation told at once, where the first of it
    was told.
    """
    told: list[frames.Event | list[frames.StepOutput]] = []
    news: dict[tuple[str, int], list[frames.StepOutput]] = {}
    for event in events:
        if not isinstance(event, frames.StepOutput):
            told.append(event)
        elif known := news.get((event.id, event.index)):
            known.append(event)
        else:
            told.append(news.setdefault((event.id, event.index), [event]))
    return [_joined(one) if isinstance(one, list) else one for one in told]


def _joined(news: list[frames.StepOutput]) -> frames.StepOutput:
    """What is new of one continuation, as one."""
    if len(news) == 1:
        return news[0]
    last = news[-1]
    return frames.StepOutput(
        last.id,
        last.index,
        "".join([one.text for one in news]),
        [token for one in news for token in one.token_ids],
        [entry for one in news for entry in one.logprobs],
        last.finish_reason,
        last.stop_reason,
    )
