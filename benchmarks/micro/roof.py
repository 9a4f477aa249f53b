"""The roof: max bandwidth, multiply-adds and barriers of this machine, with one thread and with
all.

`headrace doctor` uses the same native loops. Every op of a step ends with a barrier. It is timed
with ops that have no work item, one item, and one item per thread.
"""

import statistics
import time

import numpy as np
from harness import Bench, Column, Timed, main
from native import embedded, plain_plan, run, single_rows

from headrace.planner.hardware import KINDS

OPS = 2000
PASSES = 9
COLUMNS = (
    Column("what", "what"),
    Column("threads", "threads"),
    Column("figure", "figure", ",.1f"),
    Column("unit", "unit"),
    Column("to_one_thread", "to 1 thread's", ".2f"),
)


def roof(bench: Bench) -> None:
    """One table."""
    counts = sorted({1, bench.threads})
    things = {("memory read", n): bench.bandwidth(n) for n in counts}
    things |= {(f"{kind} multiply-adds", n): bench.rate(kind, n) for kind in KINDS for n in counts}
    items = {"no item": 0, "1 item": 1, "an item a thread": bench.threads}
    things |= {
        (f"barrier, {name}", n): Timed(Barriers(n, count).seconds, n)
        for name, count in items.items()
        for n in counts
    }
    rounds = bench.rounds(things)
    table = []
    for what, threads in things:
        unit, factor = (
            ("ns", 1e9)
            if what.startswith("barrier")
            else ("GB/s" if what == "memory read" else "G operations/s", 1e-9)
        )
        figure = rounds.spread(lambda value, factor=factor: value * factor, (what, threads))
        scaling = rounds.spread(lambda value, one: value / one, (what, threads), (what, 1))
        table.append(
            {
                "what": what,
                "threads": threads,
                "figure": figure,
                "unit": unit,
                "to_one_thread": scaling,
            }
        )
    bench.table("roof", "roof", COLUMNS, table)


class Barriers:
    """A plan of ops that gather a row of 16 numbers for each of `items` logit rows."""

    def __init__(self, threads: int, items: int) -> None:
        self.plan = plain_plan(threads)
        self.batch = single_rows(max(items, 1), logits=items > 0)
        x = embedded(self.plan, np.ones((max(items, 1), 16), np.float32))
        out = self.plan.add_buffer(16, "gathered", False)
        for _ in range(OPS):
            self.plan.gather_rows(out, x)

    def seconds(self) -> float:
        """Seconds of one op; in the median run all threads are awake."""
        return statistics.median(self._run() for _ in range(PASSES)) / OPS

    def _run(self) -> float:
        start = time.perf_counter()
        run(self.plan, self.batch)
        return time.perf_counter() - start


if __name__ == "__main__":
    main(__doc__, roof)
