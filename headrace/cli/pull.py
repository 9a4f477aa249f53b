"""Download a model into the cache, and print its path.

A model that is in the cache is not downloaded again. Only the path goes to stdout.
"""

import argparse

from headrace.cli.arguments import add_model

EXAMPLES = """\
  headrace pull smollm2
  headrace pull hf:ORG/REPO:model-Q4_K_M.gguf"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=False)


def run(args: argparse.Namespace) -> int:
    from headrace.checkpoint.source import resolve

    print(resolve(args.model))
    return 0
