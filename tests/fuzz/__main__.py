"""The command line: targets, number of cases, time limit, seed."""

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz import driver

_MAX_SHOWN = 3000
"""Characters of a finding that are printed."""


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        target, seed, count, corpus, first, faults = sys.argv[2:]
        driver.child(
            driver.Cases(target, int(seed), int(count), Path(corpus)), int(first), int(faults)
        )
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"which (all): {', '.join(driver.targets())}"
    )
    parser.add_argument(
        "--cases", type=int, default=100_000, help="of all targets together (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="of all targets together (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 10**9, help="makes the cases (the clock)"
    )
    parser.add_argument(
        "--found",
        type=Path,
        default=Path(".fuzz"),
        help="folder for the cases of findings (%(default)s)",
    )
    parser.add_argument("--file", type=Path, help="run this case alone, in this process")
    args = parser.parse_args()
    names = args.targets or driver.targets()
    if unknown := set(names) - set(driver.targets()):
        parser.error(
            f"no target {', '.join(sorted(unknown))}; there are {', '.join(driver.targets())}"
        )
    if args.file:
        print(*driver.attempt(driver.load(names[0]), args.file.read_bytes()), sep="\n")
        return 0
    print(f"seed {args.seed}", flush=True)
    return 1 if sum([fuzz(name, args, len(names)) for name in names]) else 0


def fuzz(name: str, args: argparse.Namespace, num_targets: int) -> int:
    """Run a target and print its result; returns the number of findings."""
    outcome = driver.run_target(
        name, -(-args.cases // num_targets), args.seconds / num_targets, args.seed
    )
    print(
        f"{name:18}{outcome.cases:8,} cases, {outcome.refused:8,} refused, "
        f"{len(outcome.findings):3} findings, {outcome.seconds:6.1f} s",
        flush=True,
    )
    for finding in outcome.findings:
        args.found.mkdir(exist_ok=True)
        path = args.found / f"{name}-{finding.label}"
        path.write_bytes(finding.content)
        print(f"  {path}: {finding.what.strip()[-_MAX_SHOWN:]}", flush=True)
    return len(outcome.findings)


if __name__ == "__main__":
    sys.exit(main())
