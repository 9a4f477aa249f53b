"""Latencies of users who keep an engine busy: each sends a request when the last is answered.

The engine is a closed queueing network of two stations. Prompts are read one after the other, in
chunks that share their steps with the decoding sequences. Decoding takes all sequences at once.
Queues follow Schweitzer's approximate mean value analysis (1979), with Kingman's factor (1961).
"""

from collections.abc import Callable
from functools import cache
from math import inf
from typing import NamedTuple

from headrace.planner.draft_gain import expected_tokens
from headrace.planner.step_time import StepTimer
from headrace.planner.steps import decode_step, round_seconds
from headrace.program.op import StepSize
from headrace.record import frozen

_WALKED_CHUNKS = 8
"""A prompt of more chunks is timed at some of them."""
_TIMED_CHUNKS = 4
_NODES = 4
"""Numbers of decoding sequences, from one to all, at which a prompt is timed."""
_HALVINGS = 30
_VARIABILITY = 0.3
"""Half the sum of the squared coefficients of variation of arrivals and of prompts: 0 for equal
requests in turn, 1 for random ones. Simulated requests of equal and of log-normal sizes fit it.
"""


@frozen(kw_only=True)
class Load:
    """Requests of equal size."""

    users: int
    prompt: int
    output: int

    @property
    def depth(self) -> int:
        """Tokens of context half way through the output."""
        return self.prompt + self.output // 2


@frozen(kw_only=True)
class Batching:
    """How an engine forms its steps."""

    max_num_seqs: int
    chunk: int
    """`chunked_prefill_size`."""
    max_rows: int
    """`max_num_batched_tokens`."""
    crossover: float
    """`Program.attention_crossover`."""
    kv_bytes: float
    """Bytes of a stored number of KV."""
    pipeline: int = 1
    draft_depth: int = 0
    """Draft tokens of each decoding sequence; finding them counts as free."""
    draft_acceptance: float = 0.0


@frozen(kw_only=True)
class SteadyState:
    """Means over requests, in seconds."""

    ttft: float
    """From sending a request to its first token."""
    tpot: float
    """Between two tokens of a sequence."""
    requests_per_second: float
    decoding: float
    """Sequences that decode at a time."""
    reading: float
    """Share of the time in which a prompt is read."""


class _Prompt(NamedTuple):
    """The reading of a prompt next to some decoding sequences."""

    seconds: float
    steps: float
    fill: float
    """Seconds in which the last chunk passes the other stages of a pipeline."""

    def mix(self, other: "_Prompt", share: float) -> "_Prompt":
        return _Prompt(*(a + share * (b - a) for a, b in zip(self, other, strict=True)))


class _Chunk(NamedTuple):
    weight: float
    """Number of such chunks in a prompt."""
    start: int
    rows: int


def steady_state(timer: StepTimer, load: Load, batching: Batching) -> SteadyState:
    """Solve the network.

    With n sequences, a prompt is read in a share r of the time. Meanwhile q prompts wait or are
    read, and n - q sequences decode. Without a prompt all n decode. At the right share
    the sequences decode the tokens that the read prompts need. If they decode more even with r = 1,
    then more prompts wait.
    """
    n = min(load.users, batching.max_num_seqs)
    tokens = expected_tokens(batching.draft_acceptance, batching.draft_depth)
    rows = 1 + batching.draft_depth
    step = decode_step(load.depth, n, batching.kv_bytes, rows, batching.pipeline)
    round_time = round_seconds(timer.stage_seconds(step), n)
    prompt_of = _prompts(timer, load, batching, n)

    def state(work: float) -> tuple[float, float]:
        """Share and queue by the offered work: 0 none, 1 always reading, 2 no tokens."""
        others = min(1.0, work) * (n - 1) / n
        queue = 1 + _VARIABILITY * others / (1 - others)
        return min(1.0, work), queue + max(0.0, work - 1) * (n - queue)

    def surplus(work: float) -> float:
        """Decoded tokens less needed ones, per second."""
        share, queue = state(work)
        prompt = prompt_of(n - queue, queue)
        mixed = (n - queue) * prompt.steps / batching.pipeline / prompt.seconds
        decoded = tokens * (share * mixed + (1 - share) * n / round_time)
        return decoded - share / prompt.seconds * (load.output - 1)

    share, queue = state(_root(surplus))
    prompt = prompt_of(n - queue, queue)
    requests = share / prompt.seconds
    tpot = (n - share * queue) / (requests * max(1, load.output - 1))

    # A request comes when another has ended. Without a prompt before it, it waits for the step that
    # has just started.
    wait = (1 - share) * round_time * (n - 1) / n + timer.request_seconds
    decoding_seconds = tpot * (load.output - 1)
    requests = n / (share * queue / requests + prompt.fill + wait + decoding_seconds)
    return SteadyState(
        ttft=load.users / requests - decoding_seconds,
        tpot=tpot,
        requests_per_second=requests,
        decoding=requests * decoding_seconds,
        reading=min(1.0, requests * prompt.seconds),
    )


def _root(surplus: Callable[[float], float]) -> float:
    """The zero of a falling function between 0 and 2; 2 if it has none."""
    low, high = 0.0, 2.0
    if surplus(high) >= 0:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if surplus(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _prompts(
    timer: StepTimer, load: Load, batching: Batching, n: int
) -> Callable[[float, float], _Prompt]:
    """The reading of a prompt, by the numbers of decoding sequences and of waiting prompts.

    A single prompt leaves the last step partly empty; many share all steps.
    """
    nodes = sorted({0, *(round((n - 1) ** (i / (_NODES - 1))) for i in range(_NODES)), n - 1})

    @cache
    def alone(node: int) -> _Prompt:
        return _read(timer, load, batching, _chunks(load.prompt, batching, node, True), node)

    @cache
    def full(node: int) -> _Prompt:
        chunks = _chunks(load.prompt, batching, node, False)
        if chunks == _chunks(load.prompt, batching, node, True):
            return alone(node)
        return _read(timer, load, batching, chunks, node)

    def prompt_of(decoding: float, waiting: float) -> _Prompt:
        above = next((i for i, node in enumerate(nodes) if node >= decoding), len(nodes) - 1)
        low, high = nodes[max(0, above - 1)], nodes[above]
        share = (decoding - low) / (high - low) if high > low else 0.0
        return full(low).mix(full(high), share).mix(alone(low).mix(alone(high), share), 1 / waiting)

    return prompt_of


def _read(
    timer: StepTimer, load: Load, batching: Batching, chunks: list[_Chunk], decoding: int
) -> _Prompt:
    """Read the chunks of a prompt in steps with this number of decoding sequences."""
    decoders = decode_step(
        load.depth, decoding, batching.kv_bytes, 1 + batching.draft_depth, batching.pipeline
    )
    seconds, steps, fill = 0.0, 0.0, 0.0
    for weight, start, rows in chunks:
        # Short prompts of a full step start from empty contexts.
        whole, rest = divmod(rows, load.prompt)
        prompts = ((0, load.prompt),) * whole + (((start, rest),) if rest else ())
        step = StepSize(
            (*decoders.seqs, *prompts), decoders.logit_rows + len(prompts), batching.kv_bytes
        )
        stages = timer.stage_seconds(step)
        seconds += weight * max(stages)
        steps += weight
        fill = sum(stages) - max(stages)
    return _Prompt(seconds, steps, fill)


def _chunks(prompt: int, batching: Batching, decoding: int, is_alone: bool) -> list[_Chunk]:
    """Chunks of a prompt as the scheduler takes them (`RowBudget.take`).

    Next to decoding sequences, a row at depth d counts as 1 + d / crossover rows.
    """
    work = batching.chunk + decoding if decoding else batching.max_rows
    crossover = batching.crossover if decoding else inf
    left = max(1, batching.max_rows - decoding)

    def rows_at(depth: float) -> int:
        return min(left, max(1, int(work / (1 + depth / crossover))))

    chunks: list[_Chunk] = []
    start = 0
    while start < prompt and len(chunks) < _WALKED_CHUNKS:
        rows = min(rows_at(start), prompt - start)
        chunks.append(_Chunk(1.0, start, rows))
        start += rows
    if start < prompt:
        span = prompt / _TIMED_CHUNKS
        middles = [(i + 0.5) * span for i in range(_TIMED_CHUNKS)]
        sizes = [rows_at(middle) for middle in middles]
        return [
            _Chunk(span / rows, max(0, int(middle - rows / 2)), rows)
            for middle, rows in zip(middles, sizes, strict=True)
        ]
    if not is_alone:
        # The next prompt takes the rest of the last step.
        _, start, rows = chunks[-1]
        chunks[-1] = _Chunk(rows / rows_at(start), start, rows_at(start))
    return chunks
