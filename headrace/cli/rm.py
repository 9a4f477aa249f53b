"""Remove a downloaded model from the cache."""

import argparse

EXAMPLES = """\
  headrace rm smollm2"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="name or path of a downloaded model, as `headrace ls` lists it",
    )


def run(args: argparse.Namespace) -> int:
    from headrace.checkpoint.source import remove_cached
    from headrace.measure.table import printable, size

    removed = remove_cached(args.model)
    print(f"removed {printable(removed.name)}: {size(removed.nbytes)} freed")
    return 0
