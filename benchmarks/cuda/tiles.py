"""Speed of other tiles of linear ops than `kernels/tiles.py` chooses. Tiles change no bit.

    python benchmarks/cuda/tiles.py  writes benchmarks/cuda/results/<name of the GPU>.json
    python benchmarks/cuda/tiles.py --formats int4 --rows 1 16
    python benchmarks/cuda/tiles.py --smoke        whether it runs at all, in Triton's interpreter

For each product of the 8B model it prints the tile of the rule and the fastest tile, as `headrace
tune` times them for the weights of any model.
"""

import argparse
from pathlib import Path
from typing import Any

import programs  # before torch, which must know where kernels run
import torch
from figures import FORMATS
from results import Results

from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.tune import Linear, Tuner, candidates
from tests.backend.cuda.hollow import hollow_tensor

SHAPES = {
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "gate and up": (14_336, 4096, True),
    "down": (4096, 14_336, False),
}
ROWS = (1, 16, 32, 64, 128, 512, 2048)


def try_tiles(tuner: Tuner, num_rows: int) -> dict[str, Any]:
    """The time of a product with the rule's tile and with the fastest tile."""
    weight, chosen = tuner.weight, tuner.rule_tile(num_rows)
    took = tuner.time(num_rows, dict.fromkeys([chosen, *candidates(weight, chosen)]))
    best = min(took, key=lambda tile: took[tile])
    return {
        "bytes": weight.layout.nbytes(weight.rows, weight.cols),
        "operations": 2 * num_rows * weight.rows * weight.cols,
        "tried": len(took),
        "chosen": chosen._asdict(),
        "seconds": took[chosen],
        "best": best._asdict(),
        "best_seconds": took[best],
    }


def text(one: dict[str, Any], which: str) -> str:
    """A tile with its time."""
    took, tile = one[f"{which}seconds"], one["best" if which else "chosen"]
    return (
        f"{1e-9 * one['bytes'] / took:,.0f} GB/s, {1e-12 * one['operations'] / took:,.0f} "
        f"TFLOPS {tuple(tile.values())}"
    )


def main() -> None:
    """Time the tiles of each product, in each format and for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=list(FORMATS),
        help="number formats of weights (default: all)",
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="rows of x")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="sizes that are small enough for the interpreter"
    )
    args = parser.parse_args()
    shapes = {"output": (48, 256, False)} if args.smoke else SHAPES
    results = Results(args.out)
    found = []
    for name in args.formats:
        layout = layout_of(hollow_tensor("w", FORMATS[name], (256, 256)))
        for what, (outputs, cols, gate) in shapes.items():
            tuner = Tuner(
                Linear(
                    layout=layout,
                    rows=outputs * (1 + gate),
                    cols=cols,
                    is_gated=gate,
                    activations=torch.bfloat16,
                    stored=torch.bfloat16,
                    max_rows=max(ROWS),
                )
            )
            for rows in [1] if args.smoke else args.rows:
                one = try_tiles(tuner, rows)
                found.append({"format": name, "product": what, "rows": rows, **one})
                print(
                    f"{name} {what:12} {rows:5} rows: {text(one, '')}; best {text(one, 'best_')}",
                    flush=True,
                )
                results.write("products", found)
            del tuner
            programs.forget()


if __name__ == "__main__":
    main()
