"""Profile a model op by op: time, bytes, operations, and the resource that limits each op.

Runs prefills, and decode steps at several depths of context and batch sizes, turn by turn. Memory
bandwidth and arithmetic are measured between the turns. Every depth runs with the first batch
size, and every batch size at the first depth.

With `--attention`, runs a text instead, and counts the keys that have most of the weight.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.backend_traits import traits_of
from headrace.cli.arguments import (
    add_compute,
    add_json,
    add_model,
    add_modes,
    add_parallel,
    engine_options,
    whole_number,
    whole_numbers,
)
from headrace.cli.bench_tables import print_steps
from headrace.cli.output_file import check_writable, write
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.measure.experts import ExpertProfile
    from headrace.measure.op_profile import OpProfile, PhaseProfile
    from headrace.measure.profile_report import ProfileReport

EXAMPLES = """\
  headrace profile smollm2
  headrace profile smollm2 --prefill none --depth 2048 --batch 1,8
  headrace profile smollm2 --svg roofline.svg --json
  headrace profile smollm2 --attention --tokens 4096 --svg attention.svg"""

_BATCHES = "1,4,8,16,32"
_TURNS = 5
_AUTO = "auto"
_MAX_COUNT = 2**20
_DRIFT = 0.1
_BUSY = 0.1
"""Share of a round outside the medians of its parts, from which the report says so."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    counts = whole_numbers(1, _MAX_COUNT)

    def counts_or_none(text: str) -> tuple[int, ...]:
        return () if text == "none" else counts(text)

    phases = parser.add_argument_group("phases")
    phases.add_argument(
        "--prefill",
        type=counts_or_none,
        metavar="N,...",
        help="prompt lengths, in tokens, or `none` (default: 512,2048, if they fit)",
    )
    phases.add_argument(
        "--depth",
        type=counts_or_none,
        metavar="N,...",
        help="context to decode at, in tokens, or `none` (default: 128,2048, if they fit)",
    )
    phases.add_argument(
        "--batch",
        type=counts,
        default=_BATCHES,
        metavar="N,...",
        help="number of sequences that decode together",
    )
    phases.add_argument(
        "--turns",
        type=whole_number(1, _MAX_COUNT),
        default=_TURNS,
        metavar="N",
        help="number of times that each phase is timed; more turns give steadier medians",
    )
    attention = parser.add_argument_group("attention")
    attention.add_argument(
        "--attention",
        action="store_true",
        help="by layer and head: number of keys with most of the weight, and share of zero weights",
    )
    attention.add_argument(
        "--tokens",
        type=whole_number(64, _MAX_COUNT),
        metavar="N",
        help="length of the text, in tokens (default: 2048)",
    )
    attention.add_argument(
        "--text", type=Path, metavar="FILE", help="text (default: Python's language reference)"
    )
    add_compute(parser)
    add_modes(parser)
    add_parallel(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="SVG file for a picture of the roofline, with the ops as points, or of --attention",
    )
    output.add_argument(
        "--experts",
        type=Path,
        metavar="FILE",
        help="SVG file for a picture of the rows of each expert, over all phases",
    )
    output.add_argument(
        "--sparsity",
        action="store_true",
        help="in place of times: zero activations that 1 to 32 rows share, next to X^N; of a ReLU, "
        "or of the thresholds of --activation-sparsity",
    )
    add_json(output)


def run(args: argparse.Namespace) -> int:
    from headrace.measure.table import print_json

    _check_flags(args)
    if args.sparsity:
        return _profile_sparsity(args)
    for flag in ("svg", "experts"):
        if file := getattr(args, flag):
            check_writable(f"--{flag}", file)
    if args.attention:
        return _run_attention(args)
    report = _profile(args)
    if args.svg:
        from headrace.measure.roofline_picture import roofline_svg

        title = f"Roofline of {report.spec.name}"
        write("--svg", args.svg, roofline_svg(title, report.machine, report.profiles))
    if args.experts:
        from headrace.measure.expert_picture import expert_map_svg

        title = f"Experts of {report.spec.name}, rows of a profile"
        write("--experts", args.experts, expert_map_svg(title, report.expert_loads()))
    if args.json:
        print_json(report.facts())
        return 0

    _print_report(report)
    if args.svg:
        print(f"\nThe roofline is drawn in {args.svg}.")
    if args.experts:
        print(f"\nThe experts are drawn in {args.experts}.")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise RequestError for a flag of the other profile."""
    if args.attention:
        ranks = ("tensor_parallel_size", "pipeline_parallel_size")
        given = {name: getattr(args, name) for name in ("prefill", "depth", "experts")}
        given["batch"] = args.batch != tuple(map(int, _BATCHES.split(",")))
        given["turns"] = args.turns != _TURNS
        given |= {name: getattr(args, name) > 1 for name in ranks}
        wrong = [name for name, value in given.items() if value or value == ()]
        if traits_of(args.backend) != traits_of(_AUTO):
            wrong.append("backend")
        reason = "does not belong to a profile of attention, which runs on one CPU"
    else:
        wrong = [name for name in ("tokens", "text") if getattr(args, name)]
        reason = "belongs to a profile of attention; add --attention"
    if wrong:
        flag = wrong[0].replace("_", "-")
        raise RequestError(f"--{flag} {reason}, or leave out --{flag}")


def _run_attention(args: argparse.Namespace) -> int:
    from headrace.cli.attention_table import print_attention
    from headrace.cli.progress import progress_bar
    from headrace.measure.attention_profile import attention_profile
    from headrace.measure.table import print_json

    with progress_bar() as on_progress:
        profile = attention_profile(
            args.model,
            text=args.text,
            tokens=args.tokens or 2048,
            on_progress=on_progress,
            **engine_options(args),
        )
    if args.svg:
        from headrace.measure.attention_picture import attention_map_svg

        write("--svg", args.svg, attention_map_svg(f"Attention of {profile.name}", profile))
    if args.json:
        print_json(profile.facts())
        return 0
    print_attention(profile)
    if args.svg:
        print(f"\nThe heads are drawn in {args.svg}.")
    return 0


def _profile_sparsity(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from headrace.cli.progress import progress_bar
    from headrace.measure.activation_sparsity import shared_zeros
    from headrace.measure.table import print_json, print_table

    with progress_bar() as on_progress:
        shares = shared_zeros(
            args.model, activation_sparsity=args.activation_sparsity, on_progress=on_progress
        )
    if args.json:
        print_json([asdict(share) for share in shares])
        return 0
    print_table(
        [">rows", ">zeros that all share", ">X^N"],
        [[str(s.rows), f"{s.measured:.1%}", f"{s.independent:.1%}"] for s in shares],
    )
    return 0


def _profile(args: argparse.Namespace) -> "ProfileReport":
    from headrace.cli.progress import progress_bar
    from headrace.measure.profile import has_experts, profile

    if args.experts and not has_experts(args.model):
        raise RequestError(f"{args.model} has no experts to draw; leave out --experts")
    with progress_bar() as on_progress:
        return profile(
            args.model,
            prefill=args.prefill,
            depths=args.depth,
            batches=args.batch,
            turns=args.turns,
            on_progress=on_progress,
            **engine_options(args),
        )


_LEGEND = """
Each figure is a median over the rounds. % after ms: share of the phase. % after GB/s and G op/s:
share of the measured rate, above 100 if bytes came from a cache or the machine was busier when it
was measured. min ms: the time that bytes and operations need. bound by latency or neither: bytes
and operations explain less than half of the time, of short or of long calls. The time of an op
includes its barrier."""


def _print_report(report: "ProfileReport") -> None:
    from headrace.measure.table import print_figures

    print_figures(report.title, _machine_figures(report))
    for profile in report.profiles:
        _print_phase(report, profile)
    _print_summary(report)
    names = [profile.phase.name for profile in report.profiles]
    print_steps(zip(names, report.uses, strict=True))
    if report.experts:
        print()
        _print_experts(report.experts)
    if report.skipped:
        print()
        print_figures("Skipped", report.skipped)
    print(_LEGEND)


def _machine_figures(report: "ProfileReport") -> dict[str, str]:
    machines = report.machines
    bandwidths = [machine.bandwidth for machine in machines]
    figures = {"memory read": _with_range(report.machine.bandwidth, bandwidths, "GB/s")}
    for kind, rate in report.machine.rates.items():
        rates = [machine.rates[kind] for machine in machines]
        figures[f"{kind} arithmetic"] = _with_range(rate, rates, "G op/s")
    return figures


def _with_range(median: float, values: list[float], unit: str) -> str:
    low, high = min(values), max(values)
    note = "; it drifted, and so may its shares" if high > (1 + _DRIFT) * low else ""
    return (
        f"{_number(median / 1e9)} {unit} ({_number(low / 1e9)}-{_number(high / 1e9)} in "
        f"{_count(len(values), 'measurement')}){note}"
    )


def _print_phase(report: "ProfileReport", profile: "PhaseProfile") -> None:
    from headrace.measure.table import print_table

    headings = [
        "op",
        ">calls",
        ">ms",
        ">%",
        ">MB",
        ">GB/s",
        ">%",
        ">G op",
        ">G op/s",
        ">%",
        ">min ms",
        "bound by",
    ]
    ops = sorted(profile.ops, key=lambda op: -op.seconds)
    outside_share = _percent(profile.outside / profile.seconds)
    rows = [_op_row(op, profile.seconds) for op in ops]
    rows.append(["outside ops", "", _ms(profile.outside), outside_share, *[""] * 8])
    rows.append(_total_row(profile))

    # Only ops on several ranks receive bytes over the link.
    link_bytes = [op.link_bytes for op in ops]
    if any(link_bytes):
        headings.append(">link MB")
        cells = [_number(count / 1e6) if count else "-" for count in link_bytes]
        cells += ["", _number(sum(link_bytes) / 1e6)]
        rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]

    print_table(headings, rows, _phase_title(report, profile))
    if profile.wall > (1 + _BUSY) * profile.seconds:
        print(
            f"The machine was busy: the parts take {_ms(profile.seconds)} ms (sum of medians), "
            f"and a round {_ms(profile.wall)} ms (median)."
        )
    print()


def _phase_title(report: "ProfileReport", profile: "PhaseProfile") -> str:
    walls, num_steps = profile.walls, len(profile.phase.steps)
    steps = f" in {num_steps} steps" if num_steps > 1 else ""
    return (
        f"{profile.phase.name}{steps}: {_ms(profile.wall)} ms "
        f"({_ms(min(walls))}-{_ms(max(walls))}, {_count(len(walls), 'round')}), "
        f"{report.barriers_per_layer(profile):.1f} barriers a layer"
    )


def _op_row(op: "OpProfile", phase_seconds: float) -> list[str]:
    row = [
        op.name,
        f"{op.calls:,}" if op.calls else "-",
        _ms(op.seconds),
        _percent(op.seconds / phase_seconds),
    ]
    row += _amount_cells(op.bytes, 1e6, op.seconds, op.memory_share)
    row += _amount_cells(op.flops, 1e9, op.seconds, op.arithmetic_share)
    return [*row, _ms(op.floor) if op.floor else "-", op.bound]


def _amount_cells(amount: int, unit: float, seconds: float, share: float) -> list[str]:
    if not amount:
        return ["-", "-", "-"]
    if not seconds:
        return [_number(amount / unit), "-", "-"]
    return [_number(amount / unit), _number(amount / seconds / 1e9), _percent(share)]


def _total_row(profile: "PhaseProfile") -> list[str]:
    ops, seconds = profile.ops, profile.seconds
    num_bytes, flops = sum(op.bytes for op in ops), sum(op.flops for op in ops)
    return [
        "all",
        "",
        _ms(seconds),
        "100",
        _number(num_bytes / 1e6),
        _number(num_bytes / seconds / 1e9),
        _percent(sum(op.memory_seconds for op in ops) / seconds),
        _number(flops / 1e9),
        _number(flops / seconds / 1e9),
        _percent(sum(op.arithmetic_seconds for op in ops) / seconds),
        _ms(profile.floor),
        "",
    ]


def _print_summary(report: "ProfileReport") -> None:
    from headrace.measure.table import print_table

    headings = ["phase", ">ms", ">tokens/s", ">limit", ">% of it", ">% outside ops", "slowest op"]
    rows = []
    for profile in report.profiles:
        slowest = max(profile.ops, key=lambda op: op.seconds)
        rows.append(
            [
                profile.phase.name,
                _ms(profile.wall),
                f"{profile.tokens_per_second:,.0f}",
                f"{profile.limit:,.0f}",
                _percent(profile.floor / profile.wall),
                _percent(profile.outside / profile.seconds),
                f"{slowest.name}, {_percent(slowest.seconds / profile.seconds)} %",
            ]
        )
    print_table(headings, rows, "All phases")


def _print_experts(profiles: "Sequence[ExpertProfile]") -> None:
    from headrace.measure.table import print_table

    headings = [
        "phase",
        ">experts",
        ">used in a step",
        ">if uniform",
        ">busiest",
        ">least busy",
    ]
    rows = [
        [
            profile.phase,
            f"{profile.num_experts:,}",
            _number(profile.measured),
            _number(profile.expected),
            f"{_number(profile.max_load)} x mean",
            f"{_number(profile.min_load)} x mean",
        ]
        for profile in profiles
    ]
    print_table(headings, rows, "Experts, mean over layers")


def _ms(seconds: float) -> str:
    return _number(1000 * seconds)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _number(number: float) -> str:
    return f"{number:,.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"
