"""The end of a decode step: one row of logits, and drawing a token from it.

The head is a cold matrix, so bandwidth is its roof. Logits are Gaussian: `flat` spreads the
probability over thousands of tokens, the worst case of top_p; `peaked` puts it on a few.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
from harness import Bench, Column, Timed, main
from native import Floats, LinearPlan

from headrace.sampling.sampler import make_sampler
from headrace.sampling_params import SamplingParams
from tests.backend.stored import random_stored

FORMATS = ("Q4_1", "Q6_K", "Q8_0")
SHAPES = ((49152, 576), (128256, 2048))
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "and top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "and top_p 0.95, top_k 40": SamplingParams(temperature=0.8, top_p=0.95, top_k=40),
}
ROWS = {"flat": 1.0, "peaked": 5.0}
"""Standard deviations of the logits."""
DRAWS = 16
HEAD_COLUMNS = (
    Column("format", "format"),
    Column("milliseconds", "ms", ".3f"),
    Column("weight_gb_s", "weights GB/s", ".1f"),
    Column("roof_share", "of the roof", ".0%"),
)
SAMPLING_COLUMNS = (
    Column("sampling", "sampling"),
    *(Column(f"{name}_us", f"{name}, us", ",.1f") for name in ROWS),
)


def head(bench: Bench) -> None:
    """Two tables for each shape."""
    for vocab, width in ((512, 256),) if bench.quick else SHAPES:
        product(bench, vocab, width)
        sampling(bench, vocab)


def product(bench: Bench, vocab: int, width: int) -> None:
    """The matrix, one row."""
    table = []
    for name in FORMATS:
        if width % 256 and name.endswith("_K"):
            continue  # super-blocks of 256 columns
        linear = LinearPlan(
            random_stored(name, vocab, width, seed=0),
            bench.threads,
            bench.cold_bytes,
            1,
            offset=True,
        )
        rounds = bench.rounds(
            {"roof": bench.bandwidth(), "head": bench.busy(lambda linear=linear: linear.seconds(1))}
        )
        table.append(
            {
                "format": name,
                "milliseconds": rounds.spread(lambda seconds: seconds * 1e3, "head"),
                "weight_gb_s": rounds.spread(
                    lambda seconds, nbytes=linear.weight_bytes: nbytes / seconds / 1e9, "head"
                ),
                "roof_share": rounds.spread(
                    lambda seconds, roof, nbytes=linear.weight_bytes: nbytes / seconds / roof,
                    "head",
                    "roof",
                ),
                "error": linear.error,
            }
        )
    bench.table(
        "head",
        f"head of {vocab:,} x {width:,}, one row",
        HEAD_COLUMNS,
        table,
        vocab=vocab,
        width=width,
    )


def sampling(bench: Bench, vocab: int) -> None:
    """Drawing from a row of logits: one thread."""
    normal = np.random.default_rng(5).standard_normal(vocab).astype(np.float32)
    rows = {name: normal * np.float32(spread) for name, spread in ROWS.items()}
    things = {
        (how, name): Timed(draws(params, row), 1)
        for how, params in SAMPLING.items()
        for name, row in rows.items()
    }
    rounds = bench.rounds(things)
    table = [
        {"sampling": how}
        | {f"{name}_us": rounds.spread(lambda seconds: seconds * 1e6, (how, name)) for name in ROWS}
        for how in SAMPLING
    ]
    bench.table("sampling", f"drawing from {vocab:,} logits", SAMPLING_COLUMNS, table, vocab=vocab)


def draws(params: SamplingParams, row: Floats) -> Callable[[], float]:
    """Seconds of a draw, called from Python."""
    sampler = make_sampler(params, [1], len(row), seed=6, end_ids=())

    def seconds() -> float:
        found = []
        for position in range(DRAWS):
            start = time.perf_counter()
            sampler.draw(row, position, -1)
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    return seconds


if __name__ == "__main__":
    main(__doc__, head)
