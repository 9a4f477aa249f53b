"""The outbox of an engine process: merging keeps the content of each output and the order of all
other events.
"""

import socket
from collections import defaultdict
from threading import Thread

from hypothesis import given
from hypothesis import strategies as st

from headrace.outputs import Logprob
from headrace.remote import frames
from headrace.remote.outbox import Outbox, merge

Contents = dict[tuple[str, int], list[object]]


@st.composite
def event_lists(draw: st.DrawFn) -> list[frames.Event]:
    """Events of an engine: requests that are accepted, have outputs and end, with reports."""
    events: list[frames.Event] = []
    running: list[tuple[str, int]] = []
    for step in range(draw(st.integers(0, 30))):
        match draw(st.sampled_from(["add", "output", "output", "output", "end", "report"])):
            case "add":
                events.append(frames.Accepted(str(step)))
                running += [(str(step), index) for index in range(draw(st.integers(1, 2)))]
            case "output" if running:
                events.append(_output(*draw(st.sampled_from(running)), step))
            case "end" if running:
                request_id = draw(st.sampled_from(running))[0]
                ended = [output for output in running if output[0] == request_id]
                events += [_output(*output, step, "stop") for output in ended]
                running = [output for output in running if output[0] != request_id]
                events.append(frames.Ended(id=request_id, prompt_tokens=1))
            case "report":
                events.append(frames.Report({"steps": step}, {}, {}))
    return events


@given(event_lists())
def test_merge_keeps_contents_and_order(events: list[frames.Event]) -> None:
    merged = merge(events)
    assert _contents(merged) == _contents(events)
    assert _others(merged) == _others(events)
    num_outputs = len([event for event in merged if isinstance(event, frames.StepOutput)])
    assert num_outputs == len(_contents(events))
    for request_id in {event.id for event in events if isinstance(event, frames.Accepted)}:
        types = [type(event) for event in merged if getattr(event, "id", "") == request_id]
        assert types[0] is frames.Accepted
        assert frames.Ended not in types[:-1]


@given(event_lists())
def test_outbox_writes_all_events(events: list[frames.Event]) -> None:
    outbox, (ours, theirs) = Outbox(), socket.socketpair()
    with ours, theirs:
        writer = Thread(target=_write, args=(outbox, theirs))
        writer.start()
        for event in events:
            outbox.put(event)
        outbox.close()
        buffer, read = bytearray(), []
        while chunk := ours.recv(1 << 16):
            buffer += chunk
            read += [frames.read_event(body) for body in frames.bodies(buffer)]
        writer.join()
    assert not buffer
    assert _contents(read) == _contents(events)
    assert _others(read) == _others(events)


def _write(outbox: Outbox, connection: socket.socket) -> None:
    while outbox.write_next(connection):
        pass
    connection.shutdown(socket.SHUT_WR)


def _output(request_id: str, index: int, step: int, reason: str | None = None) -> frames.StepOutput:
    return frames.StepOutput(
        id=request_id,
        index=index,
        text=f"{step} ",
        token_ids=[step] * (step % 4),
        logprobs=[{step: Logprob(-0.5, 1, str(step))}] if step % 3 else [],
        finish_reason=reason,
        stop_reason=step if reason else None,
    )


def _contents(events: list[frames.Event]) -> Contents:
    """Text, tokens, log-probabilities and stop reasons of each output."""
    contents: Contents = defaultdict(lambda: ["", [], [], None, None])
    for event in events:
        if isinstance(event, frames.StepOutput):
            text, tokens, logprobs, *_ = contents[event.id, event.index]
            contents[event.id, event.index] = [
                text + event.text,
                tokens + event.token_ids,
                logprobs + event.logprobs,
                event.finish_reason,
                event.stop_reason,
            ]  # type: ignore[operator]
    return contents


def _others(events: list[frames.Event]) -> list[frames.Event]:
    return [event for event in events if not isinstance(event, frames.StepOutput)]
