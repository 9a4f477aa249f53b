"""Linear ops of few rows on cold weights: share of the memory bandwidth, and the cost of more rows.

One row reads each weight once, so bandwidth is the roof. A few more rows (a small batch, or drafts)
should be nearly free, until arithmetic is the limit: the roof is the larger of the two times. Bytes
count the packed weight.
"""

from harness import Bench, Column, main, verdict
from native import LinearPlan

from headrace.program.op import Kind
from headrace.quant.format_names import named_format
from tests.backend.stored import random_stored
from tests.tables import random_codes

NAMES = ("Q4_0", "Q4_1", "Q8_0", "I8_ROW", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16")
TABLES = ("int2-g128", "int3-g128", "int4-g128", "int8-g128", "nf4-g64", "iq4_nl")
SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192))
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
COLUMNS = (
    Column("rows", "rows"),
    Column("microseconds", "us", ".1f"),
    Column("weight_gb_s", "weights GB/s", ".1f"),
    Column("roof_share", "of bandwidth", ".0%"),
    Column("limit_share", "of the limit", ".0%"),
    Column("to_one_row", "time to 1 row's", ".2f"),
    Column("target", "target"),
)
MIN_SHARE = 0.95
"""Min share of the bandwidth at one row."""
MAX_FOR_FIVE = 1.08
"""Max time of five rows, relative to one row."""


def gemv(bench: Bench) -> None:
    """All formats and shapes."""
    for name in NAMES + TABLES:
        for shape in ((64, 256),) if bench.quick else SHAPES:
            measure(bench, name, shape)


def measure(bench: Bench, name: str, shape: tuple[int, int]) -> None:
    """One table: a weight, by number of rows."""
    stored = (
        random_codes(named_format(name), *shape, seed=0)
        if name in TABLES
        else random_stored(name, *shape, seed=0)
    )
    linear = LinearPlan(stored, bench.threads, bench.cold_bytes, max(ROWS))
    kernels = {rows: bench.busy(lambda rows=rows: linear.seconds(rows)) for rows in ROWS}
    kind: Kind = "int8" if stored.format.quantised else "bf16"
    rounds = bench.rounds({"roof": bench.bandwidth(), "rate": bench.rate(kind)} | kernels)

    def limit(rows: int, bandwidth: float, rate: float) -> float:
        return max(linear.weight_bytes / bandwidth, 2 * rows * shape[0] * shape[1] / rate)

    table = []
    for rows in ROWS:
        share = rounds.spread(
            lambda seconds, roof: linear.weight_bytes / seconds / roof, rows, "roof"
        )
        to_one = rounds.spread(lambda seconds, one: seconds / one, rows, 1)
        table.append(
            {
                "rows": rows,
                "microseconds": rounds.spread(lambda seconds: seconds * 1e6, rows),
                "weight_gb_s": rounds.spread(
                    lambda seconds: linear.weight_bytes / seconds / 1e9, rows
                ),
                "roof_share": share,
                "limit_share": rounds.spread(
                    lambda seconds, *roof, rows=rows: limit(rows, *roof) / seconds,
                    rows,
                    "roof",
                    "rate",
                ),
                "to_one_row": to_one,
                "target": verdict(share, minimum=MIN_SHARE)
                if rows == 1
                else verdict(to_one, maximum=MAX_FOR_FIVE)
                if rows == 5
                else "",
            }
        )
    roof = rounds.spread(lambda rate: rate / 1e9, "roof")
    title = (
        f"gemv {name} {shape[0]} x {shape[1]}: {linear.bits:.2f} bits a weight, "
        f"{linear.copies} copies, "
        f"error {linear.error:.1e}; roof {roof.text('.1f')} GB/s"
    )
    facts = {
        "format": name,
        "shape": shape,
        "bits": linear.bits,
        "error": linear.error,
        "roof_gb_s": roof,
    }
    bench.table("gemv", title, COLUMNS, table, **facts)


if __name__ == "__main__":
    main(__doc__, gemv)
