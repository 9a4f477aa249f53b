"""Tune the matrix products of a model on the GPU: time the tiles of each weight, for few rows and
for many, and store the fastest.

Later engines on this GPU read the stored tiles when they load a model with these weights. A tile
changes the speed, and no result. Stop it at any time: finished products are kept, and the next
call goes on.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import (
    add_activations,
    add_json,
    add_model,
    number,
    whole_numbers,
)
from headrace.cli.output_file import check_writable
from headrace.cli.terminal import print_stderr

if TYPE_CHECKING:
    from headrace.measure.tune import TunedProduct, Tuning

EXAMPLES = """\
  headrace tune smollm2
  headrace tune MODEL --rows 1,16 --max-seconds 60
  headrace tune MODEL --out tiles.json --json"""

_ROWS = "1,16,32,64,128,256,512,2048"
_MAX_ROWS = 2**20
_MAX_SECONDS = 10**7


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    measurement = parser.add_argument_group("measurement")
    measurement.add_argument(
        "--rows",
        type=whole_numbers(1, _MAX_ROWS),
        default=_ROWS,
        metavar="N,...",
        help="rows of the steps to tune for; a decoding step has a row for each sequence",
    )
    measurement.add_argument(
        "--max-seconds",
        type=number(0, _MAX_SECONDS),
        default=600.0,
        metavar="S",
        help="seconds after which no further product is begun",
    )
    add_activations(parser.add_argument_group("compute"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file for the tiles, which no engine reads there (default: `tiles/` in the cache "
        "folder, named after the GPU)",
    )
    add_json(output)


def run(args: argparse.Namespace) -> int:
    from headrace.measure.table import print_json
    from headrace.measure.tune import tune

    if args.out:
        check_writable("--out", args.out)
    tuning = tune(
        args.model,
        rows=args.rows,
        max_seconds=args.max_seconds,
        out=args.out,
        activations=args.activations,
        on_product=_show,
    )
    if args.json:
        print_json(tuning.facts())
    else:
        _print(tuning)
    return 0


def _show(product: "TunedProduct", done: int, total: int) -> None:
    print_stderr(
        f"{done} of {total}: {product.weight}, up to {product.max_rows:,} rows: "
        f"{product.microseconds_before:,.1f} us -> {product.microseconds:,.1f} us"
    )


def _print(tuning: "Tuning") -> None:
    from headrace.measure.table import print_table

    headings = ["weight", ">rows", "tile before", "tile now", ">us before", ">us now", ">gain"]
    rows = [
        [
            product.weight,
            f"{product.max_rows:,}",
            product.tile_before,
            product.tile,
            f"{product.microseconds_before:,.1f}",
            f"{product.microseconds:,.1f}",
            f"{product.gain:.0%}",
        ]
        for product in tuning.products
    ]
    print_table(headings, rows, f"Products on {tuning.gpu}")
    print(
        "\nrows: of the largest step that uses the tile; tile: rows of activations x rows of the "
        "weight, w warps, s stages of loads, u tiles a round; split: ranges of columns in parallel"
    )
    if tuning.num_left:
        print(f"{tuning.num_left} products are left: the time was over; run the command again.")
    print(f"{tuning.file} has {tuning.num_tiles} tiles.")
