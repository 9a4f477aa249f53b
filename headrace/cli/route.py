"""Serve a model that workers run, as one server: each is a `headrace serve --worker` with the same
MODEL, here or elsewhere.

A request goes where it is expected to begin soonest, and if its worker goes away it goes on at
another: its client notices nothing. This process reads prompts and holds no weights; it needs the
files of the model. Workers may come and go.
"""

import argparse
import os

from headrace.cli.server_flags import add_server, announce, check_installed, settings_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    limits = add_server(parser)
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--workers",
        action="append",
        required=True,
        metavar="URL,URL",
        help="such as http://10.0.0.1:8000; some may come later",
    )
    workers.add_argument(
        "--worker-key",
        default="",
        metavar="KEY",
        help="an API key of theirs; HEADRACE_WORKER_KEY if left out",
    )
    workers.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="from which those of requests without one are derived",
    )
    limits.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        metavar="N",
        help="that of the workers; 0: the model's whole context",
    )
    limits.add_argument(
        "--worker-wait",
        type=float,
        default=30.0,
        metavar="S",
        help="for which a request waits while there is no worker",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    check_installed("headrace route", "route", "aiohttp")
    from headrace.loader.options import engine_config
    from headrace.scaleout.frontend import route, worker_urls

    urls = worker_urls(args.workers)
    key = args.worker_key or os.environ.get("HEADRACE_WORKER_KEY", "")
    config = engine_config({"max_model_len": args.max_model_len, "seed": args.seed})
    return route(args.model, config, settings_of(args), urls, key, args.worker_wait, announce)
