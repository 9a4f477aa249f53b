"""The server under load and faults. Each scenario prints its criteria; the exit code is 1 if one
failed.

    python benchmarks/soak                              everything, in an hour, half of it `mixed`
    python benchmarks/soak [--seconds N] SCENARIO ...   some scenarios; N seconds for those with a
                                                        length: load, overload, sessions, mixed, and
                                                        those of `make soak-route`, `soak-ranks`,
                                                        `soak-loads` and `soak-learning`
"""

import argparse
import sys
import time
from importlib import import_module

from harness import Findings

_ALL = (
    "load",
    "abort_storm",
    "disconnect",
    "kv_pressure",
    "two_large",
    "starvation",
    "sessions",
    "overload",
    "ends",
    "engine_killed",
    "server_killed",
    "engine_stopped",
    "mixed",
    "distinct",
    "slow_readers",
)
_APART = ("proxied_route", "ranks_experts", "long_loads", "learning")
"""Scenarios that need nginx, torch, or minutes of waiting: `make soak-route`, `soak-ranks`,
`soak-loads` and `soak-learning`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks/soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help=f"scenarios: {', '.join((*_ALL, *_APART))}"
    )
    parser.add_argument("--seconds", type=float)
    args = parser.parse_args()
    if unknown := set(args.scenarios) - {*_ALL, *_APART}:
        parser.error(f"no scenario: {', '.join(sorted(unknown))}")
    failed = []
    for name in args.scenarios or _ALL:
        module, findings, begun = import_module(name), Findings(args.seconds), time.monotonic()
        print(f"{name}: {(module.__doc__ or '').strip()}", flush=True)
        module.run(findings)
        print(
            f"  {'FAILED' if findings.num_failed else 'passed'} in "
            f"{time.monotonic() - begun:.0f} s\n",
            flush=True,
        )
        failed += [name] * bool(findings.num_failed)
    if failed:
        sys.exit(f"benchmarks/soak: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
