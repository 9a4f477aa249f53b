"""Traces drawn at random: log-normal lengths, Poisson or bursty arrivals, shared prefixes and
chats. The seed determines a trace.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from headrace.errors import RequestError
from headrace.record import frozen
from headrace.simulator.trace import Conversation, Trace, Turn
from headrace.validation import check_names, integer, number

_MAX_RATIO = 8
"""Longest length, as a multiple of the median."""


@frozen(kw_only=True)
class Workload:
    """Distributions of the requests of a trace, in tokens and seconds."""

    prompt: int = 512
    """Median of the new prompt tokens of a turn."""
    output: int = 128
    """Median of the output tokens."""
    spread: float = 0.6
    """Standard deviation of the logarithm of lengths; 0: equal lengths."""
    rate: float = 1.0
    """Conversations that start per second."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier, more is steadier."""
    requests: int = 1000
    turns: int = 1
    """Requests of a conversation."""
    pause: float = 5.0
    """Mean seconds between a response and the next turn."""
    prefix: int = 0
    """Tokens at the start of a conversation that it shares with others."""
    prefixes: int = 1
    """Number of different prefixes. Their frequencies follow Zipf's law."""


WORKLOADS = {
    "lognormal": Workload(),
    "chat": Workload(prompt=96, output=160, turns=4, prefix=256),
    "rag": Workload(prompt=64, output=128, prefix=2048, prefixes=64),
    "code": Workload(prompt=768, output=48, prefix=512, prefixes=16),
}
"""Workloads by name."""
_INTEGERS = {
    "prompt": (1, 10**6),
    "output": (1, 10**6),
    "requests": (1, 10**7),
    "turns": (1, 1000),
    "prefix": (0, 10**6),
    "prefixes": (1, 10**5),
}
_NUMBERS = {
    "spread": (0.0, 3.0),
    "rate": (1e-6, 1e6),
    "burstiness": (1e-3, 1e3),
    "pause": (0.0, 1e6),
}


def parse_workload(text: str) -> Workload:
    """Parse `chat` or `lognormal:prompt=512,output=128,rate=4`. Raises RequestError."""
    name, _, rest = text.partition(":")
    check_names("trace", [name], WORKLOADS)
    given: dict[str, int | float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        check_names(f"field of trace {name!r}", [key], [field.name for field in fields(Workload)])
        if not equals:
            raise RequestError(f"field {key!r} of trace {name!r} has no value; write {key}=NUMBER")
        given[key] = _number(key, value)
    return with_fields(WORKLOADS[name], given)


def _number(key: str, text: str) -> int | float:
    try:
        return int(text) if key in _INTEGERS else float(text)
    except ValueError:
        raise RequestError(f"{key} must be a number, not {text[:40]!r}") from None


def with_fields(workload: Workload, given: dict[str, int | float]) -> Workload:
    """Replace fields of a workload. Raises RequestError for a value out of range."""
    checked: dict[str, Any] = {
        key: integer(key, value, *_INTEGERS[key])
        if key in _INTEGERS
        else number(key, value, *_NUMBERS[key])
        for key, value in given.items()
    }
    return replace(workload, **checked)


def draw_trace(workload: Workload, seed: int) -> Trace:
    """Draw a trace; its last conversation may have fewer turns."""
    rng = np.random.default_rng(seed)
    count = -(-workload.requests // workload.turns)
    shape = workload.burstiness
    gaps = rng.gamma(shape, 1 / (shape * workload.rate), size=count)
    starts = np.cumsum(gaps) - gaps[0]
    prefixes = [rng.bytes(workload.prefix) for _ in range(workload.prefixes)]
    shares = 1 / np.arange(1, workload.prefixes + 1)
    chosen = rng.choice(workload.prefixes, size=count, p=shares / shares.sum())

    trace, left = Trace(), workload.requests
    for start, prefix in zip(starts.tolist(), chosen.tolist(), strict=True):
        turns = [_turn(rng, workload, index) for index in range(min(workload.turns, left))]
        left -= len(turns)
        if workload.prefix:
            first = turns[0]
            turns[0] = first._replace(tokens=prefixes[prefix] + bytes(first.tokens))
        trace.append(Conversation(start, turns, prefix if workload.prefix else -1))
    return trace


def _turn(rng: Generator, workload: Workload, index: int) -> Turn:
    tokens = rng.bytes(_length(rng, workload.prompt, workload.spread))
    pause = float(rng.exponential(workload.pause)) if index else 0.0
    return Turn(tokens, _length(rng, workload.output, workload.spread), pause)


def _length(rng: Generator, median: int, spread: float) -> int:
    return round(float(np.clip(rng.lognormal(np.log(median), spread), 1, _MAX_RATIO * median)))
