"""Seconds of a step that the engine takes around the runs of the executable."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.checkpoint.load import Checkpoint
from headrace.config import OFFLINE
from headrace.measure.least_squares import fit_factors
from headrace.measure.random_bench import RandomBench, tiny_tokenizer
from headrace.measure.random_model import random_checkpoint
from headrace.planner.reach import HostTime

_PROMPT, _OUTPUT = 16, 49
_BATCHES = (1, 4, 16, 48)
_TURNS = 5


def measure_engine(host: HostTime, config: Mapping[str, Any], threads: int) -> HostTime:
    """Add the engine's seconds to the times of a step's start.

    A model of this `config` runs, whose weights evict the engine from the caches, as in use.
    """
    checkpoint = random_checkpoint("engine", config, "Q4_0")
    many = _measure(checkpoint, threads, OFFLINE.engine["multi_step_ms"])
    single = _measure(checkpoint, threads, 0.0)
    return replace(
        host,
        engine=many.step,
        engine_per_sequence=many.per_sequence,
        schedule=max(0.0, single.step - many.step),
        request=max(0.0, many.first - many.step - many.per_sequence),
    )


class _Seconds(NamedTuple):
    """Seconds of the engine around the runs of the executable."""

    first: float
    """Of a request's first step."""
    step: float
    """Of a later launch."""
    per_sequence: float


def _measure(checkpoint: Checkpoint, threads: int, multi_step_ms: float) -> _Seconds:
    requests = [(batch, _PROMPT, _OUTPUT) for batch in _BATCHES]
    tokenizer = tiny_tokenizer()
    with RandomBench(
        checkpoint, tokenizer, requests, threads, multi_step_ms=multi_step_ms
    ) as bench:
        first = [min(_outside(bench, batch, 1) for _ in range(_TURNS)) for batch in _BATCHES]
        whole = [min(_outside(bench, batch, _OUTPUT) for _ in range(_TURNS)) for batch in _BATCHES]
    decode = [(more - less) / (_OUTPUT - 1) for more, less in zip(whole, first, strict=True)]
    step, per_sequence = fit_factors([[1.0, float(batch)] for batch in _BATCHES], decode)
    return _Seconds(first[0], step, per_sequence)


def _outside(bench: RandomBench, batch: int, output: int) -> float:
    """Seconds of a run of requests without the executable."""
    bench.run_seconds = 0.0
    run = bench.run(batch, _PROMPT, output)
    return max(times[-1] for times in run.tokens) - bench.run_seconds
