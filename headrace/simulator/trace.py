"""Traces: conversations with the times at which they start."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.scaleout.prefix_tree import CacheScope


class Turn(NamedTuple):
    """One request of a conversation."""

    tokens: Sequence[int]
    """New tokens of the prompt. The prompt is the conversation so far, and then these."""
    num_tokens: int
    """Output tokens."""
    pause: float = 0.0
    """Seconds after the response before."""


class Conversation(NamedTuple):
    """Turns, each after the response to the one before."""

    start: float
    """Seconds."""
    turns: Sequence[Turn]
    prefix: int = -1
    """Number of its shared prefix; -1: none."""
    scope: CacheScope = (None, None)


Trace = list[Conversation]
"""Conversations in the order of their starts."""


def num_requests(trace: Iterable[Conversation]) -> int:
    return sum(len(conversation.turns) for conversation in trace)


def mean_rate(trace: Trace) -> float:
    """Starting conversations per second; infinite if all start at once."""
    seconds = trace[-1].start - trace[0].start
    return (len(trace) - 1) / seconds if seconds else float("inf")


def at_rate(trace: Trace, rate: float) -> Trace:
    """The trace with its starts drawn apart or together, so that `rate` conversations start per
    second; an infinite rate starts all at once.
    """
    own = mean_rate(trace)
    if own == float("inf"):
        return [conv._replace(start=number / rate) for number, conv in enumerate(trace)]
    first = trace[0].start
    return [conv._replace(start=(conv.start - first) * own / rate) for conv in trace]
