"""Linear ops of many rows: share of the measured multiply-add rate.

From about 16 rows on, arithmetic is the limit and not memory. The roof is a chain of dot products
on registers, int8 or bf16. A kernel also decodes weights, applies scales and loads activations.
Formats with group scales are measured with both forms of int8 activations: symmetric, and with the
offset of queries, keys, values and the head.
"""

from harness import Bench, Column, main, verdict
from native import LinearPlan

from headrace.program.op import Kind
from headrace.quant.formats import FORMATS, StoredTensor
from tests.backend.stored import random_stored

NAMES = ("Q4_0", "Q4_1", "Q8_0", "I8_ROW", "Q4_K", "Q6_K", "BF16")
SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192), (576, 576), (1536, 576), (576, 1536))
ROWS = (16, 32, 64, 128, 512)
COLUMNS = (
    Column("rows", "rows"),
    Column("microseconds", "us", ",.0f"),
    Column("g_operations_s", "G operations/s", ",.0f"),
    Column("roof_share", "of the roof", ".0%"),
    Column("target", "target"),
    Column("offset_share", "with offset", ".0%"),
)
TARGETS = {"Q4_0": 0.72, "Q4_1": 0.66, "Q4_K": 0.66, "Q8_0": 0.68, "I8_ROW": 0.95, "BF16": 0.95}
"""Min share of the roof, with symmetric activations."""
SIXTEEN_ROWS = {"Q4_0": 0.70}
"""Exceptions at 16 rows, which are still limited by reading weights."""


def gemm(bench: Bench) -> None:
    """All formats and shapes. Formats with super-blocks cannot have 576 columns."""
    for name in NAMES:
        for shape in ((64, 256),) if bench.quick else SHAPES:
            if shape[1] % FORMATS[name].block == 0:
                measure(bench, random_stored(name, *shape, seed=0))


def measure(bench: Bench, stored: StoredTensor) -> None:
    """One table: a weight, by number of rows."""
    name, by_group = stored.format.name, stored.format.block > 1
    kind: Kind = "int8" if stored.format.quantised else "bf16"
    num_rows = ROWS[:2] if bench.quick else ROWS
    min_bytes = bench.cold_bytes // 4  # twice a large cache: enough to keep 16 rows honest
    plans = {
        offset: LinearPlan(stored, bench.threads, min_bytes, max(num_rows), offset)
        for offset in {False, by_group}
    }
    kernels = {
        (offset, rows): bench.busy(lambda p=p, rows=rows: p.seconds(rows))
        for offset, p in plans.items()
        for rows in num_rows
    }
    rounds = bench.rounds({"roof": bench.rate(kind)} | kernels)
    table = []
    for rows in num_rows:
        flops = 2 * rows * stored.rows * stored.cols
        shares = {
            offset: rounds.spread(
                lambda seconds, roof, flops=flops: flops / seconds / roof, (offset, rows), "roof"
            )
            for offset in plans
        }
        minimum = SIXTEEN_ROWS.get(name, TARGETS.get(name)) if rows == 16 else TARGETS.get(name)
        table.append(
            {
                "rows": rows,
                "microseconds": rounds.spread(lambda seconds: seconds * 1e6, (False, rows)),
                "g_operations_s": rounds.spread(
                    lambda seconds, flops=flops: flops / seconds / 1e9, (False, rows)
                ),
                "roof_share": shares[False],
                "target": verdict(shares[False], minimum=minimum) if minimum else "",
                "offset_share": shares.get(True, ""),
            }
        )
    roof = rounds.spread(lambda rate: rate / 1e9, "roof")
    plan = plans[False]
    title = (
        f"gemm {name} {stored.rows} x {stored.cols}: {plan.copies} copies, "
        f"error {max(p.error for p in plans.values()):.1e}; roof {roof.text(',.0f')} G "
        f"{kind} operations/s"
    )
    facts = {
        "format": name,
        "shape": stored.shape,
        "errors": [p.error for p in plans.values()],
        "roof_g_operations_s": roof,
    }
    bench.table("gemm", title, COLUMNS, table, **facts)


if __name__ == "__main__":
    main(__doc__, gemm)
