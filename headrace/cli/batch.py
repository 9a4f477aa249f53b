"""Answer many requests from a file, offline, in OpenAI's batch format.

IN has a request on each line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
"body": {"messages": [...]}}; /v1/completions, /v1/embeddings and /v1/responses work as well. OUT
gets a line for each as it is answered, with the same custom_id. Run the same command again after
any end: what has its line in OUT is not asked again.
"""

import argparse
import sys
from pathlib import Path

from headrace.cli.arguments import (
    DEFAULT_MODEL,
    PARALLEL,
    add_activations,
    add_backend,
    add_kv_dtype,
    add_parallel,
    add_threads,
)
from headrace.config import OFFLINE, EngineConfig


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    parser.add_argument("input", metavar="IN", type=Path, help="requests, as lines of JSON")
    parser.add_argument(
        "output", metavar="OUT", type=Path, help="answers; lines are added to those that are there"
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="MODEL", help="as for `headrace run`"
    )
    parser.add_argument(
        "--ignore-advised-sampling",
        action="store_true",
        help="leave alone what generation_config.json says of temperature and the like",
    )
    add_backend(parser)
    add_threads(parser)
    add_kv_dtype(parser)
    add_activations(parser)
    add_parallel(parser)
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        metavar="N",
        help="longest sequence, in tokens; 0: the model's whole context",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=EngineConfig.max_num_seqs,
        metavar="N",
        help="most sequences in one step (64; 256 on a GPU)",
    )


def run(args: argparse.Namespace) -> int:
    """Answer what is left; the exit code is 1 where an answer is an error."""
    from headrace.cli.serve import follow_where_not_first
    from headrace.cli.server_flags import check_installed, model_name

    check_installed()
    follow_where_not_first(args)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from headrace.loader.options import engine_config
    from headrace.server.batch import run_batch
    from headrace.server.settings import Settings

    names = (
        "backend",
        "threads",
        "kv_dtype",
        "activations",
        "max_model_len",
        "max_num_seqs",
        *PARALLEL,
    )
    options = {name: getattr(args, name) for name in names}
    settings = Settings(
        model_name=model_name(args.model),
        ignore_advised_sampling=args.ignore_advised_sampling,
        max_waiting=2**20,
        request_timeout=1e8,
    )
    columns = (
        "[progress.description]{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("answering", total=None)
        count, failed = run_batch(
            args.model,
            engine_config(options, OFFLINE),
            settings,
            args.input,
            args.output,
            lambda done, every: bar.update(task, completed=done, total=every),
        )
    print(f"{count:,} answered, {failed:,} of them with an error: {args.output}", file=sys.stderr)
    return 1 if failed else 0
