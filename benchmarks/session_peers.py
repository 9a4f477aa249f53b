"""The same search in a session, in separate requests, and in llama.cpp.

    python benchmarks/session_peers.py [--rounds 3] [--ways session,requests,llama.cpp]
                                       [--jobs score,tree] [--python llama.cpp=PATH] [--cpu-time]

`score` gives the log-probabilities of 64 continuations of 16 tokens after a prompt of 2,048 tokens.
`tree` samples 8 continuations of the prompt, and 8 of each of these. Every turn is a new process,
and the ways take turns. The seconds are medians, with the lowest and the highest; the ratio to the
session is the median of the rounds. llama.cpp has its virtual environment in .bench/, installed on
first use; `--python` names another interpreter. `--cpu-time` counts seconds of the processor: on a
busy machine, with one thread, the ratio of these is that of the work.
"""

import argparse
import json
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

from engines.process import interpreter
from peers import gguf_file

_WORKER = Path(__file__).with_name("session_worker.py")
_MAX_DIFFERENCE = 0.1
"""Of the mean log-probability of a token, between ways that compute the same scores."""


def turn(python: str, way: str, words: list[str]) -> dict[str, Any]:
    """One process: its version, its seconds by job, and the mean of its scores."""
    result = subprocess.run(
        [python, _WORKER, way, *words], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def report(job: str, way: str, results: dict[str, list[dict[str, Any]]], clock: str) -> None:
    own = [result[clock][job] for result in results[way]]
    base = [result[clock][job] for result in next(iter(results.values()))]
    ratios = [mine / other for mine, other in zip(own, base, strict=True)]
    print(
        f"{job:6} {way:10} {results[way][0]['version']:8} {median(own):8.2f} s "
        f"({min(own):.2f}-{max(own):.2f}), {median(ratios):.2f} times the first way "
        f"({min(ratios):.2f}-{max(ratios):.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="session_peers.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="session,requests,llama.cpp")
    parser.add_argument("--jobs", default="score,tree")
    parser.add_argument("--python", action="append", default=[], metavar="WAY=PATH")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()

    ways = args.ways.split(",")
    pythons = dict(item.split("=", 1) for item in args.python)
    for way in ways:
        engine = "llama.cpp" if way == "llama.cpp" else "headrace"
        if way not in pythons:
            pythons[way] = interpreter(engine)
    words = [str(gguf_file(args.model)), "--jobs", args.jobs]
    for name in ("threads", "prompt", "count", "tokens"):
        words += [f"--{name}", str(getattr(args, name))]
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            results[way].append(turn(pythons[way], way, words))
    for job in args.jobs.split(","):
        for way in ways:
            report(job, way, results, "cpu_seconds" if args.cpu_time else "seconds")
    means = {way: found[0]["mean"] for way, found in results.items() if found[0]["mean"]}
    if means and max(means.values()) - min(means.values()) > _MAX_DIFFERENCE:
        raise SystemExit(f"session_peers.py: the ways score differently: {means}")


if __name__ == "__main__":
    main()
