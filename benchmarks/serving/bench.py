"""Shared parts of the serving benchmarks: options, output, and running requests."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import IO, Any, NamedTuple

sys.path.append(
    str(Path(__file__).resolve().parents[2])
)  # tests/ lends its tiny models and the text

from headrace import _native
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError
from headrace.loader.load import load_model
from headrace.loader.options import engine_config
from headrace.measure.table import print_table
from headrace.planner import host
from headrace.sampling_params import SamplingParams


class Ask(NamedTuple):
    """A request with random tokens and an output that does not end early."""

    prompt: list[int]
    num_tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.num_tokens, ignore_eos=True)


class Served(NamedTuple):
    """The results of requests that were submitted together."""

    seconds: float
    latencies: list[float]
    """Seconds from submission to the last token of each request."""
    outputs: list[list[int]]
    waste: float
    """Share of used slots without KV, mean over the steps."""
    fragmentation: float
    """Share of used slots that no known token will fill, mean over the steps."""


class Bench:
    """The options of a run, and its output."""

    def __init__(self, args: argparse.Namespace, lines: IO[str] | None) -> None:
        self.quick: bool = args.quick
        self.model: str = args.model
        self.threads: int = args.threads or host.usable_cores()
        self.rounds = 1 if args.quick else args.rounds
        self.num_requests = 12 if args.quick else args.requests
        self.prompt: int = args.prompt
        self.cached: int = args.cached
        self.variants: list[dict[str, Any]] = args.set or [
            {},
            {"chunked_prefill_size": 64},
            {"chunked_prefill_size": 512},
        ]
        self._lines = lines
        self._write(
            {
                "cpu": host.cpu_name(),
                "isa": _native.isa(),
                "threads": self.threads,
                "model": self.model,
                "quick": self.quick,
            }
        )
        print(
            f"{host.cpu_name()}, {_native.isa()}, {self.threads} threads, {self.model}; "
            "median (min-max)"
        )

    def engine(self, **options: Any) -> Engine:
        """The model with these fields of EngineConfig."""
        return load_model(self.model, engine_config({"threads": self.threads} | options)).engine

    def table(
        self,
        program: str,
        title: str,
        headings: Sequence[str],
        rows: Iterable[tuple[Mapping[str, object], Sequence[str]]],
    ) -> None:
        """The rows for JSON, each with its cells."""
        cells = []
        for facts, row in rows:
            self._write({"program": program} | dict(facts))
            cells.append(row)
        print()
        print_table(headings, cells, title)
        sys.stdout.flush()

    def _write(self, line: Mapping[str, object]) -> None:
        if self._lines:
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()


def serve(engine: Engine, asks: Sequence[Ask], what: str = "") -> Served:
    """Submit all requests and wait for the last one."""
    begun = perf_counter()
    ids = [engine.add_request(ask.prompt, ask.params) for ask in asks]
    outputs: dict[str, list[int]] = {}
    latencies: dict[str, float] = {}
    waste, fragmentation = [], []
    while engine.has_work:
        updates, now = engine.step(), perf_counter()
        stats = engine.stats()
        if stats.blocks_used:
            waste.append(stats.waste)
            fragmentation.append(stats.fragmentation)
        for update in updates:
            if update.result:
                if update.result.error:
                    raise update.result.error
                outputs[update.request_id] = update.result.outputs[0].token_ids
                latencies[update.request_id] = now - begun
                say(f"{what}: {len(outputs):,} of {len(asks):,} requests")
    seconds = perf_counter() - begun
    say("")
    return Served(
        seconds,
        [latencies[i] for i in ids],
        [outputs[i] for i in ids],
        statistics.fmean(waste),
        statistics.fmean(fragmentation),
    )


def say(text: str) -> None:
    """Show one overwritten line, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def spread(values: Iterable[float], form: str) -> str:
    """`median (min-max)`."""
    values = list(values)
    middle = format(statistics.median(values), form)
    return (
        f"{middle} ({format(min(values), form)}-{format(max(values), form)})"
        if len(values) > 1
        else middle
    )


def _fields(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{pair!r} must be FIELD=VALUE")
        fields[name] = int(value) if value.isdecimal() else value
    return fields


def main(description: str | None, programs: Mapping[str, Callable[[Bench], None]]) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks/serving",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "programs",
        nargs="*",
        metavar="PROGRAM",
        help=f"benchmarks to run: {', '.join(programs)} (default: all)",
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="compute threads; 0: all available cores",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="turns of each side (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=160,
        metavar="N",
        help="requests of the trace in `batching` (default: %(default)s of 500)",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=0,
        metavar="N",
        help="tokens of the long prompt (default: 4096 in `pauses`, the full context in `memory`)",
    )
    parser.add_argument(
        "--cached",
        type=int,
        default=0,
        metavar="N",
        help="prompt tokens that are computed before the streams of `pauses` start",
    )
    parser.add_argument(
        "--set",
        type=_fields,
        action="append",
        metavar="F=V,...",
        help="fields of EngineConfig for a row of `pauses`; repeatable",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for every row as a line of JSON"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes and one round, as a test that does not measure",
    )
    args = parser.parse_args()
    if unknown := set(args.programs) - set(programs):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(programs)}")
    if args.threads < 0 or args.rounds < 1 or args.requests < 1:
        parser.error("--threads must be 0 or more, --rounds and --requests 1 or more")
    if args.prompt < 0 or not 0 <= args.cached < (args.prompt or 4096):
        parser.error("--prompt must be 0 or more, --cached less than the prompt")
    try:
        bench = Bench(args, args.json.open("w") if args.json else None)
        for name, program in programs.items():
            if not args.programs or name in args.programs:
                program(bench)
    except OSError as error:
        parser.error(f"--json: {error}")
    except HeadraceError as error:
        sys.exit(f"{parser.prog}: {error}")
