"""Fetch a model into the cache and print where it is."""

import argparse

from headrace.cli.arguments import add_model


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=False)


def run(args: argparse.Namespace) -> int:
    """Fetch; nothing is downloaded twice. The path alone goes to stdout."""
    from headrace.checkpoint.source import resolve

    print(resolve(args.model))
    return 0
