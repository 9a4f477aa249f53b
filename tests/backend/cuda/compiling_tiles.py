"""Compiles the tiles that `headrace tune` tries, for GPUs, on a machine that needs none.

    TRITON_INTERPRET=0 python -m tests.backend.cuda.compiling_tiles sm_90 Q4_0 --rows 1 --every 7

Prints a line of JSON for each: the tile, its loop and registers, instructions a weight, and the
order of the columns that an instruction sums.
"""

import argparse
import json
from typing import Any

import torch

from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.tiles import Tile, rule_tile
from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.random_weight import random_weight
from headrace.backend.cuda.tune import Linear, candidates
from tests.backend.cuda.compiling import CHIPS, META, compile_launch, loop_weights, pretend
from tests.backend.cuda.hollow import hollow_tensor

ROWS, COLS = 28_672, 4096
"""Gate and up of an 8B model."""


def line_of(weight: Linear, tile: Tile, num_rows: int) -> dict[str, Any]:
    """Compile the product of a weight, and describe it."""
    x = torch.empty(num_rows, COLS, dtype=torch.bfloat16, device=META)
    out = torch.empty(num_rows, ROWS, dtype=torch.bfloat16, device=META)
    matrix = random_weight(weight.layout, ROWS, COLS, META)
    launch = linear(out, x, matrix, activations=torch.bfloat16, tile=tile)
    needs = compile_launch(launch)
    threads = 32 * needs["warps"]
    return {
        "tile": tile._asdict(),
        "instructions_a_weight": threads * needs["loop"]["instructions"] / loop_weights(launch),
        "spills": needs["loop"]["local"],
        **{name: needs[name] for name in ("reg", "shared", "dots")},
    }


def main() -> None:
    """Compile the rule's tile, and some of the candidates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chip", choices=CHIPS)
    parser.add_argument("format", help="number format of the weight, as in a file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="rows of steps")
    parser.add_argument("--every", type=int, default=1, help="distance of compiled candidates")
    args = parser.parse_args()
    pretend(CHIPS[args.chip])
    layout = layout_of(hollow_tensor("w", args.format, (256, 256)))
    weight = Linear(
        layout=layout,
        rows=ROWS,
        cols=COLS,
        is_gated=False,
        activations=torch.bfloat16,
        stored=torch.bfloat16,
        max_rows=2048,
    )
    for num_rows in args.rows:
        rule = rule_tile(num_rows, ROWS, COLS, layout, torch.bfloat16, splits=weight.splits)
        others = list(candidates(weight, rule))[:: args.every]
        for tile in dict.fromkeys([rule, *others]):
            print(json.dumps({"rows": num_rows, **line_of(weight, tile, num_rows)}), flush=True)


if __name__ == "__main__":
    main()
