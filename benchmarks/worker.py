"""The worker process of `peers.py`: loads one engine, runs its workloads, prints two JSON lines.

The first line is printed at the first token, so that the parent process can measure its time. The
second line has the engine's version, the figures and the peak memory. It uses the standard library
only, since every engine's interpreter runs it.
"""

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TextIO

from engines import ENGINES, Engine, Times


class Workload(NamedTuple):
    """Requests that are submitted together, repeatedly."""

    num_requests: int
    prompt: int
    tokens: int
    repetitions: int
    """Runs whose median counts; if there are several, a warm-up run comes first."""

    def figures(self, times: list[Times]) -> Iterator[tuple[str, float]]:
        """The figure of a run, in tokens per second."""
        if self.num_requests > 1:
            name = f"{self.num_requests} requests x ({self.prompt} + {self.tokens}), output"
            yield name, self.num_requests * self.tokens / max(time.last for time in times)
            return
        (time,) = times
        if self.prompt >= 512:
            yield f"prefill of {self.prompt}", self.prompt / time.first
        if self.tokens > 1:
            yield (
                f"decode of {self.tokens - 1} after {self.prompt}",
                (self.tokens - 1) / (time.last - time.first),
            )


WORKLOADS = {
    "decode": Workload(1, 8, 129, 3),
    "prefill": Workload(1, 512, 1, 3),
    "long": Workload(1, 2048, 129, 1),
    "requests": Workload(32, 128, 128, 1),
}
"""All workloads of a process have the same number of requests, for which the engine is loaded."""


def run(workload: Workload, engine: Engine, prompts: "Prompts") -> dict[str, float]:
    runs = []
    for _ in range(workload.repetitions + (workload.repetitions > 1)):
        times = engine.generate(
            [prompts.new(workload.prompt) for _ in range(workload.num_requests)], workload.tokens
        )
        runs.append(dict(workload.figures(times)))
    counted = runs[-workload.repetitions :]
    return {name: statistics.median(figures[name] for figures in counted) for name in counted[0]}


class Prompts:
    """Random prompts, always new, so that no prefix cache helps; the same in every engine."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def new(self, tokens: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(tokens)]


def peak_memory() -> int:
    """Peak memory in bytes. A process inherits `ru_maxrss` from its parent, so it is not used."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def private_stdout() -> TextIO:
    """Our own stdout; the output of an engine goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("workloads", nargs="*", help=f"workloads to run: {', '.join(WORKLOADS)}")
    parser.add_argument("--num-requests", type=int, default=1)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, required=True)
    args = parser.parse_args()
    out = private_stdout()
    prompts = Prompts(args.seed, args.vocabulary)
    engine = import_module(ENGINES[args.engine].module).Engine(
        args.model, args.threads, args.num_requests, args.longest
    )
    engine.generate([prompts.new(8)], 1)
    print(json.dumps({"started": True}), file=out)
    figures: dict[str, float] = {}
    for name in args.workloads:
        figures |= run(WORKLOADS[name], engine, prompts)
    print(
        json.dumps({"version": engine.version, "figures": figures, "peak_memory": peak_memory()}),
        file=out,
    )
    out.flush()
    sys.stderr.flush()
    os._exit(0)  # some engines take long, or fail, in their own farewell


if __name__ == "__main__":
    main()
