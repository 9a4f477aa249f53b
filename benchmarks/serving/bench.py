"""What the serving benchmarks share: options, where figures go, and a run of requests through an
engine.
"""

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
    """A request of a benchmark: random tokens, and an output that does not end early."""

    prompt: list[int]
    num_tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.num_tokens, ignore_eos=True)


class Served(NamedTuple):
    """What became of requests that were submitted together."""

    seconds: float
    latencies: list[float]
    """Seconds from submitting to the last token, in the order of the requests."""
    outputs: list[list[int]]
    waste: float
    """Mean over the steps of the share of slots in use that hold no KV."""
    fragmentation: float
    """The same without those that known tokens will fill: of prompts that are being read."""


class Bench:
    """One call from the command line."""

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
            "median (least-most)"
        )

    def engine(self, **options: Any) -> Engine:
        """The model under these fields of EngineConfig."""
        return load_model(self.model, engine_config({"threads": self.threads} | options)).engine

    def table(
        self,
        program: str,
        title: str,
        headings: Sequence[str],
        rows: Iterable[tuple[Mapping[str, object], Sequence[str]]],
    ) -> None:
        """Rows as they go to JSON, each with its cells."""
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
    """Submit all and wait for the last."""
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
    """One line that is overwritten, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def spread(values: Iterable[float], form: str) -> str:
    """`median (least-most)`."""
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
        help=f"which to run: {', '.join(programs)} (default: all)",
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="compute threads; 0: as many as may be used",
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
        help="of the trace, in `batching` (default: %(default)s of 500)",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=0,
        metavar="N",
        help="tokens of the long prompt (default: 4096 in `pauses`, all the context in `memory`)",
    )
    parser.add_argument(
        "--cached",
        type=int,
        default=0,
        metavar="N",
        help="of which so many are read before the streams of `pauses` begin",
    )
    parser.add_argument(
        "--set",
        type=_fields,
        action="append",
        metavar="F=V,...",
        help="fields of EngineConfig, a row of `pauses`",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every row as a line of JSON"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes and one round: shows that it runs, measures nothing",
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
