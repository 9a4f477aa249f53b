"""Headrace and its peers with the same models, threads and prompts, in turns.

    python benchmarks/peers.py                                    all peers, the default model
    python benchmarks/peers.py --engines llama.cpp --workloads decode,prefill
    python benchmarks/peers.py --model .bench/models/shaped-1b-Q4_0.gguf

A round runs one new process after the other, A B C, then A B C again, so that a slow minute of the
machine affects all of them. Each peer has a virtual environment in .bench/, installed on first use,
or an existing one: `--peer NAME=PYTHON`. Engines without the formats of GGUF get the same weights
in bfloat16. Notes below the table explain every gap in it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from engines import ENGINES
from engines.process import BENCH, Unavailable, interpreter, turn
from report import OURS, Figure, table
from worker import WORKLOADS

from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.convert.folder.writer import plan_folder, write_folder
from headrace.convert.source_model import open_source_model
from headrace.errors import HeadraceError
from headrace.planner import host

Result = dict[str, Any]
"""The output of one worker process, and its turn."""


class Contest:
    """One model and all engines."""

    def __init__(
        self, model: Path, pythons: dict[str, str], workloads: Sequence[str], threads: int
    ) -> None:
        self.model = model
        self.pythons = pythons
        self.threads = threads
        self.vocabulary = open_checkpoint(model).spec.vocab_size
        self.groups: dict[int, list[str]] = {}
        """The workloads of one process, by their number of requests."""
        for name in workloads:
            self.groups.setdefault(WORKLOADS[name].num_requests, []).append(name)
        self.failures: dict[tuple[str, int], str] = {}
        """The reason that an engine is left out, by engine and number of requests."""

    def turns(self, rounds: int) -> Iterator[Result]:
        """Run all processes in turn. A first round without workloads fills caches and finds engines
        that fail.
        """
        for number in range(rounds + 1):
            for num_requests, workloads in self.groups.items():
                for engine in self.pythons:
                    if (engine, num_requests) in self.failures:
                        continue
                    when = f"round {number} of {rounds}" if number else "rehearsal"
                    say(f"{self.model.name}, {when}: {engine}, {requests(num_requests)}")
                    try:
                        found = turn(
                            self.pythons[engine],
                            engine,
                            self.threads,
                            self._words(engine, num_requests, number),
                        )
                    except Unavailable as error:
                        self.failures[engine, num_requests] = str(error)
                        continue
                    if number:
                        turn_of = {
                            "model": self.model.name,
                            "engine": engine,
                            "round": number,
                            "num_requests": num_requests,
                        }
                        yield turn_of | {"workloads": workloads} | found
        say("")

    def _words(self, engine: str, num_requests: int, number: int) -> list[str]:
        workloads = self.groups[num_requests]
        longest = max(WORKLOADS[name].prompt + WORKLOADS[name].tokens for name in workloads)
        model = (
            self.model if ENGINES[engine].reads_gguf else bf16_folder(self.model, BENCH / "models")
        )
        options = {
            "num-requests": num_requests,
            "longest": longest,
            "seed": number,
            "vocabulary": self.vocabulary,
        }
        return [
            str(model),
            *(workloads if number else ()),
            *(f"--{name}={value}" for name, value in options.items()),
        ]


def bf16_folder(path: Path, out: Path) -> Path:
    """The model as a folder in bfloat16, for engines without the formats of GGUF; written on first
    use.
    """
    folder = out / f"{path.stem}-as-bf16"
    if not folder.exists():
        original = open_source_model(path)
        write_folder(
            original,
            folder,
            plan_folder(original, None, (), "BF16"),
            original.checkpoint.tensors,
            (),
        )
    return folder


def figures(result: Result) -> Iterator[Figure]:
    """The lines of the table that a process contributes to."""
    what = result["round"], result["engine"]
    for name, value in result["figures"].items():
        yield Figure(*what, name, value, False)
    if result["num_requests"] == 1:
        yield Figure(
            *what, "seconds to the first token, process start included", result["start"], True
        )
    yield Figure(
        *what,
        f"MB of peak memory, {requests(result['num_requests'])}",
        result["peak_memory"] / 1e6,
        True,
    )


def report(contest: Contest, results: list[Result], rounds: int, absent: dict[str, str]) -> None:
    """Print the table and the notes below it."""
    size = f"{contest.model.stat().st_size / 1e6:,.0f} MB"
    print(
        f"\n{contest.model.name}, {size}, {contest.threads} threads, {rounds} rounds, "
        f"{host.cpu_name()}, {datetime.now(UTC):%Y-%m-%d}\n"
    )
    print(
        table(
            "tokens/s, median (min-max)",
            contest.pythons,
            [figure for result in results for figure in figures(result)],
        )
    )
    print()
    versions = {result["engine"]: result["version"] for result in results}
    for engine, version in versions.items():
        print(f"* {engine} {version}{f': {note}' if (note := ENGINES[engine].note) else ''}")
    for (engine, num_requests), reason in contest.failures.items():
        print(f"* {engine}, {requests(num_requests)}: failed: {reason}")
    for engine, reason in absent.items():
        print(f"* {engine}: not available here: {reason}")


def requests(count: int) -> str:
    return f"{count} request{'s' * (count > 1)}"


def say(what: str) -> None:
    """Show progress: in place on a terminal, otherwise on a new line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()
    elif what:
        print(what, file=sys.stderr)


def several(known: Sequence[str]) -> Any:
    """Parse a comma-separated list of these names."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; there are {', '.join(known)}"
            )
        return names

    return read


def own_python(text: str) -> tuple[str, str]:
    engine, _, python = text.partition("=")
    peers = [name for name in ENGINES if name != OURS]
    if engine not in peers or not python:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=PYTHON, with one of {', '.join(peers)}"
        )
    return engine, python


def gguf_file(model: str) -> Path:
    try:
        path = resolve(model)
    except HeadraceError as error:
        sys.exit(f"peers.py: {error}")
    if not path.is_file():
        sys.exit(f"peers.py: {model} is no GGUF file, which is what most engines read")
    return path


def main() -> None:
    peers = [engine for engine in ENGINES if engine != OURS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        action="append",
        help="GGUF file, or a model name of `headrace pull`; repeatable",
    )
    parser.add_argument(
        "--engines",
        type=several(peers),
        default=peers,
        help=f"peers to compare: {','.join(peers)}; Headrace always takes part",
    )
    parser.add_argument(
        "--workloads",
        type=several(list(WORKLOADS)),
        default=list(WORKLOADS),
        help=f"workloads to run: {','.join(WORKLOADS)}",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=host.usable_cores())
    parser.add_argument(
        "--peer",
        type=own_python,
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="Python interpreter with the engine installed",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="file to which a JSON line with raw figures is appended for each process",
    )
    args = parser.parse_args()
    if min(args.rounds, args.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    models = [gguf_file(model) for model in args.model or ["smollm2"]]

    pythons, absent = {OURS: sys.executable}, {}
    for engine in args.engines:
        try:
            pythons[engine] = dict(args.peer).get(engine) or interpreter(engine)
        except Unavailable as error:
            absent[engine] = str(error)
    with args.json.open("a") if args.json else nullcontext() as file:
        for model in models:
            contest = Contest(model, pythons, args.workloads, args.threads)
            results = []
            for result in contest.turns(args.rounds):
                results.append(result)
                record(result | {"threads": args.threads}, file)
            report(contest, results, args.rounds, absent)


def record(result: Result, file: TextIO | None) -> None:
    if file:
        facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cpu": host.cpu_name()}
        print(json.dumps(facts | result), file=file, flush=True)


if __name__ == "__main__":
    main()
