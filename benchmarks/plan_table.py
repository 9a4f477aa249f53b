"""Tables of `headrace plan --check --json` and of `benchmarks/memory.py` in Markdown.

headrace plan --check --json > benchmarks/plan/FILE.json
python benchmarks/plan_table.py benchmarks/plan/FILE.json
"""

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any


def summary(facts: dict[str, Any]) -> list[str]:
    lines = ["| time | points | median error | max error |", "|---|---|---|---|"]
    for kind, errors in facts["errors"].items():
        count = sum(point["kind"] == kind for point in facts["points"])
        lines.append(f"| {kind} | {count} | {errors['median']:.1%} | {errors['max']:.1%} |")
    return lines


def points(facts: dict[str, Any]) -> list[str]:
    """A line for each model, format and kind, with all of its points."""
    lines = ["| model | time | sequences: predicted, measured in ms, error |", "|---|---|---|"]
    key = lambda point: (point["model"], point["format"], point["kind"])  # noqa: E731
    for (model, format, kind), found in groupby(sorted(facts["points"], key=key), key):
        cells = "; ".join(
            f"{p['name']}: {p['predicted'] * 1e3:.1f}, {p['measured'] * 1e3:.1f}, {p['error']:+.0%}"
            for p in found
        )
        lines.append(f"| {model} {format} | {kind} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    facts = json.loads(parser.parse_args().file.read_text())
    print("\n".join([*summary(facts), "", *points(facts)]))


if __name__ == "__main__":
    main()
