"""The tables of `headrace bench`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.measure.bench_rows import BenchSetup, LatencyRow, ThroughputRow
    from headrace.outputs import Timing
    from headrace.planner.utilisation import StepUse


def print_rows(kind: str, rows: "Sequence[LatencyRow | ThroughputRow]") -> None:
    from headrace.measure.bench_rows import LatencyRow, ThroughputRow
    from headrace.measure.table import size

    _print_setup(kind, rows[0].setup)
    if kind == "latency":
        latency_rows = [row for row in rows if isinstance(row, LatencyRow)]
        _print_latency(latency_rows)
        print_steps([(_test_name(row), row.use) for row in latency_rows])
        timings = {_test_name(row): row.timing for row in latency_rows}
        samples = f"{len(latency_rows[0].samples['seconds'])} runs"
    else:
        throughput_rows = [row for row in rows if isinstance(row, ThroughputRow)]
        _print_throughput(throughput_rows)
        print_steps(
            [
                (f"{row.test}, {kind}", use)
                for row in throughput_rows
                for kind, use in row.uses.items()
            ]
        )
        timings = {row.test: row.timing for row in throughput_rows}
        samples = "requests and their tokens"
    _print_timings(timings)
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
            **({"lossy": setup.lossy} if setup.lossy else {}),
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
            _test_name(row),
            f"{row.tokens_per_second:,.1f}",
            f"{row.tokens_per_second_min:,.1f}-{row.tokens_per_second_max:,.1f}",
            f"{row.ms_per_token:.2f}",
            _milliseconds(row.first_token),
            f"{row.limit:,.0f}",
            f"{100 * row.share_of_limit:.0f} %",
        ]
        for row in rows
    ]
    if costs := [row.dollars_per_million for row in rows if row.dollars_per_million is not None]:
        headings.append(">$ a million")
        lines = [[*line, f"{cost:.3f}"] for line, cost in zip(lines, costs, strict=True)]
    print_table(headings, lines)


def _test_name(row: "LatencyRow") -> str:
    return f"{row.test} @ d{row.depth}" if row.depth else row.test


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
    if costs := [row.dollars_per_million for row in rows if row.dollars_per_million]:
        headings += [">$ a million in", ">out"]
        lines = [
            [*line, f"{cost['prompt']:.3f}", f"{cost['output']:.3f}"]
            for line, cost in zip(lines, costs, strict=True)
        ]
    print_table(headings, lines)


def print_steps(uses: "Iterable[tuple[str, StepUse | None]]") -> None:
    """Print the time of steps next to its prediction, and their use of the machine."""
    from headrace.measure.table import print_table

    known = [(name, use) for name, use in uses if use]
    headings = ["steps of", ">steps", ">ms", ">predicted", ">error"]
    roofs = dict.fromkeys(roof for _, use in known for roof in use.mbu)
    headings += [f">{share}, {roof}" for roof in roofs for share in ("MBU", "MFU")]
    lines = [
        [
            name,
            f"{use.steps:,}",
            f"{1000 * use.seconds:,.2f}",
            f"{1000 * use.predicted:,.2f}" if use.predicted else "-",
            "-" if use.error is None else f"{100 * use.error:+.0f} %",
            *(f"{100 * share[roof]:.0f} %" for roof in roofs for share in (use.mbu, use.mfu)),
        ]
        for name, use in known
    ]
    print()
    print_table(headings, lines, "Steps: mean time, and shares of bandwidth and arithmetic")


def _print_timings(timings: "Mapping[str, Timing]") -> None:
    """Print the parts of a mean request."""
    from headrace.measure.table import print_table

    parts = {name: asdict(timing) for name, timing in timings.items()}
    headings = ["request", *(f">{part}" for part in next(iter(parts.values()))), ">sum"]
    lines = [
        [name, *map(_milliseconds, values.values()), _milliseconds(sum(values.values()))]
        for name, values in parts.items()
    ]
    print()
    print_table(headings, lines, "Time of a whole request")


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"
