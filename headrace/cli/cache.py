"""List, delete or shorten the KV blocks that a folder of --kv-cache-dir keeps.

Engines may run on the folder meanwhile: a block that is gone is computed again.
"""

import argparse
import time
from pathlib import Path

from headrace.cli.arguments import add_json, whole_number

EXAMPLES = """\
  headrace cache ls ~/.cache/headrace-kv
  headrace cache rm ~/.cache/headrace-kv 3f2a
  headrace cache prune ~/.cache/headrace-kv --bytes 2000000000"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        metavar="ACTION",
        choices=("ls", "rm", "prune"),
        help="ls: list the models of the folder, the last used first; rm: delete the blocks of the "
        "model ID, or of all; prune: delete the least recently used blocks above --bytes",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of --kv-cache-dir")
    parser.add_argument(
        "id",
        metavar="ID",
        nargs="?",
        help="start of an id that `ls` lists, or all (for rm)",
    )
    parser.add_argument(
        "--bytes",
        type=whole_number(0, 2**56),
        metavar="N",
        help="maximum bytes to keep, of all models together (for prune)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from headrace.kv.folder import check_private, list_models, prune_folder, remove_model
    from headrace.measure.table import print_json, print_table, printable, size

    folder: Path = args.folder.expanduser()
    _check_arguments(args)
    check_private(folder)
    if args.action == "prune":
        print(f"{size(prune_folder(folder, args.bytes))} are left")
        return 0
    models = list_models(folder)
    if args.action == "rm":
        found = [
            model for model in models if args.id == "all" or model.path.name.startswith(args.id)
        ]
        _check_one(args.id, [model.path.name for model in found])
        print(f"{size(sum(remove_model(folder, model.path) for model in found))} freed")
        return 0
    facts = [
        {
            "id": model.path.name,
            "model": model.about.get("model"),
            "kv_dtype": model.about.get("kv_dtype"),
            "version": model.about.get("version"),
            "blocks": model.num_blocks,
            "bytes": model.num_bytes,
            "last_used": model.last_used or None,
        }
        for model in models
    ]
    if args.json:
        print_json(facts)
        return 0
    rows = [
        [
            str(fact["id"])[:8],
            printable(str(fact["model"] or "-")),
            printable(str(fact["kv_dtype"] or "-")),
            f"{fact['blocks']:,}",
            size(model.num_bytes),
            _date(model.last_used),
        ]
        for fact, model in zip(facts, models, strict=True)
    ]
    print_table(["id", "model", "KV", ">blocks", ">size", "last used"], rows)
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    from headrace.errors import RequestError

    if args.action == "rm" and args.id is None:
        raise RequestError("ID is missing; write the start of an id of `headrace cache ls`, or all")
    if args.action == "prune" and args.bytes is None:
        raise RequestError("--bytes is missing; write the maximum bytes to keep")
    if args.action != "rm" and args.id is not None:
        raise RequestError(f"ID {args.id[:40]!r} is for rm only; leave it out")
    if args.action != "prune" and args.bytes is not None:
        raise RequestError("--bytes is for prune only; leave it out")


def _check_one(given: str, found: list[str]) -> None:
    from headrace.errors import RequestError

    if given == "all" or len(found) == 1:
        return
    if not found:
        raise RequestError(f"no model's id starts with {given[:40]!r}; see `headrace cache ls`")
    raise RequestError(
        f"{given[:40]!r} is the start of {len(found)} ids; give more of it: "
        + ", ".join(name[:8] for name in found[:8])
    )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "-"
