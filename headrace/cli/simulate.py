"""Simulate a model under load on devices that need not be at hand: throughput, latencies, KV memory
and cost.

The real scheduler, KV manager, prefix cache and router run; only the time of a step is predicted.
TRACE is a workload (lognormal, chat, rag or code, with fields as in
`chat:rate=2,turns=6`) or a file: .jsonl, .json (ShareGPT) or .csv (Azure).
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from headrace.backend_traits import KvDtype
from headrace.cli.arguments import (
    DEFAULT_MODEL,
    MAX_COUNT,
    MAX_SECONDS,
    MAX_TOKENS,
    add_json,
    add_price,
    draft_chain,
    number,
    whole_number,
)
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.simulator.report import Percentiles, Report
    from headrace.simulator.simulate import Deployment, SimulatedOptions
    from headrace.simulator.sweep import Sweep
    from headrace.simulator.trace import Trace

EXAMPLES = """\
  headrace simulate chat:rate=2
  headrace simulate chat --model ./Llama-3.1-8B/config.json --on h100-sxm --replicas 4
  headrace simulate rag --model ./Llama-3.1-8B/config.json --on l4 --rate 0.5 --format Q4_0
  headrace simulate chat:requests=400 --sweep --svg load.svg
  headrace simulate AzureLLMInferenceTrace_conv.csv --on h100-sxm --duration 600"""
_MAX_REPLICAS = 10_000
_MAX_RANKS = 1024
_ROUTERS = ("prefix", "two-choices", "round-robin")
_MAX_RATE = 10**6


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="workload, or file of requests")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="alias, file, folder or config.json",
    )
    add_json(parser)
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**63),
        default=0,
        metavar="N",
        help="seed of the workload and of accepted drafts",
    )
    parser.add_argument(
        "--rate",
        type=number(1e-6, _MAX_RATE),
        metavar="R",
        help="conversations that start per second (default: the trace's)",
    )
    parser.add_argument(
        "--duration",
        type=number(0, MAX_SECONDS),
        metavar="S",
        help="seconds after which no conversation starts (default: all start)",
    )
    _add_sweep(parser.add_argument_group("sweep"))
    _add_machine(parser.add_argument_group("machine"))
    _add_replicas(parser.add_argument_group("replicas"))
    _add_engine(parser.add_argument_group("engine", "Options of the engine, as for `serve`."))


def _add_sweep(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sweep",
        action="store_true",
        help="latencies at rising rates, and the knee: the most throughput for its latency",
    )
    group.add_argument(
        "--svg", type=Path, metavar="FILE", help="SVG file for a picture of the sweep"
    )
    group.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="measured points for the picture, by `headrace bench throughput --json`",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    ranks = whole_number(1, _MAX_RANKS)
    group.add_argument(
        "--on", default="this", metavar="NAME", help="name of a machine, or this (measured)"
    )
    group.add_argument(
        "-tp", type=ranks, default=1, metavar="N", help="number of devices that share each matrix"
    )
    group.add_argument("-pp", type=ranks, default=1, metavar="N", help="number of pipeline stages")
    add_price(group, "a device", " (default: the machine file's)")
    group.add_argument(
        "--format", metavar="TYPE", help="GGUF type of all matrices (default: the file's)"
    )
    group.add_argument(
        "--kv-dtype",
        choices=get_args(KvDtype),
        default="bf16",
        help="number format of the KV cache",
    )


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=whole_number(1, _MAX_REPLICAS),
        default=1,
        metavar="N",
        help="number of engines, each on -tp x -pp devices",
    )
    group.add_argument(
        "--router",
        choices=_ROUTERS,
        default=_ROUTERS[0],
        help="choice of a replica: prefix (as `headrace route`), the less busy of two, or in turn",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    tokens, count = whole_number(1, MAX_TOKENS), whole_number(1, MAX_COUNT)
    group.add_argument(
        "--max-num-seqs",
        type=whole_number(1, 2**16),
        metavar="N",
        help="maximum sequences per step (default: the backend's)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=tokens,
        metavar="N",
        help="maximum rows per step (default: the backend's)",
    )
    group.add_argument(
        "--chunked-prefill-size",
        type=whole_number(0, MAX_TOKENS),
        metavar="N",
        help="prompt rows of a step that also decodes; 0: no limit (default: the backend's)",
    )
    group.add_argument(
        "--max-model-len",
        type=tokens,
        metavar="N",
        help="maximum tokens of a sequence (default: the model's context)",
    )
    group.add_argument(
        "--kv-blocks",
        type=count,
        metavar="N",
        help="KV blocks (default: as many as fit)",
    )
    group.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sharing of KV between equal prompt prefixes",
    )
    group.add_argument(
        "--draft",
        type=draft_chain,
        default=(0, 0.0),
        metavar="DEPTH:ACCEPTANCE",
        help="draft tokens in a step, and the share of them that is accepted, such as 4:0.7 "
        "(default: no drafts)",
    )


def run(args: argparse.Namespace) -> int:
    from headrace.cli.output_file import check_writable
    from headrace.cli.progress import progress_bar
    from headrace.measure.table import print_json
    from headrace.simulator.simulate import deploy, load_trace

    for flag, needed in (("svg", "sweep"), ("measured", "svg")):
        if getattr(args, flag) and not getattr(args, needed):
            raise RequestError(f"--{flag} is for --{needed}; add it, or leave --{flag} out")
    if args.svg:
        check_writable("--svg", args.svg)
    depth, acceptance = args.draft
    deployment = deploy(
        args.model,
        on=args.on,
        replicas=args.replicas,
        router=args.router,
        tensor=args.tp,
        pipeline=args.pp,
        format=args.format,
        kv_dtype=args.kv_dtype,
        draft_depth=depth,
        draft_acceptance=acceptance,
        seed=args.seed,
        **_options(args),
    )
    trace = load_trace(
        args.trace, args.seed, deployment.checkpoint, rate=args.rate, duration=args.duration
    )
    price = deployment.price(args.price)
    if args.sweep:
        _sweep(args, deployment, trace, price)
        return 0
    with progress_bar() as on_progress:
        report = deployment.run(trace, on_progress)
    if args.json:
        print_json(_facts(args, deployment, report, price))
    else:
        _print(deployment, report, price)
    return 0


def _options(args: argparse.Namespace) -> "SimulatedOptions":
    options: SimulatedOptions = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "chunked_prefill_size": args.chunked_prefill_size,
        "max_model_len": args.max_model_len or 0,
        "kv_blocks": args.kv_blocks or 0,
        "prefix_cache": args.prefix_cache,
    }
    return options


def _sweep(
    args: argparse.Namespace, deployment: "Deployment", trace: "Trace", price: float | None
) -> None:
    from headrace.cli.output_file import write
    from headrace.cli.progress import progress_bar
    from headrace.measure.table import print_json
    from headrace.simulator.picture import read_measured, sweep_svg
    from headrace.simulator.sweep import sweep, sweep_facts

    measured = read_measured(args.measured) if args.measured else []
    with progress_bar() as on_progress:
        found = sweep(deployment, trace, on_progress=on_progress)
    if args.svg:
        title = f"{deployment.checkpoint.spec.name} on {_devices(deployment)}: {args.trace}"
        write("--svg", args.svg, sweep_svg(title, found, measured))
    if args.json:
        print_json({**_setup(args, deployment), **sweep_facts(found)})
        return
    _print_sweep(deployment, found, price)
    if args.svg:
        print(f"\nThe curve is drawn in {args.svg}.")


def _setup(args: argparse.Namespace, deployment: "Deployment") -> dict[str, Any]:
    return {
        "trace": args.trace,
        "seed": args.seed,
        "model": deployment.checkpoint.spec.name,
        "machine": deployment.place.name,
        "devices": deployment.devices,
        "router": deployment.router,
    }


def _facts(
    args: argparse.Namespace, deployment: "Deployment", report: "Report", price: float | None
) -> Mapping[str, Any]:
    from headrace.simulator.report import report_facts

    cost = None if price is None else report.cost(price)
    return {
        **_setup(args, deployment),
        **report_facts(report),
        "dollars_per_million": cost,
    }


def _print(deployment: "Deployment", report: "Report", price: float | None) -> None:
    from headrace.measure.table import print_figures, print_table

    replicas = report.replicas
    busy = [replica.busy for replica in replicas]
    kv_mean = sum(replica.kv_mean for replica in replicas) / len(replicas)
    kv_max = max(replica.kv_max for replica in replicas)
    figures = {
        "requests": f"{report.requests:,} in {report.seconds:,.1f} s, "
        f"{report.requests_per_second:,.2f} per second",
        "prompts": f"{report.prompt_tokens:,} tokens, "
        f"{report.prompt_tokens_per_second:,.0f} tokens/s, {report.hit_rate:.0%} from the cache",
        "outputs": f"{report.output_tokens:,} tokens, "
        f"{report.output_tokens_per_second:,.0f} tokens/s",
        "busy": f"{sum(busy) / len(busy):.0%} of the time"
        + (f", {min(busy):.0%} to {max(busy):.0%} of a replica" if len(busy) > 1 else ""),
        "KV blocks": f"{kv_mean:.0%} in use, at most {kv_max:.0%}",
        "preemptions": f"{report.preemptions:,}",
    }
    if report.acceptance is not None:
        figures["drafts"] = f"{report.acceptance:.0%} of the tokens accepted"
    if price is not None and (cost := report.cost(price)) is not None:
        figures["a million output tokens"] = f"{cost:.3f} $ of all devices"
    if report.refused:
        figures["refused"] = f"{report.refused:,} requests, the first because {report.refusal}"
    print_figures(f"{deployment.checkpoint.spec.name} on {_devices(deployment)}", figures)

    latencies = report.latencies
    rows = [
        _row("queue, s", latencies.queue, 1, 3),
        _row("first token, s", latencies.first_token, 1, 3),
        _row("time per token, ms", latencies.per_token, 1e3, 2),
        _row("whole request, s", latencies.total, 1, 3),
    ]
    headings = ["latency", ">mean", ">p50", ">p90", ">p95", ">p99"]
    source = deployment.place.reaches.source
    print_table(headings, rows, f"Prediction, by kernels measured on {source}")


def _print_sweep(deployment: "Deployment", found: "Sweep", price: float | None) -> None:
    from headrace.measure.table import print_table

    rows = []
    for point in found.points:
        report, latencies = point.report, point.report.latencies
        cost = None if price is None else report.cost(price)
        rows.append(
            [
                f"{point.rate:,.3g}",
                f"{report.requests_per_second:,.3g}",
                f"{report.output_tokens_per_second:,.0f}",
                f"{1e3 * latencies.first_token.p50:,.0f}",
                f"{1e3 * latencies.first_token.p95:,.0f}",
                f"{1e3 * latencies.per_token.p50:,.2f}",
                f"{1e3 * latencies.per_token.p95:,.2f}",
                f"{report.replicas[0].kv_max:.0%}",
                "-" if cost is None else f"{cost:.3f}",
                "knee" if point is found.knee else "",
            ]
        )
    headings = [
        ">chats/s",
        ">requests/s",
        ">tokens/s",
        ">TTFT p50, ms",
        ">p95",
        ">TPOT p50, ms",
        ">p95",
        ">KV",
        ">$ per M",
        "",
    ]
    print_table(headings, rows, f"{deployment.checkpoint.spec.name} on {_devices(deployment)}")


def _devices(deployment: "Deployment") -> str:
    title, count = deployment.place.title, deployment.devices
    return f"{count:,} x {title}" if count > 1 else title


def _row(name: str, found: "Percentiles", scale: float, digits: int) -> list[str]:
    return [name, *(f"{scale * value:,.{digits}f}" for value in found)]
