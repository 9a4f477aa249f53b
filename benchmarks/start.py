"""Start-up time: `headrace --help`, and a cold `headrace run` up to its first token.

Every run is a new process, with the model file in the page cache. Times are wall seconds, including
process start, and processor seconds of all threads and child processes.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

COMMANDS = {
    "--help": ["--help"],
    "first token": ["run", "{model}", "Hi", "--max-tokens", "1"],
}
HERE = "this one"


class Start(NamedTuple):
    """Seconds of one run."""

    first_byte: float
    cpu: float


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(command: list[str], checkout: Path | None) -> Start:
    # Without bytecode every run would compile all modules, which an installed package does once.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if checkout:
        env["PYTHONPATH"] = str(checkout.resolve())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    before, begun = cpu_of_children(), time.perf_counter()
    with subprocess.Popen(command, env=env, cwd=checkout, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - begun
        process.stdout.read()
        errors = process.stderr.read()
    if process.returncode or not first:
        sys.exit(f"{' '.join(command)} failed:\n{errors.decode()}")
    return Start(elapsed, cpu_of_children() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="folder of another checkout, with its native module, to take turns with",
    )
    args = parser.parse_args()
    headrace = [sys.executable, "-m", "headrace"]
    subprocess.run([*headrace, "pull", args.model], check=True, stdout=subprocess.DEVNULL)
    checkouts: dict[str, Path | None] = {HERE: None} | (
        {str(args.against): args.against} if args.against else {}
    )
    print(f"cold start, {args.runs} runs each, seconds")
    print(f"{'':14}{'median':>8}{'min':>8}{'max':>8}{'cpu':>8}")
    for name, words in COMMANDS.items():
        command = [*headrace, *(word.format(model=args.model) for word in words)]
        for checkout in checkouts.values():
            start(
                command, checkout
            )  # fills caches: bytecode, page cache, this machine's measurement
        rounds = [
            {which: start(command, checkout) for which, checkout in checkouts.items()}
            for _ in range(args.runs)
        ]
        for which in checkouts:
            times, cpu = zip(*(one[which] for one in rounds), strict=True)
            figures = statistics.median(times), min(times), max(times), statistics.median(cpu)
            print(
                f"{name:14}{''.join(f'{figure:8.3f}' for figure in figures)}  "
                f"{which if args.against else ''}".rstrip()
            )
        if args.against:
            ratio = statistics.median(
                one[HERE].first_byte / one[str(args.against)].first_byte for one in rounds
            )
            print(f"{name:14}{ratio:8.2f} of its time, in the median of the rounds")


if __name__ == "__main__":
    main()
