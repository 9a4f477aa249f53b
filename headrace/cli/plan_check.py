"""Prints the errors of the plan of this machine."""

import argparse
from statistics import median

from headrace.cli.arguments import mode_options
from headrace.cli.progress import progress_bar
from headrace.errors import RequestError

_OTHER_OPTIONS = (
    "goal",
    "budget",
    "on",
    "tp",
    "pp",
    "format",
    "prompt",
    "output",
    "batch",
    "context",
    "price",
    "svg",
    "sweep",
    "why",
)


def check(args: argparse.Namespace) -> int:
    """Measure the points of `--check`, and print them next to their predictions."""
    given = [name for name in _OTHER_OPTIONS if getattr(args, name)]
    if args.draft[0]:
        given.append("draft")
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RequestError(f"--check has points of its own on this machine; leave out {names}")

    from headrace.measure.plan_check import check_plan
    from headrace.measure.table import print_figures, print_json, print_table

    with progress_bar() as on_progress:
        found = check_plan(
            args.model,
            kv_dtype=args.kv_dtype or "bf16",
            on_progress=on_progress,
            **mode_options(args),
        )
    if args.json:
        print_json(found.facts())
        return 0
    rows = [
        [
            point.model,
            point.format,
            point.kind,
            point.name,
            f"{point.predicted * 1e3:,.2f}",
            f"{point.measured * 1e3:,.2f}",
            f"{point.error:+.0%}",
        ]
        for point in found.points
    ]
    headings = ["model", "format", "time", "sequences", ">predicted ms", ">measured ms", ">error"]
    print_table(headings, rows)
    print()
    errors = {kind: found.errors(kind) for kind in dict.fromkeys(p.kind for p in found.points)}
    print_figures(
        f"Errors of {len(found.points)} predictions, by kernels measured on {found.reach}",
        {
            kind: f"median {median(values):.1%}, max {max(values):.1%} of {len(values)}"
            for kind, values in errors.items()
        },
    )
    return 0
