"""List the downloaded models, and the aliases that can be downloaded."""

import argparse

from headrace.cli.arguments import add_json

EXAMPLES = """\
  headrace ls
  headrace ls --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from headrace.checkpoint.source import ALIASES, list_cached
    from headrace.measure.table import print_json, print_table, size

    models = list_cached()
    names = {model.name for model in models}
    absent = [alias for alias in ALIASES if alias not in names]
    if args.json:
        facts: list[dict[str, object]] = [
            {"name": model.name, "path": str(model.path), "bytes": model.nbytes} for model in models
        ]
        facts += [{"name": alias, "path": None, "bytes": None} for alias in absent]
        print_json(facts)
        return 0
    rows = [[model.name, size(model.nbytes), str(model.path)] for model in models]
    rows += [[alias, "-", f"not downloaded: headrace pull {alias}"] for alias in absent]
    print_table(["model", ">size", "path"], rows)
    return 0
