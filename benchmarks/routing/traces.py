"""The five traces: requests with arrival times, for a number of replicas. The seed determines a
trace.

A trace is a list of conversations, each a list of turns. The next turn arrives some time after the
previous answer, and its prompt is the whole conversation plus new tokens. All traces except chats
have one turn per conversation.
"""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from headrace.simulator.trace import Conversation, Trace, Turn

VOCAB = 32


def _tokens(rng: Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(VOCAB, size=count)]


def _length(rng: Generator, median: float, sigma: float, minimum: int, maximum: int) -> int:
    return int(np.clip(rng.lognormal(np.log(median), sigma), minimum, maximum))


def _output(rng: Generator) -> int:
    return _length(rng, 24, 0.6, 4, 96)


def _times(rng: Generator, count: int, rate: float) -> list[float]:
    return [float(time) for time in np.cumsum(rng.exponential(1 / rate, size=count))]


def hot_prefix(rng: Generator, replicas: int, length: int) -> Trace:
    """One prefix of 2,048 tokens for all requests, and a question with a median of 128 tokens."""
    prefix = _tokens(rng, 2048)
    times = _times(rng, length * replicas, 60.0 * replicas)
    return [
        Conversation(
            time, [Turn(prefix + _tokens(rng, _length(rng, 128, 0.6, 16, 1024)), _output(rng))], 0
        )
        for time in times
    ]


def many_tenants(rng: Generator, replicas: int, length: int) -> Trace:
    """32 tenants of unequal size (Zipf), each with a salt and a prefix of 1,536 tokens: together
    more than a replica can cache.
    """
    prefixes = [_tokens(rng, 1536) for _ in range(32)]
    shares = 1 / np.arange(1, 33)
    tenants = rng.choice(32, size=length * replicas, p=shares / shares.sum())
    trace = []
    for time, tenant in zip(
        _times(rng, length * replicas, 35.0 * replicas), tenants.tolist(), strict=True
    ):
        turn = Turn(prefixes[tenant] + _tokens(rng, _length(rng, 128, 0.6, 16, 1024)), _output(rng))
        trace.append(Conversation(time, [turn], tenant, (f"tenant {tenant}", None)))
    return trace


def chats(rng: Generator, replicas: int, length: int) -> Trace:
    """Conversations of six turns after a common prefix of 256 tokens. A turn adds a median of 128
    tokens and an answer.
    """
    prefix = _tokens(rng, 256)
    trace = []
    for time in _times(rng, length * replicas // 6, 7.0 * replicas):
        turns = [
            Turn(
                _tokens(rng, _length(rng, 128, 0.6, 16, 1024)),
                _output(rng),
                float(rng.exponential(0.5)),
            )
            for _ in range(6)
        ]
        first = turns[0]._replace(tokens=[*prefix, *turns[0].tokens], pause=0.0)
        trace.append(Conversation(time, [first, *turns[1:]], 0))
    return trace


def no_sharing(rng: Generator, replicas: int, length: int) -> Trace:
    """Prompts without common prefixes, with a median of 256 tokens."""
    times = _times(rng, length * replicas, 35.0 * replicas)
    return [
        Conversation(time, [Turn(_tokens(rng, _length(rng, 256, 0.8, 16, 2048)), _output(rng))])
        for time in times
    ]


def bursts(rng: Generator, replicas: int, length: int) -> Trace:
    """Every second, 12 requests per replica within 50 ms about a document of 1,024 tokens, and
    unrelated requests between them.
    """
    trace = no_sharing(rng, replicas, length // 3)
    trace = [conversation._replace(start=conversation.start * 3.5) for conversation in trace]
    for number in range(max(1, length // 18)):
        document = _tokens(rng, 1024)
        starts = number + 0.05 * rng.random(12 * replicas)
        turns = [
            Turn(document + _tokens(rng, _length(rng, 64, 0.6, 16, 256)), _output(rng))
            for _ in starts
        ]
        trace += [
            Conversation(float(start), [turn], number)
            for start, turn in zip(starts, turns, strict=True)
        ]
    return sorted(trace, key=lambda conversation: conversation.start)


TRACES: dict[str, Callable[[Generator, int, int], Trace]] = {
    "one hot prefix": hot_prefix,
    "many tenants": many_tenants,
    "chats": chats,
    "no sharing": no_sharing,
    "bursts": bursts,
}
"""The trace with this name; `length`: requests per replica."""
