"""A profile as tables: the machine, each phase op by op, and all phases in one."""

from headrace.cli.table import print_figures, print_table
from headrace.planner.profile import OpProfile, PhaseProfile
from headrace.planner.report import Report

_HEADINGS = [
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
    ">least ms",
    "bound by",
]
_DRIFT = 0.1
"""Of the measurements: from here on it is worth a word."""


def print_report(report: Report) -> None:
    """Everything, on stdout."""
    print_figures(report.title, _machine_figures(report))
    for profile in report.profiles:
        _print_phase(report, profile)
    _print_summary(report)
    if report.experts:
        print()
        _print_experts(report)
    if report.skipped:
        print()
        print_figures("Left out", report.skipped)
    print(_LEGEND)


_LEGEND = """
Each figure is a median over the rounds. % after ms: of the phase; after GB/s and G op/s: of what
was measured here, above 100 where bytes came from a cache or the machine was busier at that time.
Least ms: what bytes and operations allow. Bound by latency, or neither: these two explain less
than half of the time, of short calls or of long ones. An op's time ends with its barrier."""


def _machine_figures(report: Report) -> dict[str, str]:
    """Each figure as it is used, and the range of its measurements."""
    figures = {
        "memory read": _measured(
            [machine.bandwidth for machine in report.machines], report.machine.bandwidth, "GB/s"
        )
    }
    for kind, rate in report.machine.rates.items():
        figures[f"{kind} arithmetic"] = _measured(
            [machine.rates[kind] for machine in report.machines], rate, "G op/s"
        )
    return figures


def _measured(values: list[float], used: float, unit: str) -> str:
    low, high = min(values), max(values)
    note = "; it drifted, and so may the shares of it" if high > (1 + _DRIFT) * low else ""
    return (
        f"{_short(used / 1e9)} {unit} ({_short(low / 1e9)}-{_short(high / 1e9)} in "
        f"{_count(len(values), 'measurement')}){note}"
    )


def _print_phase(report: Report, profile: PhaseProfile) -> None:
    rows = [_op_row(op, profile.seconds) for op in sorted(profile.ops, key=lambda op: -op.seconds)]
    outside = [
        "outside ops",
        "",
        _ms(profile.outside),
        _percent(profile.outside / profile.seconds),
        *[""] * 8,
    ]
    num_bytes, flops = sum(op.bytes for op in profile.ops), sum(op.flops for op in profile.ops)
    total = [
        "all",
        "",
        _ms(profile.seconds),
        "100",
        _short(num_bytes / 1e6),
        _short(num_bytes / profile.seconds / 1e9),
    ]
    total += [
        _percent(sum(op.memory_seconds for op in profile.ops) / profile.seconds),
        _short(flops / 1e9),
    ]
    total += [
        _short(flops / profile.seconds / 1e9),
        _percent(sum(op.arithmetic_seconds for op in profile.ops) / profile.seconds),
    ]
    headings, table = _HEADINGS, [*rows, outside, [*total, _ms(profile.floor), ""]]
    linked = [op.link_bytes for op in sorted(profile.ops, key=lambda op: -op.seconds)]
    if any(linked):
        headings = [*headings, ">link MB"]
        cells = [_short(count / 1e6) if count else "-" for count in linked] + [
            "",
            _short(sum(linked) / 1e6),
        ]
        table = [[*row, cell] for row, cell in zip(table, cells, strict=True)]
    print_table(headings, table, _title(report, profile))
    if profile.wall > (1 + _DRIFT) * profile.seconds:
        print(
            "The machine was busy: the medians of the parts come to "
            f"{_ms(profile.seconds)} ms, that of the rounds to {_ms(profile.wall)}."
        )
    print()


def _title(report: Report, profile: PhaseProfile) -> str:
    walls, steps = profile.walls, len(profile.phase.steps)
    times = (
        f"{_ms(profile.wall)} ms ({_ms(min(walls))}-{_ms(max(walls))}, "
        f"{_count(len(walls), 'round')})"
    )
    cut = f" in {steps} steps" if steps > 1 else ""
    return (
        f"{profile.phase.name}{cut}: {times}, {report.barriers_per_layer(profile):.1f} "
        "barriers a layer"
    )


def _op_row(op: OpProfile, total: float) -> list[str]:
    row = [
        op.name,
        f"{op.calls:,}" if op.calls else "-",
        _ms(op.seconds),
        _percent(op.seconds / total),
    ]
    if op.bytes and op.seconds:
        row += [
            _short(op.bytes / 1e6),
            _short(op.bytes / op.seconds / 1e9),
            _percent(op.memory_share),
        ]
    else:
        row += [_short(op.bytes / 1e6) if op.bytes else "-", "-", "-"]
    if op.flops and op.seconds:
        row += [
            _short(op.flops / 1e9),
            _short(op.flops / op.seconds / 1e9),
            _percent(op.arithmetic_share),
        ]
    else:
        row += [_short(op.flops / 1e9) if op.flops else "-", "-", "-"]
    return [*row, _ms(op.floor) if op.floor else "-", op.bound]


def _print_summary(report: Report) -> None:
    headings = ["phase", ">ms", ">tokens/s", ">limit", ">% of it", ">% outside ops", "most time in"]
    rows = []
    for p in report.profiles:
        top = max(p.ops, key=lambda op: op.seconds)
        speed = [
            _ms(p.wall),
            f"{p.tokens_per_second:,.0f}",
            f"{p.limit:,.0f}",
            _percent(p.floor / p.wall),
        ]
        most = f"{top.name}, {_percent(top.seconds / p.seconds)} %"
        rows.append([p.phase.name, *speed, _percent(p.outside / p.seconds), most])
    print_table(headings, rows, "All phases")


def _print_experts(report: Report) -> None:
    headings = [
        "phase",
        ">experts",
        ">hit in a step",
        ">if chance chose",
        ">busiest",
        ">least busy",
    ]
    rows = []
    for e in report.experts:
        hit = [f"{e.num_experts:,}", _short(e.measured), _short(e.expected)]
        rows.append([e.phase, *hit, f"{_short(e.most)} x even", f"{_short(e.least)} x even"])
    print_table(headings, rows, "Experts that rows went to, in the mean over layers")


def _ms(seconds: float) -> str:
    return _short(1000 * seconds)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _short(number: float) -> str:
    """Three digits that count, or all before the point."""
    return f"{number:,.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"
