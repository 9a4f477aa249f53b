"""Measure the speed of a model on this machine, next to the limit of its memory and arithmetic.

  latency     one request: prompt (pp) and output (tg) tokens/s at each depth of context
  throughput  many requests at once: output tokens/s of the run, time to the first token, and
              time between tokens

Prompts are random tokens, and decoding is greedy. The limits follow from a measurement of the
machine at the start.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import (
    Arguments,
    add_compute,
    add_model,
    add_modes,
    add_parallel,
    add_price,
    engine_options,
    whole_number,
    whole_numbers,
)
from headrace.cli.bench_tables import print_rows
from headrace.cli.output_file import check_writable, write
from headrace.cli.terminal import show_status
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.bench_rows import LatencyRow, ThroughputRow

EXAMPLES = """\
  headrace bench latency smollm2
  headrace bench latency smollm2 --pp 512 --tg 64 --depth 0,4096 --kv-dtype int8
  headrace bench throughput smollm2 --concurrency 1,8,32 --json"""

SETTINGS: dict[str, dict[str, Any]] = {
    "latency": {"pp": (512, 2048), "tg": (128,), "depth": (0, 2048), "repetitions": 5},
    "throughput": {"concurrency": (1, 4, 16, 32), "prompt_tokens": 128, "output_tokens": 128},
}
_MAY_BE_ZERO = ("pp", "tg", "depth")
_MAX_SETTING = 2**20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", choices=SETTINGS, help="latency or throughput")
    add_model(parser, optional=True)
    latency = parser.add_argument_group(
        "latency",
        "Several numbers, such as 512,2048, make a row for each. A pp or tg of 0 makes no row.",
    )
    _add_setting(latency, "pp", "number of timed prompt tokens")
    _add_setting(latency, "tg", "number of timed output tokens")
    _add_setting(latency, "depth", "context before the timed tokens, in tokens")
    _add_setting(latency, "repetitions", "number of timed runs of each test, after a warm-up run")
    throughput = parser.add_argument_group("throughput")
    _add_setting(
        throughput,
        "concurrency",
        "number of requests at the same time; several numbers make a row for each",
    )
    _add_setting(throughput, "prompt_tokens", "length of each prompt, in tokens")
    _add_setting(throughput, "output_tokens", "length of each output, in tokens")
    add_compute(parser)
    add_modes(parser)
    add_parallel(parser)
    output = parser.add_argument_group("output")
    add_price(output)
    output.add_argument(
        "--json", action="store_true", help="JSON lines with raw samples in place of the table"
    )
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="file to which the JSON lines are appended"
    )


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    if args.output:
        check_writable("--output", args.output)

    rows: list[LatencyRow | ThroughputRow] = []
    try:
        for row in _measure(args, settings):
            show_status("")
            rows.append(row)
            line = json.dumps(row.facts())
            if args.output:
                write("--output", args.output, f"{line}\n", append=True)
            if args.json:
                print(line, flush=True)
    finally:
        show_status("")
    if not args.json:
        print_rows(args.kind, rows)
    return 0


def _add_setting(group: Arguments, name: str, text: str) -> None:
    default = next(settings[name] for settings in SETTINGS.values() if name in settings)
    minimum = 0 if name in _MAY_BE_ZERO else 1
    takes_several = isinstance(default, tuple)
    shown = ",".join(map(str, default)) if takes_several else default
    parse = whole_numbers if takes_several else whole_number
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=parse(minimum, _MAX_SETTING),
        metavar="N,..." if takes_several else "N",
        default=argparse.SUPPRESS,
        help=f"{text} (default: {shown})",
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    for kind, settings in SETTINGS.items():
        for name in settings.keys() & vars(args).keys():
            if kind != args.kind:
                raise RequestError(
                    f"--{name.replace('_', '-')} is for `headrace bench {kind}`; leave it out of "
                    f"`headrace bench {args.kind}`"
                )
    defaults = SETTINGS[args.kind]
    return {name: getattr(args, name, default) for name, default in defaults.items()}


def _measure(
    args: argparse.Namespace, settings: dict[str, Any]
) -> "Iterator[LatencyRow | ThroughputRow]":
    from headrace.measure.bench import bench_latency, bench_throughput

    def on_progress(step: str, share: float) -> None:
        show_status(step)

    if args.kind == "latency":
        return bench_latency(
            args.model,
            prompt_tokens=settings["pp"],
            output_tokens=settings["tg"],
            depths=settings["depth"],
            repetitions=settings["repetitions"],
            price=args.price,
            on_progress=on_progress,
            **engine_options(args),
        )
    return bench_throughput(
        args.model,
        **settings,
        price=args.price,
        on_progress=on_progress,
        **engine_options(args),
    )
