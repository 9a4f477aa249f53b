"""Measure the memory bandwidth and arithmetic of this machine and of its GPU, and test that the
engine computes correctly on them.

The exit code is 1 if a self-test fails. The measurement is stored, and `headrace run` and
`headrace show` use it.
"""

import argparse
from typing import Any

from headrace.cli.arguments import add_json, add_threads

EXAMPLES = """\
  headrace doctor
  headrace doctor --threads 4 --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_threads(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from headrace.loader.options import engine_config
    from headrace.measure.machine import describe_machine
    from headrace.measure.selftest import selftest
    from headrace.measure.table import print_json, print_table

    threads = engine_config({"threads": args.threads}).threads
    facts = describe_machine(threads)
    if not args.json:
        _print(facts)

    backends = ["cpu"]
    if facts["gpu"] and facts["gpu"]["rates"]:
        backends.append("cuda")
    checks = [check for backend in backends for check in selftest(backend=backend, threads=threads)]
    ok = all(check.ok for check in checks)
    if args.json:
        print_json(facts | {"self_test": [check._asdict() for check in checks], "ok": ok})
    else:
        rows = [["OK" if check.ok else "FAILED", check.name, check.detail] for check in checks]
        print_table(["", "", ""], rows, "Self-test")
    return 0 if ok else 1


def _print(facts: dict[str, Any]) -> None:
    from headrace.measure.table import print_figures, size

    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    print_figures(
        "This machine",
        {
            "processor": facts["cpu"],
            "instruction set": f"{facts['isa']}, of {', '.join(facts['isas'])}{_missing(facts)}",
            "cores": f"{facts['cores']} usable; {facts['processors']} of "
            f"{facts['processors_of_machine']} logical processors",
            "memory nodes": _numa_nodes(facts["numa_nodes"]),
            "memory": f"{size(facts['memory_available'])} available",
            "huge pages": facts["huge_pages"],
            "system": facts["system"],
            "versions": versions,
        },
    )
    rates = {
        f"{kind} dot products": f"{rate / 1e9:,.0f} G operations/s"
        for kind, rate in facts["rates"].items()
    }
    print_figures(
        f"Measured with {facts['threads']} threads",
        {
            "memory read": f"{facts['bandwidth'] / 1e9:.1f} GB/s",
            **rates,
            "ridge": f"{facts['ridge_int8']:.0f} int8 operations per byte; a program with fewer "
            "is limited by memory bandwidth",
        },
    )
    _print_gpu(facts)


def _missing(facts: dict[str, Any]) -> str:
    """A hint if the build has no kernels for the best instruction set of this processor."""
    best = facts["best_isa"]
    if best in facts["isas"]:
        return ""
    return f"; this build has no {best} kernels: install it again on this machine"


def _numa_nodes(counts: dict[int, int]) -> str:
    if len(counts) < 2:
        return "one for all cores" if counts else "unknown"
    nodes = ", ".join(f"node {node} near {count} processors" for node, count in counts.items())
    first = next(iter(counts))
    return (
        f"{nodes}; an engine on one node reads near memory only: numactl --cpunodebind={first} "
        f"--membind={first} headrace ..."
    )


def _print_gpu(facts: dict[str, Any]) -> None:
    from headrace.measure.table import print_figures, size

    gpu, remark = facts["gpu"], facts["backend_remark"]
    figures = {"auto uses": f"{facts['backend']}; {remark}" if remark else facts["backend"]}
    if gpu is None:
        print_figures("GPU", figures)
        return

    capability = ".".join(map(str, gpu["compute_capability"]))
    versions = ", ".join(f"{name} {number}" for name, number in gpu["versions"].items())
    figures |= {
        "GPU": f"{gpu['name']}, compute capability {capability}, {gpu['multiprocessors']} "
        "multiprocessors",
        "memory": size(gpu["memory"]),
        "driver": f"{gpu['driver'] or 'unknown'}, for CUDA up to {gpu['driver_cuda']}",
        "versions": versions or "neither torch nor triton",
    }
    if gpu["rates"]:
        figures |= _gpu_measurements(gpu)
    print_figures("GPU", figures)


def _gpu_measurements(gpu: dict[str, Any]) -> dict[str, str]:
    from headrace.measure.table import size

    rates = {
        f"{kind} products": f"{rate / 1e12:,.1f} T operations/s"
        for kind, rate in gpu["rates"].items()
        if rate
    }
    return {
        "memory free": size(gpu["memory_free"]),
        "memory read": f"{gpu['bandwidth'] / 1e9:,.0f} GB/s",
        "memory copied": f"{gpu['copy_bandwidth'] / 1e9:,.0f} GB/s, read and written",
        **rates,
        "ridge": f"{gpu['rates']['bf16'] / gpu['bandwidth']:,.0f} bf16 operations per byte",
        "launch": f"{1e6 * gpu['launch_seconds']:.1f} us, in a graph "
        f"{1e6 * gpu['graph_launch_seconds']:.1f} us",
    }
