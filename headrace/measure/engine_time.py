"""Seconds of a step that the engine takes around the runs of the executable."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
    requests = [(batch, _PROMPT, _OUTPUT) for batch in _BATCHES]
    with RandomBench(checkpoint, tiny_tokenizer(), requests, threads) as bench:
        first = [min(_outside(bench, batch, 1) for _ in range(_TURNS)) for batch in _BATCHES]
        whole = [min(_outside(bench, batch, _OUTPUT) for _ in range(_TURNS)) for batch in _BATCHES]
    decode = [(more - less) / (_OUTPUT - 1) for more, less in zip(whole, first, strict=True)]
    engine, per_sequence = fit_factors([[1.0, float(batch)] for batch in _BATCHES], decode)
    return replace(
        host,
        engine=engine,
        engine_per_sequence=per_sequence,
        request=max(0.0, first[0] - engine - per_sequence),
    )


def _outside(bench: RandomBench, batch: int, output: int) -> float:
    """Seconds of a run of requests without the executable."""
    bench.run_seconds = 0.0
    run = bench.run(batch, _PROMPT, output)
    return max(times[-1] for times in run.tokens) - bench.run_seconds
