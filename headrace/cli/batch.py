"""Run the requests of a file, in OpenAI's batch format.

IN has a request on each line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
"body": {"messages": [...]}}. /v1/completions, /v1/embeddings, /v1/messages and /v1/responses work
as well. OUT gets a line with the same custom_id for each response, in order of completion. The same
command resumes an interrupted batch: it skips requests that have a line in OUT, and the others get
the responses of an uninterrupted run. One command at a time may use an OUT.
"""

import argparse
import sys
from pathlib import Path

from headrace.cli.arguments import (
    DEFAULT_MODEL,
    add_activations,
    add_backend,
    add_chat_template,
    add_kv_dtype,
    add_parallel,
    add_rope,
    add_sanitize_control_tokens,
    add_seed,
    add_strict_schemas,
    add_threads,
    engine_options,
)
from headrace.config import OFFLINE, EngineConfig

EXAMPLES = """\
  headrace batch requests.jsonl responses.jsonl --model smollm2
  headrace batch requests.jsonl responses.jsonl --max-num-seqs 32 --kv-dtype int8"""

_MAX_WAITING = 2**20
_NO_TIMEOUT = 1e8


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", type=Path, help="requests, as lines of JSON")
    parser.add_argument(
        "output", metavar="OUT", type=Path, help="file to which the responses are appended"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default=DEFAULT_MODEL, metavar="MODEL", help="model, as for `headrace run`"
    )
    add_chat_template(model)
    add_sanitize_control_tokens(model)
    model.add_argument(
        "--ignore-advised-sampling",
        action="store_true",
        help="no sampling defaults from the model's generation_config.json",
    )
    add_seed(
        model,
        0,
        "base seed for requests without one; the seed of such a request follows from N and its "
        "custom_id",
    )
    add_strict_schemas(model)
    compute = parser.add_argument_group("compute")
    add_backend(compute)
    add_threads(compute)
    add_activations(compute)
    memory = parser.add_argument_group("memory and batching")
    add_kv_dtype(memory)
    memory.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        metavar="N",
        help="maximum length of a sequence, in tokens; 0: the model's context",
    )
    memory.add_argument(
        "--max-num-seqs",
        type=int,
        default=EngineConfig.max_num_seqs,
        metavar="N",
        help="maximum sequences in a step (default: 64; 256 on a GPU)",
    )
    add_rope(parser)
    add_parallel(parser)


def run(args: argparse.Namespace) -> int:
    """The exit code is 1 if a response is an error."""
    from headrace.cli.serve import follow_if_not_first
    from headrace.cli.server_arguments import check_installed, model_name

    check_installed()
    follow_if_not_first(args)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from headrace.loader.options import engine_config
    from headrace.server.batch import run_batch
    from headrace.server.settings import Settings

    sizes = {
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "seed": args.seed,
    }
    settings = Settings(
        model_name=model_name(args.model),
        ignore_advised_sampling=args.ignore_advised_sampling,
        sanitize_control_tokens=args.sanitize_control_tokens,
        strict_schemas=args.strict_schemas,
        max_waiting=_MAX_WAITING,
        request_timeout=_NO_TIMEOUT,
    )
    columns = (
        "[progress.description]{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("requests", total=None)
        count, num_errors = run_batch(
            args.model,
            engine_config({**engine_options(args), **sizes}, OFFLINE),
            settings,
            args.input,
            args.output,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(f"{count:,} responses, {num_errors:,} of them errors: {args.output}", file=sys.stderr)
    return 1 if num_errors else 0
