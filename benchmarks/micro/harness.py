"""Shared parts of the micro benchmarks: rounds of kernels and roofs in turns, and output.

A round measures the roof and every kernel once, and ratios are formed within a round, so that a
slow second affects both. If the threads of the process get less processor time than they need,
another process is running, and the sample does not count.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

sys.path.append(
    str(Path(__file__).resolve().parents[2])
)  # tests/ lends its random tensors and tiny models

from headrace import _native
from headrace.measure.table import print_table
from headrace.planner import host
from headrace.program.op import Kind

COLD_BYTES = 256 << 20
"""Bytes of data that is read in turn, so that it leaves every cache; equal to the bytes of the
roof.
"""
ROUNDS = 7
_QUIET = 0.9
"""Min share of wall time x threads that the process must get."""
_WAKING = 0.5e-3
"""Seconds until all threads of the pool are awake."""
_FEWEST = 3
"""With fewer undisturbed rounds than this, all rounds count, and are marked."""


class Timed(NamedTuple):
    """A measurement: a function that returns seconds or a rate, and its number of busy threads."""

    run: Callable[[], float]
    threads: int


class Sample(NamedTuple):
    """One sample, and whether it was undisturbed."""

    value: float
    quiet: bool


class Spread(NamedTuple):
    median: float
    low: float
    high: float
    rounds: int
    quiet: bool
    """False if too few rounds were undisturbed, so that all rounds count."""

    def text(self, form: str) -> str:
        """`median (min-max)`; a `~` marks a figure of disturbed rounds."""
        low, high = (format(value, form).removesuffix("%") for value in (self.low, self.high))
        return f"{'' if self.quiet else '~'}{format(self.median, form)} ({low}-{high})"


class Rounds:
    """Samples by name, one per round."""

    def __init__(self, things: Mapping[Any, Timed], min_rounds: int, max_rounds: int) -> None:
        """Measure at least `min_rounds` rounds, and up to `max_rounds` until there are enough
        undisturbed samples.
        """
        self.samples: dict[Hashable, list[Sample]] = {name: [] for name in things}
        for thing in things.values():
            # fills the caches that are meant to be filled, and makes room for the activations
            thing.run()
        for done in range(1, max_rounds + 1):
            _progress(f"round {done} of {max(done, min_rounds)}")
            for name, thing in things.items():
                self.samples[name].append(_sample(thing))
            if done >= min_rounds and all(
                sum(s.quiet for s in samples) >= min_rounds for samples in self.samples.values()
            ):
                break
        _progress("")

    def spread(self, figure: Callable[..., float], *names: Hashable) -> Spread:
        """`figure` of the values of a round, over all rounds in which these samples were
        undisturbed.
        """
        rounds = list(zip(*(self.samples[name] for name in names), strict=True))
        quiet = [samples for samples in rounds if all(sample.quiet for sample in samples)]
        counted = quiet if len(quiet) >= min(_FEWEST, len(rounds)) else rounds
        figures = [figure(*(sample.value for sample in samples)) for samples in counted]
        return Spread(
            statistics.median(figures), min(figures), max(figures), len(figures), counted is quiet
        )


def _progress(text: str) -> None:
    """One overwritten line, on a terminal only. A faster display would disturb the measurement."""
    if sys.stderr.isatty():
        print(f"\r{text:20}\r", end="", file=sys.stderr, flush=True)


def _sample(thing: Timed) -> Sample:
    wall, cpu = time.perf_counter(), time.process_time()
    value = thing.run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Sample(value, cpu >= _QUIET * thing.threads * (wall - _WAKING))


class Column(NamedTuple):
    """A column of a table: key, heading and number format."""

    key: str
    heading: str
    form: str = ""


class Bench:
    """The options of a run, and its output."""

    def __init__(self, threads: int, quick: bool, lines: IO[str] | None) -> None:
        self.threads = threads or host.usable_cores()
        self.quick = quick
        self.cold_bytes = COLD_BYTES >> 6 if quick else COLD_BYTES
        self._lines = lines
        self._write(
            {"cpu": host.cpu_name(), "isa": _native.isa(), "threads": self.threads, "quick": quick}
        )
        print(
            f"{host.cpu_name()}, {_native.isa()}, {self.threads} threads; median "
            "(min-max), ~: disturbed by other processes"
        )

    def bandwidth(self, threads: int = 0) -> Timed:
        """The memory bandwidth as a measurement, bytes per second."""
        threads = threads or self.threads
        return Timed(lambda: _native.read_bandwidth(threads, self.cold_bytes), threads)

    def rate(self, kind: Kind, threads: int = 0) -> Timed:
        """The arithmetic rate as a measurement, operations per second."""
        threads = threads or self.threads
        return Timed(lambda: _native.dot_rate(kind, threads), threads)

    def busy(self, run: Callable[[], float]) -> Timed:
        """A measurement that keeps all threads busy."""
        return Timed(run, self.threads)

    def rounds(self, things: Mapping[Any, Timed]) -> Rounds:
        return Rounds(things, *((2, 2) if self.quick else (ROUNDS, 2 * ROUNDS)))

    def table(
        self,
        program: str,
        title: str,
        columns: Sequence[Column],
        rows: Iterable[Mapping[str, object]],
        **facts: object,
    ) -> None:
        """Print the rows, and write each as a JSON line with the common facts."""
        rows = list(rows)
        for row in rows:
            self._write({"program": program} | facts | row)
        words = {key for row in rows for key, value in row.items() if isinstance(value, str)}
        headings = [
            column.heading if column.key in words and not column.form else f">{column.heading}"
            for column in columns
        ]
        print()
        print_table(
            headings,
            [[_cell(row.get(column.key, ""), column.form) for column in columns] for row in rows],
            title,
        )
        sys.stdout.flush()

    def _write(self, line: Mapping[str, object]) -> None:
        if self._lines:
            plain = {
                key: value._asdict() if isinstance(value, Spread) else value
                for key, value in line.items()
            }
            self._lines.write(json.dumps(plain) + "\n")
            self._lines.flush()


def _cell(value: object, form: str) -> str:
    return (
        value.text(form)
        if isinstance(value, Spread)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def verdict(figure: Spread, *, minimum: float = 0.0, maximum: float = 0.0) -> str:
    """The target of a figure (a min share or a max ratio), and whether the median misses it."""
    missed = figure.median < minimum if minimum else figure.median > maximum
    target = f">= {minimum:.0%}" if minimum else f"<= {maximum:.2f}"
    doubt = "" if figure.quiet else "?"
    return f"{target}{', missed' if missed else ''}{doubt}"


def main(description: str | None, *programs: Callable[[Bench], None]) -> None:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="compute threads; 0: all available cores",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for every row as a line of JSON"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes and two rounds, as a test that does not measure",
    )
    args = parser.parse_args()
    if args.threads < 0:
        parser.error("--threads must be 0 or more")
    try:
        lines = args.json.open("w") if args.json else None
    except OSError as error:
        parser.error(f"--json: {error}")
    bench = Bench(args.threads, args.quick, lines)
    for program in programs:
        program(bench)
