"""Speed of the GPU backend: bandwidth, arithmetic, tokens and host time, each with its target.

    python benchmarks/cuda        writes benchmarks/cuda/results/<name of the GPU>.json
    python benchmarks/cuda --models 8b --out FILE
    python benchmarks/cuda --smoke                 whether it runs at all, in Triton's interpreter

Weights are random, and made on the GPU. Figures are medians (min-max).
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import programs  # before torch, which must know where kernels run
import torch
import triton
from figures import FORMATS, SMOKE, Figure, Sizes, copy_bandwidth, long_contexts, model_figures

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.measure.table import print_table


def machine() -> dict[str, object]:
    """The GPU and the software of the measurement."""
    versions = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    if is_interpreting():
        return {"gpu": "interpreter", **versions}
    about = torch.cuda.get_device_properties(0)
    return {
        "gpu": about.name,
        "multiprocessors": about.multi_processor_count,
        "l2_bytes": about.L2_cache_size,
        **versions,
    }


def text(number: float) -> str:
    """A number with three digits, or without decimals."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def row_of(figure: Figure) -> list[str]:
    sign = "at most" if figure.less_is_better else "at least"
    wanted = (
        ""
        if figure.floor is None
        else f"{sign} {text(figure.floor)}: {'yes' if figure.is_reached else 'NO'}"
    )
    spread = f"{text(figure.value)} ({text(figure.low)}-{text(figure.high)}) {figure.unit}"
    return [figure.name, spread.strip(), wanted]


def main() -> None:
    """Measure, write the results, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", help="models: 135m, 1b, 8b (default: all)")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=list(FORMATS),
        help="number formats of weights (default: all)",
    )
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument(
        "--smoke", action="store_true", help="sizes that are small enough for the interpreter"
    )
    args = parser.parse_args()
    sizes = SMOKE if args.smoke else Sizes()
    sizes = replace(sizes, specs=tuple(args.models)) if args.models else sizes
    about, begun = machine(), time.perf_counter()
    out = args.out or Path(__file__).parent / f"results/{str(about['gpu']).replace(' ', '-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    copied = copy_bandwidth(sizes)
    found = [copied]

    def add(figure: Figure) -> None:
        found.append(figure)
        print(f"{time.perf_counter() - begun:6.0f} s  {'  '.join(row_of(figure))}", flush=True)
        out.write_text(
            json.dumps({"machine": about, "figures": [one.as_json() for one in found]}, indent=1)
            + "\n"
        )

    for spec in sizes.specs:
        for number in args.formats:
            for figure in model_figures(spec, number, 1e9 * copied.value, sizes):
                add(figure)
            programs.forget()
    for figure in long_contexts(1e9 * copied.value, sizes):
        add(figure)
    print()
    print_table(["figure", "median (min-max)", "target"], [row_of(figure) for figure in found])


if __name__ == "__main__":
    main()
