"""Speed of the GPU backend: bandwidth, arithmetic, tokens and host time, each with its target.

    python benchmarks/cuda        writes benchmarks/cuda/results/<name of the GPU>.json
    python benchmarks/cuda --models 8b --out FILE
    python benchmarks/cuda --smoke                 whether it runs at all, in Triton's interpreter

Weights are random, and made on the GPU. Figures are medians (min-max).
"""

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs  # before torch, which must know where kernels run
from figures import FORMATS, SMOKE, Figure, Sizes, copy_bandwidth, long_contexts, model_figures
from results import Results

from headrace.measure.table import print_table


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


def row_of_kernel(kernel: dict[str, Any]) -> str:
    """A kernel of a step, with its share of the copy bandwidth."""
    each = 1e3 * kernel["ms"] / kernel["launches"]
    return (
        f"{'':16}{kernel['kernel']:40} {kernel['launches']:4} x {each:7.1f} us"
        f" = {kernel['ms']:6.3f} ms, {1e-6 * kernel['bytes']:9.1f} MB, {kernel['share']:5.0%}"
    )


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
    results, begun = Results(args.out), time.perf_counter()
    copied = copy_bandwidth(sizes)
    found = [copied]

    def add(figure: Figure) -> None:
        found.append(figure)
        print(f"{time.perf_counter() - begun:6.0f} s  {'  '.join(row_of(figure))}", flush=True)
        for kernel in figure.more.get("kernels", []):
            print(row_of_kernel(kernel), flush=True)
        results.write("figures", [one.as_json() for one in found])

    failed = list[str]()

    def add_all(name: str, figures: Iterable[Figure]) -> None:
        try:
            for figure in figures:
                add(figure)
        except Exception as error:  # other figures are still worth having
            failed.append(f"{name}: {type(error).__name__}: {error}"[:400])
            print(f"FAILS  {failed[-1]}", flush=True)
        programs.forget()

    for spec in sizes.specs:
        for number in args.formats:
            add_all(f"{spec} {number}", model_figures(spec, number, 1e9 * copied.value, sizes))
    add_all("long contexts", long_contexts(1e9 * copied.value, sizes))
    print()
    print_table(["figure", "median (min-max)", "target"], [row_of(figure) for figure in found])
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
