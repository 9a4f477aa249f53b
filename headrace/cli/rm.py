"""Remove a model that was fetched from the cache, by its name in `headrace ls` or its path
there.
"""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name or a path that `headrace ls` lists; nothing else is ever removed",
    )


def run(args: argparse.Namespace) -> int:
    """Remove, and say how much that freed."""
    from headrace.checkpoint.source import remove_cached
    from headrace.measure.table import printable, size

    removed = remove_cached(args.model)
    print(f"removed {printable(removed.name)}: {size(removed.nbytes)} freed")
    return 0
