"""Prints the result file of a GPU as the tables of docs/internals/gpu-measured.md.

python benchmarks/cuda/report.py          of the files in benchmarks/cuda/results
python benchmarks/cuda/report.py FILE...
python benchmarks/cuda/report.py --write  writes them to docs/internals/gpu-measured.md
"""

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs/internals/gpu-measured.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def report(found: dict[str, Any]) -> str:
    """The sections of a result file in Markdown."""
    about = found["machine"]
    software = f"torch {about['torch']}, Triton {about['triton']}"
    parts = [f"**{about['gpu']}**, {software}, {about['day']}."]
    if checks := found.get("checks"):
        failed = [check for check in checks if not check["holds"]]
        parts[0] += f" Of {len(checks)} checks {len(checks) - len(failed)} hold."
        if failed:
            parts.append("\n".join(f"- fails: {one['check']}: {one['wrong']}" for one in failed))
    if figures := found.get("figures"):
        paper = found.get("paper", {})
        rows = [row_of(figure, paper.get(figure["name"])) for figure in figures]
        parts.append(table(["figure", "median (min to max)", "on paper", "target"], rows))
        parts += [kernels_of(figure) for figure in figures if "one row" in figure["name"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def row_of(figure: dict[str, Any], paper: float | None) -> list[str]:
    unit, sign = figure["unit"], "at most" if figure["less_is_better"] else "at least"
    value, low, high = (number(figure[name], unit) for name in ("value", "low", "high"))
    target = ""
    if figure["floor"] is not None:
        verdict = "reached" if figure["is_reached"] else "missed"
        target = f"{sign} {number(figure['floor'], unit)}: {verdict}"
    predicted = "" if paper is None else number(paper, unit)
    return [figure["name"], f"{value} ({low} to {high}) {unit}".rstrip(), predicted, target]


def kernels_of(figure: dict[str, Any]) -> str:
    """The kernels of a step that take longest, with their shares of the copy bandwidth."""
    kernels = figure["more"].get("kernels", [])
    if not kernels:
        return ""
    rows = [
        [
            f"`{one['kernel']}`",
            str(one["launches"]),
            f"{1e3 * one['ms'] / one['launches']:.1f}",
            f"{one['ms']:.2f}",
            f"{1e-6 * one['bytes']:,.0f}",
            f"{one['share']:.0%}",
        ]
        for one in kernels
        if one["ms"] >= 0.01
    ]
    heads = ["kernel", "launches", "µs each", "ms", "MB", "of copy bandwidth"]
    return f"Kernels of *{figure['name'].partition(':')[0]}*, one row:\n\n{table(heads, rows)}"


def number(value: float, unit: str) -> str:
    if not unit:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(paths: list[Path]) -> str:
    return "\n".join(report(json.loads(path.read_text())) for path in paths)


def written(page: str, made: str) -> str:
    """The page with the tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="result files (default: all)")
    parser.add_argument("--write", action="store_true", help="write docs/internals/gpu-measured.md")
    args = parser.parse_args()
    made = tables(args.files or sorted(RESULTS.glob("*.json")))
    if args.write:
        PAGE.write_text(written(PAGE.read_text(), made))
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
