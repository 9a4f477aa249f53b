"""Measure the memory bandwidth and arithmetic of this machine and of its GPU, and test that the
engine computes correctly on them.
"""

import argparse
import os
import platform
from typing import Any

from headrace.cli.arguments import add_json, add_threads


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_threads(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a self-test fails. The measurement is remembered for `run` and `show`."""
    from headrace.cli.table import print_json, print_table
    from headrace.loader.options import engine_config
    from headrace.measure.selftest import run_checks

    threads = engine_config({"threads": args.threads}).threads
    facts = examine(threads)
    if not args.json:
        _print(facts)
    backends = ("cpu", "cuda") if facts["gpu"] and facts["gpu"]["rates"] else ("cpu",)
    checks = [check for backend in backends for check in run_checks(threads, backend)]
    failed = [check for check in checks if not check.ok]
    if args.json:
        print_json(facts | {"self_test": [check._asdict() for check in checks], "ok": not failed})
    else:
        print_table(
            ["", "", ""],
            [["OK" if c.ok else "FAILED", c.name, c.detail] for c in checks],
            "Self-test",
        )
    return 1 if failed else 0


def examine(threads: int) -> dict[str, Any]:
    """All facts, as they go to JSON: bytes, bytes and operations per second."""
    from importlib.metadata import version

    from headrace import _native
    from headrace.cli.doctor_gpu import gpu_facts
    from headrace.planner import hardware, host

    machine = hardware.measure(threads)
    return {
        "cpu": machine.cpu,
        "isa": os.environ.get("HEADRACE_ISA") or machine.isa,
        "isas": _native.isas(),
        "cores": host.usable_cores(),
        "processors": len(host.usable_processors()),
        "processors_of_machine": os.cpu_count(),
        "numa_nodes": host.numa_nodes(),
        "memory_available": host.available_memory(),
        "huge_pages": host.huge_pages(),
        "threads": machine.threads,
        "bandwidth": machine.bandwidth,
        "rates": dict(machine.rates),
        "ridge_int8": machine.ridge("int8"),
        "system": platform.platform(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("headrace", "numpy", "tokenizers")},
        **gpu_facts(),
    }


def _print(facts: dict[str, Any]) -> None:
    from headrace.cli.doctor_gpu import print_gpu
    from headrace.cli.table import print_figures, size

    print_figures(
        "This machine",
        {
            "processor": facts["cpu"],
            "instruction set": f"{facts['isa']}, of {', '.join(facts['isas'])}",
            "cores": f"{facts['cores']} usable; {facts['processors']} of "
            f"{facts['processors_of_machine']} logical processors",
            "memory nodes": _nodes(facts["numa_nodes"]),
            "memory": f"{size(facts['memory_available'])} available",
            "huge pages": facts["huge_pages"],
            "system": facts["system"],
            "versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
        },
    )
    rates = {
        f"{kind} dot products": f"{rate / 1e9:,.0f} G operations/s"
        for kind, rate in facts["rates"].items()
    }
    ridge = {
        "ridge": f"{facts['ridge_int8']:.0f} int8 operations per byte; a program with fewer is "
        "limited by memory bandwidth"
    }
    print_figures(
        f"Measured with {facts['threads']} threads",
        {"memory read": f"{facts['bandwidth'] / 1e9:.1f} GB/s"} | rates | ridge,
    )
    print_gpu(facts)


def _nodes(counts: dict[int, int]) -> str:
    """How threads and memory lie to each other. A page of weights or KV lies on the node of the
    thread that writes it first.
    """
    if len(counts) < 2:
        return "one for all cores" if counts else "unknown"
    shown = ", ".join(f"node {node} near {count} processors" for node, count in counts.items())
    first = next(iter(counts))
    return (
        f"{shown}; an engine on one of them reads near memory alone: numactl "
        f"--cpunodebind={first} --membind={first} headrace ..."
    )
