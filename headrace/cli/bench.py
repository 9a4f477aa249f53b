"""Measure the speed of a model on this machine, next to the limit of its memory and arithmetic.

  latency     one request: prompt (pp) and output (tg) tokens/s at each depth of context
  throughput  many requests at once: output tokens/s of the run, time to the first token, and
              time between tokens

Prompts are random tokens, and decoding is greedy. The limits follow from a measurement of the
machine at the start.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import (
    Arguments,
    add_compute,
    add_model,
    add_parallel,
    engine_options,
    whole_number,
    whole_numbers,
)
from headrace.cli.output_file import check_writable, write
from headrace.cli.terminal import show_status
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.bench import BenchSetup, LatencyRow, ThroughputRow

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
    add_parallel(parser)
    output = parser.add_argument_group("output")
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
        _print(args.kind, rows)
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
            on_progress=on_progress,
            **engine_options(args),
        )
    return bench_throughput(args.model, **settings, on_progress=on_progress, **engine_options(args))


def _print(kind: str, rows: "Sequence[LatencyRow | ThroughputRow]") -> None:
    from headrace.measure.bench import LatencyRow, ThroughputRow
    from headrace.measure.table import size

    _print_setup(kind, rows[0].setup)
    if kind == "latency":
        latency_rows = [row for row in rows if isinstance(row, LatencyRow)]
        _print_latency(latency_rows)
        samples = f"{len(latency_rows[0].samples['seconds'])} runs"
    else:
        _print_throughput([row for row in rows if isinstance(row, ThroughputRow)])
        samples = "requests and their tokens"
    print(
        f"\nMedians over {samples}. Peak memory {size(rows[-1].peak_memory)}; limits follow from "
        "the machine as just measured."
    )


def _print_setup(kind: str, setup: "BenchSetup") -> None:
    from headrace.measure.table import print_figures, size

    machine = setup.machine
    print_figures(
        f"{setup.name}: {kind}",
        {
            "model": f"{size(setup.file_bytes)}, {setup.parameters / 1e6:,.1f} M parameters",
            "engine": f"headrace {setup.version}, {setup.backend} backend ({setup.isa}), "
            f"{machine.at_work}, {setup.kv_dtype} KV",
            "machine": f"{machine.cpu}; memory read {machine.bandwidth / 1e9:.1f} GB/s, int8 "
            f"{machine.rates['int8'] / 1e9:,.0f} G operations/s",
        },
    )


def _print_latency(rows: "Sequence[LatencyRow]") -> None:
    from headrace.measure.table import print_table

    headings = [
        "test",
        ">tokens/s",
        ">min-max",
        ">ms/token",
        ">first token",
        ">limit",
        ">of limit",
    ]
    lines = [
        [
            f"{row.test} @ d{row.depth}" if row.depth else row.test,
            f"{row.tokens_per_second:,.1f}",
            f"{row.tokens_per_second_min:,.1f}-{row.tokens_per_second_max:,.1f}",
            f"{row.ms_per_token:.2f}",
            _milliseconds(row.first_token),
            f"{row.limit:,.0f}",
            f"{100 * row.share_of_limit:.0f} %",
        ]
        for row in rows
    ]
    print_table(headings, lines)


def _print_throughput(rows: "Sequence[ThroughputRow]") -> None:
    from headrace.measure.table import print_table, size

    headings = [
        "requests",
        ">tokens/s",
        ">first token",
        ">p95",
        ">between tokens",
        ">p95",
        ">limit",
        ">of limit",
        ">peak memory",
    ]
    lines = [
        [
            row.test,
            f"{row.tokens_per_second:,.1f}",
            _milliseconds(row.first_token),
            _milliseconds(row.first_token_p95),
            _milliseconds(row.between_tokens),
            _milliseconds(row.between_tokens_p95),
            f"{row.limit:,.0f}",
            f"{100 * row.share_of_limit:.0f} %",
            size(row.peak_memory),
        ]
        for row in rows
    ]
    print_table(headings, lines)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"
