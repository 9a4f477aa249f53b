"""The outbox of the engine process: whatever is put together, each continuation says the same, and
the rest stays in order.
"""

import socket
from collections import defaultdict
from threading import Thread

from hypothesis import given
from hypothesis import strategies as st

from headrace.remote import frames
from headrace.remote.outbox import Outbox, merged
from headrace.request import Logprob

Said = dict[tuple[str, int], list[object]]


@st.composite
def events(draw: st.DrawFn) -> list[frames.Event]:
    """What an engine may say: a request is accepted, brings news of its continuations, and ends;
    between them come reports.
    """
    told: list[frames.Event] = []
    running: list[tuple[str, int]] = []
    for step in range(draw(st.integers(0, 30))):
        match draw(st.sampled_from(["add", "news", "news", "news", "end", "report"])):
            case "add":
                told.append(frames.Accepted(str(step)))
                running += [(str(step), index) for index in range(draw(st.integers(1, 2)))]
            case "news" if running:
                told.append(_news(*draw(st.sampled_from(running)), step))
            case "end" if running:
                request_id = draw(st.sampled_from(running))[0]
                told += [_news(*one, step, "stop") for one in running if one[0] == request_id]
                running = [one for one in running if one[0] != request_id]
                told.append(frames.Ended(request_id, 1, 0, 0, 0, 0, None, None, None))
            case "report":
                told.append(frames.Report({"steps": step}, {}, {}))
    return told


@given(events())
def test_nothing_is_lost_or_moved(told: list[frames.Event]) -> None:
    less = merged(told)
    assert _said(less) == _said(told)
    assert _others(less) == _others(told)
    assert len([event for event in less if isinstance(event, frames.StepOutput)]) == len(
        _said(told)
    )
    for request_id in {event.id for event in told if isinstance(event, frames.Accepted)}:
        of_it = [type(event) for event in less if getattr(event, "id", "") == request_id]
        assert of_it[0] is frames.Accepted
        assert frames.Ended not in of_it[:-1]


@given(events())
def test_what_is_put_in_is_written(told: list[frames.Event]) -> None:
    outbox, (ours, theirs) = Outbox(), socket.socketpair()
    with ours, theirs:
        writer = Thread(target=_write, args=(outbox, theirs))
        writer.start()
        for event in told:
            outbox.put(event)
        outbox.close()
        buffer, read = bytearray(), []
        while chunk := ours.recv(1 << 16):
            buffer += chunk
            read += [frames.read_event(body) for body in frames.bodies(buffer)]
        writer.join()
    assert not buffer
    assert _said(read) == _said(told)
    assert _others(read) == _others(told)


def _write(outbox: Outbox, connection: socket.socket) -> None:
    while outbox.write_next(connection):
        pass
    connection.shutdown(socket.SHUT_WR)


def _news(request_id: str, index: int, step: int, reason: str | None = None) -> frames.StepOutput:
    logprobs = [{step: Logprob(-0.5, 1, str(step))}] if step % 3 else []
    return frames.StepOutput(
        request_id,
        index,
        f"{step} ",
        [step] * (step % 4),
        logprobs,
        reason,
        step if reason else None,
    )


def _said(told: list[frames.Event]) -> Said:
    """Each continuation: its text, tokens, log-probabilities, and how it ended."""
    said: Said = defaultdict(lambda: ["", [], [], None, None])
    for one in told:
        if isinstance(one, frames.StepOutput):
            text, tokens, logprobs, *_ = said[one.id, one.index]
            said[one.id, one.index] = [
                text + one.text,
                tokens + one.token_ids,
                logprobs + one.logprobs,
                one.finish_reason,
                one.stop_reason,
            ]  # type: ignore[operator]
    return said


def _others(told: list[frames.Event]) -> list[frames.Event]:
    return [event for event in told if not isinstance(event, frames.StepOutput)]
