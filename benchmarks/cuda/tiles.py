"""Speed of other tiles of linear ops than `kernels/tiles.py` chooses. Tiles change no bit.

    python benchmarks/cuda/tiles.py  writes benchmarks/cuda/results/<name of the GPU>.json
    python benchmarks/cuda/tiles.py --formats int4 --rows 1 16
    python benchmarks/cuda/tiles.py --smoke        whether it runs at all, in Triton's interpreter

For each product of the 8B model it prints the chosen tile and the fastest tile. Products read
several weights in turn, so that none is in the GPU's cache.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import programs  # before torch, which must know where kernels run
import torch
from figures import FORMATS
from programs import seconds
from results import Results

from headrace.backend.cuda.compile_kernels import compile_kernels
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.tiles import Tile, splits_for, tile_for
from headrace.backend.cuda.launch import Launch, blocks
from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.packing import PackedWeight
from headrace.backend.cuda.stream import make_stream
from headrace.backend.cuda.workspace import Workspace
from tests.backend.cuda.hollow import hollow_tensor, random_weight

SHAPES = {
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "gate and up": (14_336, 4096, True),
    "down": (4096, 14_336, False),
}
COLD_BYTES = 256 << 20
ROWS = (1, 16, 32, 64, 128, 512, 2048)


def others(chosen: Tile, splits: int) -> Iterator[Tile]:
    """Alternatives to the chosen tile, of the same sums; some do not fit."""
    heights = {chosen.block_m, max(16, chosen.block_m // 2), min(256, 2 * chosen.block_m)}
    if chosen.block_m <= 64:
        heights = {chosen.block_m}
    stages = {3, 4, 6, 8} if chosen.block_m < 64 else {2, 3, 4}
    for block_m, block_n, is_parallel, unroll, num_stages in product(
        heights, (64, 128), {False, splits > 1}, (1, 2), stages
    ):
        yield Tile(
            block_m=block_m,
            block_n=block_n,
            is_parallel=is_parallel,
            unroll=unroll,
            num_warps=block_n // 16,
            num_stages=num_stages,
        )


def fits(launch: Launch) -> bool:
    try:
        compile_kernels([launch])
        launch()
    except Exception:
        return False
    return True


def try_tiles(weights: list[PackedWeight], rows: int, outputs: int, gate: bool) -> dict[str, Any]:
    """The time of a product with the chosen tile and with the fastest tile."""
    layout, cols, stream = weights[0].layout, weights[0].cols, make_stream()
    x = torch.randn(rows, cols, device=DEVICE).to(torch.bfloat16)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
    workspace = Workspace()
    splits = splits_for(weights[0].rows, cols, layout, torch.bfloat16)
    chosen = tile_for(rows, weights[0].rows, cols, layout, torch.bfloat16, splits=splits)

    def launch(weight: PackedWeight, tile: Tile) -> Launch:
        activation = "silu" if gate else ""
        return linear(
            out, x, weight, gate=gate, activation=activation, workspace=workspace, tile=tile
        )

    took: dict[Tile, float] = {}
    candidates = [chosen] if is_interpreting() else dict.fromkeys([chosen, *others(chosen, splits)])
    for tile in candidates:
        launches = [launch(weight, tile) for weight in weights]
        if fits(launches[0]):
            run = stream.capture(launches)
            took[tile] = median(seconds(run, 1 if is_interpreting() else 5, 3)) / len(launches)
    best = min(took, key=lambda tile: took[tile])
    return {
        **{
            "bytes": layout.nbytes(weights[0].rows, cols),
            "operations": 2 * rows * weights[0].rows * cols,
            "tried": len(took),
        },
        **{
            "chosen": chosen._asdict(),
            "seconds": took[chosen],
            "best": best._asdict(),
            "best_seconds": took[best],
        },
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
    for name, (what, (outputs, cols, gate)) in product(args.formats, shapes.items()):
        layout = layout_of(hollow_tensor("w", FORMATS[name], (256, 256)))
        number = 2 if args.smoke else blocks(COLD_BYTES, layout.nbytes(outputs * (1 + gate), cols))
        weights = [random_weight(layout, outputs * (1 + gate), cols, DEVICE) for _ in range(number)]
        for rows in [1] if args.smoke else args.rows:
            one = try_tiles(weights, rows, outputs, gate)
            found.append({"format": name, "product": what, "rows": rows, **one})
            print(
                f"{name} {what:12} {rows:5} rows: {text(one, '')}; best {text(one, 'best_')}",
                flush=True,
            )
            results.write("products", found)
        del weights
        programs.forget()


if __name__ == "__main__":
    main()
