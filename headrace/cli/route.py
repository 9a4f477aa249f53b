"""Serve a model on several workers as one server.

Each worker is a `headrace serve --worker` with the same MODEL, on this machine or another. A
request goes to the worker where it should start first. If that worker fails, the request resumes
on another worker, and its client does not notice. This process reads prompts and holds no weights,
but it needs the files of the model. Workers may join and leave.
"""

import argparse
import os

from headrace.cli.arguments import MAX_SECONDS, number, whole_number
from headrace.cli.server_arguments import add_server, announce, check_installed, settings_of

EXAMPLES = """\
  headrace serve smollm2 --worker --port 8001     (on each worker)
  headrace route smollm2 --workers http://10.0.0.1:8001,http://10.0.0.2:8001"""


def configure(parser: argparse.ArgumentParser) -> None:
    limits = add_server(parser)
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--workers",
        action="append",
        required=True,
        metavar="URL,...",
        help="URLs of the workers, such as http://10.0.0.1:8000; a worker may start later",
    )
    workers.add_argument(
        "--worker-key",
        default="",
        metavar="KEY",
        help="API key of the workers (default: HEADRACE_WORKER_KEY)",
    )
    limits.add_argument(
        "--max-model-len",
        type=whole_number(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="maximum length of a sequence, in tokens; must match the workers; 0: the model's "
        "context",
    )
    limits.add_argument(
        "--worker-wait",
        type=number(0, MAX_SECONDS),
        default=30.0,
        metavar="S",
        help="maximum seconds that a request waits for a worker",
    )


def run(args: argparse.Namespace) -> int:
    check_installed("headrace route", "route", "aiohttp")
    from headrace.loader.options import engine_config
    from headrace.scaleout.frontend import route, worker_urls

    urls = worker_urls(args.workers)
    key = args.worker_key or os.environ.get("HEADRACE_WORKER_KEY", "")
    options = {name: getattr(args, name) for name in ("chat_template", "max_model_len", "seed")}
    config = engine_config(options)
    return route(args.model, config, settings_of(args), urls, key, args.worker_wait, announce)
