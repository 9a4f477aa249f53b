"""What the micro benchmarks share: rounds in which kernels and the roof take turns, and where the
figures go.

A round measures the roof and every kernel once, one after the other, and ratios are formed inside a
round: a slow second of the machine then falls on both sides. While a thing runs, the process should
have all of its threads' time on the processors; where it had less, another process had them, and
that sample does not count.
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
"""Read in turn, so much has left every cache before its next turn; as much as the roof itself
reads.
"""
ROUNDS = 7
_QUIET = 0.9
"""Least share of wall time x threads that the process must have had."""
_WAKING = 0.5e-3
"""Seconds that threads may take to be all at work: the pool's workers sleep between samples."""
_FEWEST = 3
"""With fewer quiet rounds than this, all rounds are shown, and marked."""


class Timed(NamedTuple):
    """Something to measure: returns seconds, or a rate, and keeps so many threads busy
    meanwhile.
    """

    run: Callable[[], float]
    threads: int


class Sample(NamedTuple):
    """One measurement, and whether the process had its threads' time to itself."""

    value: float
    quiet: bool


class Spread(NamedTuple):
    """A figure over the rounds that count."""

    median: float
    low: float
    high: float
    rounds: int
    quiet: bool
    """False: hardly a round was left undisturbed, so all of them are in here."""

    def text(self, form: str) -> str:
        """`median (low-high)`; a `~` marks a figure of disturbed rounds."""
        low, high = (format(value, form).removesuffix("%") for value in (self.low, self.high))
        return f"{'' if self.quiet else '~'}{format(self.median, form)} ({low}-{high})"


class Rounds:
    """Samples by name, one of each in a round."""

    def __init__(self, things: Mapping[Any, Timed], least: int, most: int) -> None:
        """Measure `least` rounds, and go on to `most` until each thing has so many quiet
        samples.
        """
        self.samples: dict[Hashable, list[Sample]] = {name: [] for name in things}
        for thing in things.values():
            # fills the caches that are meant to be filled, and makes room for the activations
            thing.run()
        for done in range(1, most + 1):
            _progress(f"round {done} of {max(done, least)}")
            for name, thing in things.items():
                self.samples[name].append(_sample(thing))
            if done >= least and all(
                sum(s.quiet for s in samples) >= least for samples in self.samples.values()
            ):
                break
        _progress("")

    def spread(self, figure: Callable[..., float], *names: Hashable) -> Spread:
        """`figure` of the values that these things had in a round, over the rounds in which they
        were undisturbed.
        """
        rounds = list(zip(*(self.samples[name] for name in names), strict=True))
        quiet = [samples for samples in rounds if all(sample.quiet for sample in samples)]
        counted = quiet if len(quiet) >= min(_FEWEST, len(rounds)) else rounds
        figures = [figure(*(sample.value for sample in samples)) for samples in counted]
        return Spread(
            statistics.median(figures), min(figures), max(figures), len(figures), counted is quiet
        )


def _progress(text: str) -> None:
    """One line that is overwritten, on a terminal only; a livelier one would take time from what is
    measured.
    """
    if sys.stderr.isatty():
        print(f"\r{text:20}\r", end="", file=sys.stderr, flush=True)


def _sample(thing: Timed) -> Sample:
    wall, cpu = time.perf_counter(), time.process_time()
    value = thing.run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Sample(value, cpu >= _QUIET * thing.threads * (wall - _WAKING))


class Column(NamedTuple):
    """A column of a table: a key of its rows, the heading, and how figures look."""

    key: str
    heading: str
    form: str = ""


class Bench:
    """One call from the command line: what it may use, how long it may take, where its rows go."""

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
            "(least-most), ~: disturbed by other processes"
        )

    def bandwidth(self, threads: int = 0) -> Timed:
        """The roof of what streams from memory, bytes per second."""
        threads = threads or self.threads
        return Timed(lambda: _native.read_bandwidth(threads, self.cold_bytes), threads)

    def rate(self, kind: Kind, threads: int = 0) -> Timed:
        """The roof of arithmetic, operations per second."""
        threads = threads or self.threads
        return Timed(lambda: _native.dot_rate(kind, threads), threads)

    def busy(self, run: Callable[[], float]) -> Timed:
        """Something that keeps all threads busy."""
        return Timed(run, self.threads)

    def rounds(self, things: Mapping[Any, Timed]) -> Rounds:
        """Measure these things in turns."""
        return Rounds(things, *((2, 2) if self.quick else (ROUNDS, 2 * ROUNDS)))

    def table(
        self,
        program: str,
        title: str,
        columns: Sequence[Column],
        rows: Iterable[Mapping[str, object]],
        **facts: object,
    ) -> None:
        """Print the rows, and write each as a JSON line together with the facts that all of them
        share.
        """
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


def verdict(figure: Spread, *, least: float = 0.0, most: float = 0.0) -> str:
    """The target of a figure, a least share or a most ratio, and whether its median misses it."""
    missed = figure.median < least if least else figure.median > most
    return f"{f'>= {least:.0%}' if least else f'<= {most:.2f}'}{', missed' if missed else ''}{'' if figure.quiet else '?'}"


def main(description: str | None, *programs: Callable[[Bench], None]) -> None:
    """Run the programs with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="compute threads; 0: as many as may be used",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every row as a line of JSON"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes and two rounds: shows that it runs, measures nothing",
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
