"""Mixtures of experts on cold weights: share of the memory bandwidth, by the number of decoding
rows.

A step reads each chosen expert once, so its bytes grow with the rows until all experts are chosen.
The table also has a dense GluLinear with the width of one row's experts and the mean rows of an
expert. The extra time per byte of experts is the cost of gathering rows and of many small products.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from harness import Bench, Column, main
from native import embedded, op_seconds, plain_plan, run, single_rows

from headrace import _native
from headrace.batch import RaggedBatch
from tests.backend.stored import random_stored

FORMAT = "Q4_0"
ROWS = (1, 2, 4, 8, 16, 32)
TOKENS = 32
"""Different rows of a sample, so that little comes from a cache. Each step runs some of them."""
COLUMNS = (
    Column("rows", "rows"),
    Column("hit", "experts hit"),
    Column("microseconds", "us", ",.0f"),
    Column("weight_gb_s", "weights GB/s", ".1f"),
    Column("roof_share", "of bandwidth", ".0%"),
    Column("dense_rows", "dense rows"),
    Column("to_dense", "time to dense, by byte", ".2f"),
)


class Shape(NamedTuple):
    """(experts, top_k, width of a row, width of an expert)"""

    experts: int
    top_k: int
    dim: int
    hidden: int


SHAPES = (Shape(16, 2, 2048, 4096), Shape(64, 8, 2048, 1024))


def experts(bench: Bench) -> None:
    """A table for each shape."""
    for shape in (Shape(4, 2, 64, 64),) if bench.quick else SHAPES:
        measure(bench, shape)


def measure(bench: Bench, shape: Shape) -> None:
    """One table: a shape, by number of rows."""
    mixture, dense = (
        MoePlan(shape, bench.threads),
        DensePlan(shape, bench.threads, bench.cold_bytes),
    )
    dense_rows = {
        rows: max(1, round(rows * shape.top_k / mixture.experts_hit(rows))) for rows in ROWS
    }
    things = {"roof": bench.bandwidth()} | {
        rows: bench.busy(lambda rows=rows: mixture.seconds(rows)) for rows in ROWS
    }
    things |= {
        ("dense", n): bench.busy(lambda n=n: dense.seconds(n))
        for n in sorted(set(dense_rows.values()))
    }
    rounds = bench.rounds(things)
    table = []
    for rows in ROWS:
        nbytes = mixture.experts_hit(rows) * mixture.expert_bytes
        table.append(
            {
                "rows": rows,
                "hit": round(mixture.experts_hit(rows), 1),
                "microseconds": rounds.spread(lambda seconds: seconds * 1e6, rows),
                "weight_gb_s": rounds.spread(
                    lambda seconds, nbytes=nbytes: nbytes / seconds / 1e9, rows
                ),
                "roof_share": rounds.spread(
                    lambda seconds, roof, nbytes=nbytes: nbytes / seconds / roof, rows, "roof"
                ),
                "dense_rows": dense_rows[rows],
                "to_dense": rounds.spread(
                    lambda seconds, other, nbytes=nbytes: (
                        (seconds / nbytes) / (other / dense.unit_bytes)
                    ),
                    rows,
                    ("dense", dense_rows[rows]),
                ),
            }
        )
    roof = rounds.spread(lambda rate: rate / 1e9, "roof")
    title = (
        f"{shape.experts} experts {FORMAT} {shape.hidden} x {shape.dim}, {shape.top_k} for a "
        f"row; roof {roof.text('.1f')} GB/s"
    )
    bench.table("experts", title, COLUMNS, table, shape=shape, format=FORMAT, roof_gb_s=roof)


class MoePlan:
    """One op over experts with random choices."""

    def __init__(self, shape: Shape, threads: int) -> None:
        self.plan = plan = plain_plan(threads)
        rng = np.random.default_rng(5)
        x, logits = (
            embedded(plan, rng.standard_normal((TOKENS, width), np.float32))
            for width in (shape.dim, shape.experts)
        )
        routing, out = (
            plan.add_buffer(2 * shape.top_k, "step", False),
            plan.add_buffer(shape.dim, "step", False),
        )
        before, weights = (
            plan.weight_bytes,
            list(
                zip(
                    *(add_unit(plan, shape.dim, shape.hidden) for _ in range(shape.experts)),
                    strict=True,
                )
            ),
        )
        self.expert_bytes = (plan.weight_bytes - before) // shape.experts
        plan.route(routing, logits, shape.top_k, "softmax", True, 1.0, (1, 1), -1)
        plan.experts(out, x, routing, tuple(map(list, weights)), ([], [], []), "silu")

    def seconds(self, num_rows: int) -> float:
        """Seconds of a step."""
        batches = self._batches(num_rows)
        return op_seconds(self.plan, batches)["experts"] / len(batches)

    def experts_hit(self, num_rows: int) -> float:
        """Mean experts that a step reads."""
        hit = []
        for batch in self._batches(num_rows):
            before = self._loads()
            run(self.plan, batch)
            hit.append(int(np.count_nonzero(self._loads() - before)))
        return statistics.mean(hit)

    def _loads(self) -> np.ndarray:
        return np.array(self.plan.expert_loads())

    @staticmethod
    def _batches(num_rows: int) -> Sequence[RaggedBatch]:
        tokens = np.arange(TOKENS, dtype=np.int32)
        return [
            single_rows(num_rows)._replace(tokens=tokens[first : first + num_rows])
            for first in range(0, TOKENS, num_rows)
        ]


class DensePlan:
    """GluLinear ops with one input and separate weights, with enough bytes to leave every cache."""

    def __init__(self, shape: Shape, threads: int, min_bytes: int) -> None:
        self.plan = plan = plain_plan(threads)
        width = shape.top_k * shape.hidden
        loose = embedded(
            plan, np.random.default_rng(6).standard_normal((max(ROWS), shape.dim), np.float32)
        )
        x, hidden, out = (
            plan.add_buffer(*buffer)
            for buffer in (
                (shape.dim, "step", True),
                (width, "step", True),
                (shape.dim, "step", False),
            )
        )
        plan.pack(x, loose)
        before, self.units, self.unit_bytes = plan.weight_bytes, 0, 0
        while self.units * self.unit_bytes < min_bytes:
            gate, up, down = add_unit(plan, shape.dim, width)
            plan.glu_linear(hidden, x, gate, up, -1, -1, "silu")
            plan.linear(out, hidden, down, -1, -1, False)
            self.units += 1
            self.unit_bytes = (plan.weight_bytes - before) // self.units

    def seconds(self, num_rows: int) -> float:
        """Seconds of one unit."""
        seconds = op_seconds(self.plan, [single_rows(num_rows)])
        return (seconds["glu_linear"] + seconds["linear"]) / self.units


def add_unit(plan: _native.Plan, dim: int, hidden: int) -> tuple[int, int, int]:
    """The weights gate, up and down."""
    wide, narrow = (
        random_stored(FORMAT, hidden, dim, 0).parts["codes"],
        random_stored(FORMAT, dim, hidden, 1).parts["codes"],
    )
    gate, up = plan.add_weight_pair(FORMAT, wide, None, FORMAT, wide, None, hidden, dim)
    return gate, up, plan.add_weight(FORMAT, dim, hidden, narrow, None)


if __name__ == "__main__":
    main(__doc__, experts)
