"""Products of bf16 weights by torch's library (cuBLAS) next to ours: their bits and their time.

    python benchmarks/cuda/library.py  adds to benchmarks/cuda/results/<name of the GPU>.json
    python benchmarks/cuda/library.py --smoke      whether it runs at all, in Triton's interpreter

The library computes all that our kernel does: sums in float32, one call for each range of columns,
then the residual, or gate and up. So the comparison has no advantage that a model would not have.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs  # before torch, which must know where kernels run
import torch
from results import Results
from tiles import SHAPES

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.elementwise import glu
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.tiles import splits_for
from headrace.backend.cuda.launch import blocks
from headrace.backend.cuda.layout import WeightLayout
from headrace.backend.cuda.packing import PackedWeight
from headrace.backend.cuda.random_weight import random_weight
from headrace.backend.cuda.stream import make_stream
from headrace.backend.cuda.timing import seconds
from headrace.backend.cuda.tune import COLD_BYTES
from headrace.backend.cuda.workspace import Workspace

ROWS = (64, 128, 256, 512, 1024, 2048)
Run = Callable[[], Any]


def multiply(out: Any, x: Any, weight: Any, added: Any = None) -> None:
    """Compute out = x @ weight.T + added with sums in float32."""
    if is_interpreting():  # sums in float64 are those of the interpreter, in one tile of columns
        sums = (x.double() @ weight.T.double()).float()
        out.copy_(sums if added is None else sums + added)
    elif added is None:
        torch.ops.aten.mm.dtype_out(x, weight.T, torch.float32, out=out)
    else:
        torch.ops.aten.addmm.dtype_out(added, x, weight.T, torch.float32, out=out)


def by_library(out: Any, x: Any, weight: PackedWeight, residual: Any, splits: int) -> list[Run]:
    """The calls in place of our kernel, with its order of sums."""
    tile, gate = weight.layout.tile, out.shape[1] < weight.rows
    cuts = [tile * (i * blocks(weight.cols, tile) // splits) for i in range(splits)]
    cuts.append(weight.cols)
    has_more = gate or (residual is not None and splits > 1)
    sums = torch.empty(len(x), weight.rows, device=DEVICE) if has_more else out

    def multiply_range(i: int) -> Run:
        columns = slice(cuts[i], cuts[i + 1])
        first = None if has_more else residual
        return lambda: multiply(sums, x[:, columns], weight.codes[:, columns], sums if i else first)

    calls: list[Run] = [multiply_range(i) for i in range(splits)]
    if gate:
        calls.append(glu(out, sums[:, : out.shape[1]], sums[:, out.shape[1] :], "silu"))
    elif has_more:
        calls.append(lambda: torch.add(residual, sums, out=out))
    return calls


def compare(rows: int, shape: tuple[int, int, bool], what: str, rounds: int) -> dict[str, Any]:
    """Both products over weights that no cache holds; `shape` is outputs, columns and a gate."""
    outputs, cols, gate = shape
    count = blocks(1 if is_interpreting() else COLD_BYTES, 2 * outputs * cols)
    layout = WeightLayout("bf16")
    weights = [random_weight(layout, outputs * (1 + gate), cols, DEVICE) for _ in range(count)]
    splits = splits_for(weights[0].rows, cols, layout, torch.bfloat16)
    x = torch.randn(rows, cols, device=DEVICE).to(torch.bfloat16)
    residual = torch.randn(rows, outputs, device=DEVICE) if what in ("output", "down") else None
    dtype = torch.bfloat16 if gate else torch.float32
    ours, theirs = (torch.empty(rows, outputs, dtype=dtype, device=DEVICE) for _ in range(2))
    workspace = Workspace()
    runs: dict[str, list[Run]] = {"ours": [], "library": []}
    for weight in weights:
        runs["ours"].append(
            linear(
                ours,
                x,
                weight,
                residual=residual,
                gate=gate,
                activation="silu" if gate else "",
                workspace=workspace,
            )
        )
        runs["library"] += by_library(theirs, x, weight, residual, splits)

    stream, took = make_stream(), {}
    for name, launches in runs.items():
        for launch in launches:
            launch()
        graph = stream.capture(launches)  # type: ignore[arg-type]
        took[name] = min(seconds(graph, rounds, 1 if is_interpreting() else 3)) / count
    differing = float((ours != theirs).float().mean())
    about = {"product": what, "rows": rows, "ranges": splits, "differing": differing}
    return about | {f"{name}_us": 1e6 * time for name, time in took.items()}


def main() -> None:
    """Compare each product of 8B, for some numbers of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="rows of x")
    parser.add_argument("--rounds", type=int, default=5, help="measurements, of which one counts")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="sizes that are small enough for the interpreter"
    )
    args = parser.parse_args()
    small = {"qkv": (48, 64, False), "output": (48, 64, False), "gate and up": (32, 64, True)}
    results, found = Results(args.out), []
    for what, shape in (small if args.smoke else SHAPES).items():
        for rows in [3] if args.smoke else args.rows:
            found.append(one := compare(rows, shape, what, args.rounds))
            print(
                f"{what:12} {rows:5} rows: ours {one['ours_us']:,.1f} us, library "
                f"{one['library_us']:,.1f} us, {one['differing']:.1%} of the numbers differ",
                flush=True,
            )
            results.write("library", found)
            programs.forget()


if __name__ == "__main__":
    main()
