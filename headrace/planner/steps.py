"""Sizes of the steps of requests, and the time of a round of them through a pipeline."""

from collections.abc import Iterator, Sequence

from headrace.program.op import StepSize


def decode_step(
    depth: int, batch: int, kv_bytes: float, rows: int = 1, pipeline: int = 1
) -> StepSize:
    """A step of the sequences that are in one stage of a pipeline at a time, each at `depth`."""
    seqs = -(-batch // pipeline)
    return StepSize(((depth, rows),) * seqs, seqs * rows, kv_bytes)


def round_seconds(stages: Sequence[float], batch: int) -> float:
    """Seconds between two steps of a sequence: all stages, or the slowest one for each step in
    flight.
    """
    return max(sum(stages), min(batch, len(stages)) * max(stages))


def prompt_steps(prompt: int, chunk: int, kv_bytes: float) -> Iterator[StepSize]:
    """The steps of a prompt that is alone on the machine."""
    for start in range(0, prompt, chunk):
        yield StepSize(((start, min(chunk, prompt - start)),), 1, kv_bytes)


def start_steps(prompt: int, batch: int, max_rows: int, kv_bytes: float) -> Iterator[StepSize]:
    """The steps of a batch of equal prompts until the last one has its first token.

    Sequences with a token decode first, and prompts share the other rows in order.
    """
    computed, decoding = 0, [0] * batch
    while computed < batch * prompt:
        started = computed // prompt
        budget = max(1, max_rows - started)
        seqs = [(prompt + decoding[i], 1) for i in range(started)]
        end = min(batch * prompt, computed + budget)
        while computed < end:
            done = computed % prompt
            rows = min(prompt - done, end - computed)
            seqs.append((done, rows))
            computed += rows
        for i in range(started):
            decoding[i] += 1
        yield StepSize(tuple(seqs), computed // prompt, kv_bytes)
