"""Probes of streams: the text, the shape of the events, and a client that disconnects."""

from collections.abc import Iterator, Sequence

from headrace.audit.bodies import Body
from headrace.audit.client import Stream
from headrace.audit.compare import (
    Finding,
    compare_scores,
    compare_texts,
    differs,
    equal,
    not_offered,
)
from headrace.audit.context import GREEDY, Context

NUM_CANCELLED = 3
"""Streams that the client closes after their first events."""


async def streamed(context: Context) -> Sequence[Finding]:
    """Compare a stream with the whole response, and check its events."""
    answer, stream = await context.stream()
    first = context.first
    return [
        compare_texts(first.outputs, answer.outputs),
        compare_scores(first.outputs, answer.outputs),
        _same_usage(context, stream),
        _shape(context, stream),
    ]


async def cancelled(context: Context) -> Sequence[Finding]:
    """Close streams in the middle, then send the same request again."""
    for _ in range(NUM_CANCELLED):
        await context.stream(GREEDY, max_events=1)
    answer = await context.ask()
    return [compare_texts(context.first.outputs, answer.outputs)]


def _same_usage(context: Context, stream: Stream) -> Finding:
    events = [event for event in stream.events if event.usage]
    whole = context.first.usage
    if not events:
        return not_offered("no event has a usage, although stream_options asks for it")
    if whole is None:
        return not_offered("the whole response has no usage")
    usage = events[-1].usage
    assert usage, "the event was chosen by it"
    ours = (whole.prompt_tokens, whole.completion_tokens)
    theirs = (usage.prompt_tokens, usage.completion_tokens)
    if ours != theirs:
        return differs(f"prompt and output tokens: {ours} whole and {theirs} streamed")
    return equal()


def _shape(context: Context, stream: Stream) -> Finding:
    problems = list(_problems(context.api.is_chat, stream.events))
    if not stream.is_done:
        problems.append("the stream ends without [DONE]")
    if problems:
        return differs("; ".join(problems))
    return equal(f"{len(stream.events)} events")


def _problems(is_chat: bool, events: Sequence[Body]) -> Iterator[str]:
    choices = [choice for event in events for choice in event.choices]
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    if len(reasons) != 1:
        yield f"{len(reasons)} events have a finish_reason"
    if reasons and not choices[-1].finish_reason:
        yield "text follows the finish_reason"
    for name, values in (
        ("id", {event.id for event in events}),
        ("model", {event.model for event in events}),
        ("object", {event.object for event in events}),
    ):
        if len(values) != 1:
            yield f"{len(values)} values of {name}"
    expected = "chat.completion.chunk" if is_chat else "text_completion"
    if events[0].object != expected:
        yield f"object is {events[0].object!r}, not {expected!r}"
    if is_chat:
        roles = [choice.delta and choice.delta.role for choice in choices]
        if roles[0] != "assistant":
            yield "the first event has no role"
    usages = [event for event in events if event.usage]
    if usages and usages[-1] is not events[-1]:
        yield "the usage is not in the last event"
    if usages and usages[-1].choices:
        yield "the event with the usage has choices"
