"""List the models at hand: those that were fetched, and the aliases that can be."""

import argparse

from headrace.cli.arguments import add_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """One row for each alias and each fetched model."""
    from headrace.checkpoint.source import ALIASES, list_cached
    from headrace.measure.table import print_json, print_table, size

    cached = list_cached()
    if args.json:
        absent = [
            {"name": alias, "path": None, "bytes": None}
            for alias in ALIASES
            if alias not in {m.name for m in cached}
        ]
        print_json(
            [{"name": m.name, "path": str(m.path), "bytes": m.nbytes} for m in cached] + absent
        )
        return 0
    rows = [[m.name, size(m.nbytes), str(m.path)] for m in cached]
    rows += [
        [alias, "-", f"not fetched: headrace pull {alias}"]
        for alias in ALIASES
        if alias not in {m.name for m in cached}
    ]
    print_table(["model", ">size", "where"], rows)
    return 0
