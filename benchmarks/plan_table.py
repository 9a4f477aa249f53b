"""Tables of `headrace plan --check --json` in Markdown.

headrace plan --check --json > benchmarks/plan/FILE.json
python benchmarks/plan_table.py benchmarks/plan/FILE.json
"""

import argparse
import json
from pathlib import Path
from typing import Any


def summary(facts: dict[str, Any]) -> list[str]:
    lines = ["| time | points | median error | max error |", "|---|---|---|---|"]
    for kind, errors in facts["errors"].items():
        count = sum(point["kind"] == kind for point in facts["points"])
        lines.append(f"| {kind} | {count} | {errors['median']:.1%} | {errors['max']:.1%} |")
    return lines


def points(facts: dict[str, Any]) -> list[str]:
    lines = [
        "| model | time | sequences | predicted, ms | measured | error |",
        "|---|---|---|---|---|---|",
    ]
    for point in facts["points"]:
        predicted, measured = point["predicted"] * 1e3, point["measured"] * 1e3
        lines.append(
            f"| {point['model']} {point['format']} | {point['kind']} | {point['name']} "
            f"| {predicted:,.2f} | {measured:,.2f} | {point['error']:+.0%} |"
        )
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
