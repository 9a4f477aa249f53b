"""RMSNorm that writes packed rows for the next linear op: nanoseconds per row on all threads.

A row runs on one thread, so one row shows the latency of an op with its barrier; many rows show
throughput.
"""

import statistics

import numpy as np
from harness import Bench, Column, main
from native import embedded, op_seconds, plain_plan, single_rows

from tests.backend.stored import random_stored

WIDTHS = (576, 1024, 2048, 4096)
OPS = 64
PASSES = {1: 99, 16: 25, 512: 3}
"""Runs of the plan per sample; the median counts, since few rows take microseconds."""
READERS = {"int8": ("Q8_0", False), "int8_offset": ("Q8_0", True), "bf16": ("BF16", False)}
"""Form of the packed rows: the format of the weight that reads them, and whether they have an
offset.
"""
COLUMNS = (
    Column("rows", "rows"),
    *(
        Column(f"{form}_ns_a_row", f"{form.replace('_', ' with ')}, ns a row", ",.0f")
        for form in READERS
    ),
)


def norm(bench: Bench) -> None:
    """A table for each width."""
    for width in (64,) if bench.quick else WIDTHS:
        measure(bench, width)


def measure(bench: Bench, width: int) -> None:
    """One table: a width, by number of rows and form."""
    norms = {form: Norms(bench.threads, width, *reader) for form, reader in READERS.items()}
    rounds = bench.rounds(
        {
            (form, rows): bench.busy(lambda n=n, r=rows: n.seconds(r))
            for form, n in norms.items()
            for rows in PASSES
        }
    )
    table = [
        {"rows": rows}
        | {
            f"{form}_ns_a_row": rounds.spread(
                lambda seconds, rows=rows: seconds * 1e9 / rows, (form, rows)
            )
            for form in READERS
        }
        for rows in PASSES
    ]
    bench.table("norm", f"norm and pack, width {width:,}", COLUMNS, table, width=width)


class Norms:
    """A plan of many norms of the same rows, and the linear op whose format decides the packing."""

    def __init__(self, threads: int, width: int, format_name: str, offset: bool) -> None:
        self.plan = plan = plain_plan(threads)
        rng = np.random.default_rng(3)
        x = embedded(plan, rng.standard_normal((max(PASSES), width), np.float32))
        packed, out = plan.add_buffer(width, "step", True), plan.add_buffer(16, "step", False)
        vector = plan.add_vector(rng.uniform(0.5, 1.5, width).astype(np.float32))
        for _ in range(OPS):
            plan.norm(packed, x, vector, -1, "rms", width, 1e-5)
        reader = random_stored(format_name, 16, width, seed=0)
        plan.linear(
            out,
            packed,
            plan.add_weight(format_name, 16, width, reader.parts["codes"], None),
            -1,
            -1,
            offset,
        )

    def seconds(self, num_rows: int) -> float:
        """Seconds of one norm."""
        batch = [single_rows(num_rows)]
        return (
            statistics.median(op_seconds(self.plan, batch)["norm"] for _ in range(PASSES[num_rows]))
            / OPS
        )


if __name__ == "__main__":
    main(__doc__, norm)
