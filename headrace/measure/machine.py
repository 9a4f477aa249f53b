"""Facts and speed of this machine and of its GPU."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace import _native
from headrace.loader.backend_choice import auto_backend
from headrace.planner import gpu, hardware, host


def describe_machine(threads: int = 0) -> dict[str, Any]:
    """All facts as JSON, in bytes, bytes/s and operations/s.

    `threads` 0 measures all usable cores. The measurements are stored.
    """
    machine = hardware.measure(threads)
    return {
        "cpu": machine.cpu,
        "isa": os.environ.get("HEADRACE_ISA") or machine.isa,
        "isas": _native.isas(),
        "best_isa": _native.processor_isas()[-1],
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
        | _versions("headrace", "numpy", "tokenizers"),
        **_gpu_facts(),
    }


def _gpu_facts() -> dict[str, Any]:
    gpu_host = gpu.find_gpu_host()
    choice = auto_backend(gpu_host)
    facts = {
        "backend": choice.backend,
        "backend_remark": choice.remark or gpu_host.obstacle,
        "gpu": None,
    }
    if gpu_host.gpu is None:
        return facts
    found: dict[str, Any] = {
        "name": gpu_host.gpu.name,
        "compute_capability": list(gpu_host.gpu.capability),
        "multiprocessors": gpu_host.gpu.multiprocessors,
        "memory": gpu_host.gpu.memory,
        "driver": gpu.driver_version(),
        "driver_cuda": ".".join(map(str, gpu_host.gpu.cuda)),
        "torch_cuda": gpu_host.torch_cuda,
        "versions": _versions("torch", "triton"),
        "rates": None,
    }
    return facts | {"gpu": found if gpu_host.obstacle else found | _measure_gpu()}


def _measure_gpu() -> dict[str, Any]:
    from headrace.backend.cuda.measure import copy_bandwidth, launch_seconds, rate
    from headrace.backend.cuda.memory import free_memory

    memory_free = free_memory()
    machine, launches = hardware.measure(backend="cuda"), launch_seconds()
    return {
        "memory_free": memory_free,
        "bandwidth": machine.bandwidth,
        "copy_bandwidth": copy_bandwidth(),
        "rates": {
            "bf16": machine.rates["bf16"],
            "fp8": rate("fp8"),
            "int8": machine.rates["int8"],
            "f32": machine.rates["f32"],
        },
        "launch_seconds": launches.eager,
        "graph_launch_seconds": launches.graph,
    }


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
