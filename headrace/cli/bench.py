"""Measure how fast a model runs here, and how close that is to what memory and arithmetic allow.

  latency     one request: prompt tokens (pp) and generated tokens (tg) per second, at each depth of
  context throughput  many requests at once: output tokens per second of the whole run, time to the
  first token and between tokens

Prompts are random tokens, and decoding is greedy. The limits follow from a fresh measurement of
this machine.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import (
    PARALLEL,
    add_activations,
    add_backend,
    add_kv_dtype,
    add_model,
    add_parallel,
    add_threads,
    whole_number,
    whole_numbers,
)
from headrace.cli.output_file import check_writable, write
from headrace.cli.terminal import show_status
from headrace.config import OFFLINE
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.checkpoint.load import Checkpoint
    from headrace.measure.speed import Row
    from headrace.planner.hardware import Machine

KINDS: dict[str, dict[str, Any]] = {  # what can be measured, and its settings with their defaults
    "latency": {"pp": (512, 2048), "tg": (128,), "depth": (0, 2048), "repetitions": 5},
    "throughput": {"concurrency": (1, 4, 16, 32), "prompt_tokens": 128, "output_tokens": 128},
}
_MAY_BE_ZERO = ("pp", "tg", "depth")
_MOST = 2**20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help="latency or throughput")
    add_model(parser, optional=True)
    latency = parser.add_argument_group(
        "latency",
        "pp, tg and depth take several numbers, such as 512,2048, and make a row for "
        "each; pp or tg of 0 makes none.",
    )
    _add_setting(latency, "pp", "prompt tokens")
    _add_setting(latency, "tg", "tokens to generate")
    _add_setting(latency, "depth", "tokens of context before those that are timed")
    _add_setting(latency, "repetitions", "timed runs of each test, after one to warm up")
    throughput = parser.add_argument_group("throughput")
    _add_setting(
        throughput,
        "concurrency",
        "requests that are submitted at once; several numbers make a row for each",
    )
    _add_setting(throughput, "prompt_tokens", "prompt of each request, in tokens")
    _add_setting(throughput, "output_tokens", "output of each request, in tokens")
    both = parser.add_argument_group("both")
    add_backend(both)
    add_threads(both)
    add_kv_dtype(both)
    add_activations(both)
    both.add_argument(
        "--json",
        action="store_true",
        help="print JSON lines, with raw samples, in place of the table",
    )
    add_parallel(parser)
    both.add_argument(
        "--output", type=Path, metavar="FILE", help="append the JSON lines to this file, too"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print: JSON lines as they come, or a table at the end."""
    settings = _settings(args)
    if args.output:
        check_writable("--output", args.output)
    rows = []
    for row in _measure(args, settings):
        rows.append(row)
        if args.output:
            write("--output", args.output, f"{json.dumps(row)}\n", append=True)
        if args.json:
            print(json.dumps(row), flush=True)
    if not args.json:
        _print(args.kind, rows)
    return 0


def _add_setting(group: Any, name: str, what: str) -> None:
    """A setting of one kind of measurement. Absent where it is not given, so that it can be refused
    for the other kind.
    """
    default = next(settings[name] for settings in KINDS.values() if name in settings)
    least = 0 if name in _MAY_BE_ZERO else 1
    several = isinstance(default, tuple)
    shown = ",".join(map(str, default)) if several else default

    read = (whole_numbers if several else whole_number)(least, _MOST)
    flag, metavar = f"--{name.replace('_', '-')}", "N,N" if several else "N"
    group.add_argument(
        flag,
        type=read,
        metavar=metavar,
        default=argparse.SUPPRESS,
        help=f"{what} (default: {shown})",
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the kind that was asked for. Raises RequestError for one of the other
    kind.
    """
    for kind, settings in KINDS.items():
        for name in settings.keys() & vars(args).keys():
            if kind != args.kind:
                raise RequestError(
                    f"--{name.replace('_', '-')} is for `headrace bench {kind}`, not for "
                    f"`headrace bench {args.kind}`"
                )
    settings = {name: getattr(args, name, default) for name, default in KINDS[args.kind].items()}
    if args.kind == "latency" and not any((*settings["pp"], *settings["tg"])):
        raise RequestError("--pp 0 --tg 0 leave nothing to measure")
    return settings


def _measure(args: argparse.Namespace, settings: dict[str, Any]) -> "Iterator[Row]":
    """Rows as they are done; each carries all that is needed to read it later."""
    from headrace.checkpoint.load import open_checkpoint
    from headrace.checkpoint.source import resolve
    from headrace.loader.backend_choice import with_backend
    from headrace.loader.options import engine_config

    longest, most = _longest(args.kind, settings), max(settings.get("concurrency", (1,)))
    options = {
        "backend": args.backend,
        "threads": args.threads,
        "kv_dtype": args.kv_dtype,
        "activations": args.activations,
        "max_model_len": longest,
        "max_num_seqs": most,
        **{name: getattr(args, name) for name in PARALLEL},
    }
    config = engine_config(options, OFFLINE)
    checkpoint = open_checkpoint(resolve(args.model))
    if longest > checkpoint.spec.max_context:
        flags = (
            "--pp, --tg or --depth"
            if args.kind == "latency"
            else "--prompt-tokens or --output-tokens"
        )
        context = checkpoint.spec.max_context
        raise RequestError(
            f"this needs a context of {longest:,} tokens, and the model's ends at "
            f"{context:,}: lower {flags}"
        )

    from headrace.measure import speed as measure
    from headrace.planner import hardware, host

    try:
        show_status("measuring this machine")
        config = with_backend(config, checkpoint)
        machine = hardware.measure(config.threads, config.backend)
        host.forget_peak_memory()
        show_status("loading the model")
        with measure.Bench(args.model, config) as bench:
            facts, limits = (
                _facts(args, checkpoint, machine, config.backend),
                measure.SpeedLimits(checkpoint, machine, config),
            )
            rows: Callable[..., Iterator[Row]] = (
                measure.latency if args.kind == "latency" else measure.throughput
            )
            for row in rows(bench, limits, show_status, **settings):
                show_status("")
                yield facts | row
    finally:
        show_status("")


def _longest(kind: str, settings: dict[str, Any]) -> int:
    """Tokens of the longest sequence, prompt and output."""
    if kind == "throughput":
        return int(settings["prompt_tokens"] + settings["output_tokens"])
    return int(max(1, *settings["depth"]) + max(*settings["pp"], *settings["tg"]) + 1)


def _facts(
    args: argparse.Namespace, checkpoint: "Checkpoint", machine: "Machine", backend: str
) -> dict[str, Any]:
    """What does not change from row to row."""
    from datetime import UTC, datetime
    from importlib.metadata import version

    files = (
        [checkpoint.path]
        if checkpoint.path.is_file()
        else sorted(checkpoint.path.glob("*.safetensors"))
    )
    return {
        "kind": args.kind,
        "model": args.model,
        "name": checkpoint.spec.name,
        "file_bytes": sum(file.stat().st_size for file in files),
        "parameters": sum(tensor.rows * tensor.cols for tensor in checkpoint.tensors.values()),
        "version": version("headrace"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": backend,
        "cpu": machine.cpu,
        "isa": (not machine.is_gpu and os.environ.get("HEADRACE_ISA")) or machine.isa,
        "threads": machine.threads,
        "kv_dtype": args.kv_dtype,
        "bandwidth": machine.bandwidth,
        "rates": dict(machine.rates),
    }


def _print(kind: str, rows: "list[Row]") -> None:
    from headrace.cli.table import print_figures, print_table, size
    from headrace.planner.hardware import Machine

    row = rows[0]
    machine = Machine(*(row[name] for name in ("cpu", "isa", "threads", "bandwidth", "rates")))
    rates = (
        f"memory read {row['bandwidth'] / 1e9:.1f} GB/s, int8 "
        f"{row['rates']['int8'] / 1e9:,.0f} G operations/s"
    )
    print_figures(
        f"{row['name']}: {kind}",
        {
            "model": f"{size(row['file_bytes'])}, {row['parameters'] / 1e6:,.1f} M parameters",
            "engine": f"headrace {row['version']}, {row['backend']} backend ({row['isa']}), "
            f"{machine.at_work}, {row['kv_dtype']} KV",
            "machine": f"{row['cpu']}; {rates}",
        },
    )
    if kind == "latency":
        print_table(
            ["test", ">tokens/s", ">min-max", ">ms/token", ">first token", ">limit", ">of limit"],
            [
                [
                    _test(r),
                    _rate(r),
                    _spread(r),
                    f"{r['ms_per_token']:.2f}",
                    _ms(r["first_token"]),
                    *_limit(r),
                ]
                for r in rows
            ],
        )
    else:
        print_table(
            [
                "requests",
                ">tokens/s",
                ">first token",
                ">p95",
                ">between tokens",
                ">p95",
                ">limit",
                ">of limit",
                ">peak memory",
            ],
            [
                [r["test"], _rate(r)]
                + [
                    _ms(r[name])
                    for name in (
                        "first_token",
                        "first_token_p95",
                        "between_tokens",
                        "between_tokens_p95",
                    )
                ]
                + [*_limit(r), size(r["peak_memory"])]
                for r in rows
            ],
        )
    over = (
        f"over {len(row['samples']['seconds'])} runs"
        if kind == "latency"
        else "over requests and their tokens"
    )
    print(
        f"\nMedians {over}. Peak memory {size(rows[-1]['peak_memory'])}; limits follow "
        "from the machine as just measured."
    )


def _test(row: "Row") -> str:
    return f"{row['test']} @ d{row['depth']}" if row["depth"] else str(row["test"])


def _rate(row: "Row") -> str:
    return f"{row['tokens_per_second']:,.1f}"


def _spread(row: "Row") -> str:
    return f"{row['tokens_per_second_min']:,.1f}-{row['tokens_per_second_max']:,.1f}"


def _limit(row: "Row") -> tuple[str, str]:
    return f"{row['limit']:,.0f}", f"{100 * row['share_of_limit']:.0f} %"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"
