import socket
from contextlib import suppress
from queue import Empty, SimpleQueue

from headrace.remote import frames


class Outbox:
    """Any thread puts events, without blocking; one thread merges and writes them."""

    def __init__(self) -> None:
        self._events: SimpleQueue[frames.Event | None] = SimpleQueue()

    def put(self, event: frames.Event) -> None:
        self._events.put(event)

    def close(self) -> None:
        self._events.put(None)

    def write_next(self, connection: socket.socket) -> bool:
        """Wait for events and write all; returns False after `close`. Raises OSError."""
        events, is_open = [self._events.get()], True
        with suppress(Empty):
            while events[-1] is not None:
                events.append(self._events.get_nowait())
        if events[-1] is None:
            events.pop()
            is_open = False
        connection.sendall(frames.encode(*merge([event for event in events if event])))
        return is_open


def merge(events: list[frames.Event]) -> list[frames.Event]:
    merged: list[frames.Event | list[frames.StepOutput]] = []
    outputs: dict[tuple[str, int], list[frames.StepOutput]] = {}
    for event in events:
        if not isinstance(event, frames.StepOutput):
            merged.append(event)
        elif earlier := outputs.get((event.id, event.index)):
            earlier.append(event)
        else:
            merged.append(outputs.setdefault((event.id, event.index), [event]))
    return [_concatenate(item) if isinstance(item, list) else item for item in merged]


def _concatenate(outputs: list[frames.StepOutput]) -> frames.StepOutput:
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return frames.StepOutput(
        id=last.id,
        index=last.index,
        text="".join([output.text for output in outputs]),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
