"""How long a newcomer waits: `headrace --help`, and a cold `headrace run` up to its first token.

Every run is a new process; the model file is in the page cache, as on any second start. Times are wall-clock seconds seen
from outside, process start included.
"""

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "--help": ["--help"],
    "first token": ["run", "{model}", "Hi", "--max-tokens", "1"],
}


def seconds_to_first_byte(command: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.stdout.read()
        errors = process.stderr.read()
    if process.returncode or not first:
        sys.exit(f"{' '.join(command)} failed:\n{errors.decode()}")
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    headrace = [sys.executable, "-m", "headrace"]
    subprocess.run([*headrace, "pull", args.model], check=True, stdout=subprocess.DEVNULL)
    print(f"cold start, {args.runs} runs each, seconds")
    print(f"{'':14}{'median':>8}{'min':>8}{'max':>8}")
    for name, words in COMMANDS.items():
        command = [*headrace, *(word.format(model=args.model) for word in words)]
        seconds_to_first_byte(command)  # fills caches: bytecode, page cache, this machine's measurement
        times = [seconds_to_first_byte(command) for _ in range(args.runs)]
        print(f"{name:14}{statistics.median(times):8.3f}{min(times):8.3f}{max(times):8.3f}")


if __name__ == "__main__":
    main()
