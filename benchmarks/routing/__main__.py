"""Routing to replicas: policies on five traces, in simulated time with real engines, and the time
of a decision.

    python benchmarks/routing                              4, 16 and 64 replicas; 1,000 decide
    python benchmarks/routing --replicas 16 --trace chats  one of them; --replicas 0: only decisions

The figures of the traces depend only on the seed, not on the machine. README.md explains them.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from math import isnan
from pathlib import Path

import numpy as np
from decisions import time_decisions
from policies import POLICIES, make_policy
from simulate import Figures, run
from traces import TRACES

from headrace.measure.table import print_table

_HEADINGS = [
    "trace",
    "policy",
    ">hit rate",
    ">of infinite",
    ">recurring",
    ">skew",
    ">p50, ms",
    ">p99, ms",
    "missed",
]
MIN_OF_INFINITE, MAX_SKEW, MAX_DECISION = 0.9, 1.3, 0.001


def missed(own: Figures, other: Figures) -> list[str]:
    """The targets that our policy misses; `other`: power of two choices."""
    wrong = {
        "hit rate": own.of_infinite_recurring < MIN_OF_INFINITE,
        "skew": own.skew > MAX_SKEW,
        "p99": own.p99 > other.p99,
    }
    return [name for name, is_wrong in wrong.items() if is_wrong]


def _cells(found: Figures) -> list[str]:
    shares = [
        "" if isnan(share) else f"{share:.1%}"
        for share in (found.hit_rate, found.of_infinite, found.of_infinite_recurring)
    ]
    return [*shares, f"{found.skew:.2f}", f"{1e3 * found.p50:.0f}", f"{1e3 * found.p99:.0f}"]


def simulate(names: list[str], replicas: int, length: int, seed: int) -> list[dict[str, object]]:
    """Run the traces under all policies, and print a table."""
    rows, facts = [], []
    for name in names:
        runs: dict[str, Figures] = {}
        for policy in POLICIES:
            trace = TRACES[name](np.random.default_rng(seed), replicas, length)
            runs[policy] = run(make_policy(policy, replicas, seed), replicas, trace)
        for policy, found in runs.items():
            wrong = missed(found, runs["power of two"]) if policy == "headrace" else []
            rows.append([name, policy, *_cells(found), ", ".join(wrong)])
            facts.append(
                {
                    "trace": name,
                    "replicas": replicas,
                    "policy": policy,
                    "seed": seed,
                    "missed": wrong,
                }
                | asdict(found)
            )
    print()
    print_table(_HEADINGS, rows, f"{replicas} replicas, {length} requests for each")
    sys.stdout.flush()
    return facts


def decide(replicas: int, count: int, seed: int) -> list[dict[str, object]]:
    """Time decisions, and print a table."""
    timed = [time_decisions(replicas, prompt_len, count, seed) for prompt_len in (512, 2048, 8192)]
    rows = [
        [f"{one.prompt_len:,}", *(f"{1e6 * t:,.0f}" for t in (one.median, one.p99, one.slowest))]
        for one in timed
    ]
    print()
    print_table(
        [">prompt", ">median, us", ">p99", ">max"],
        rows,
        f"one decision with {replicas:,} replicas",
    )
    return [asdict(one) for one in timed]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks/routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--replicas",
        default="4,16,64",
        metavar="N,...",
        help="numbers of replicas (default: %(default)s)",
    )
    parser.add_argument(
        "--trace",
        action="append",
        choices=list(TRACES),
        help="name of a trace; repeatable (default: all)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=120,
        metavar="N",
        help="requests per replica (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--no-decisions", action="store_true", help="do not time decisions")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for every row as a line of JSON"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="4 replicas with 40 requests each, and decisions with 50 replicas",
    )
    args = parser.parse_args()
    sizes = [int(size) for size in ("4" if args.quick else args.replicas).split(",") if int(size)]
    facts: list[Mapping[str, object]] = []
    for size in sizes:
        facts += simulate(
            args.trace or list(TRACES), size, 40 if args.quick else args.requests, args.seed
        )
    if not args.no_decisions:
        facts += decide(50 if args.quick else 1000, 100 if args.quick else 2000, args.seed)
    if args.json:
        args.json.write_text("".join(json.dumps(fact) + "\n" for fact in facts))


main()
