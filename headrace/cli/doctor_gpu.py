"""What `headrace doctor` says of a GPU: what it is, what it can do, and whether it is used."""

from typing import Any


def gpu_facts() -> dict[str, Any]:
    """What `auto` stands for on this machine, and its GPU, as JSON: None without one, and without
    figures where it cannot be used.

    What is measured is remembered.
    """
    from headrace.loader.backend_choice import automatic
    from headrace.planner import gpu

    host = gpu.look()
    choice = automatic(host)
    facts = {
        "backend": choice.backend,
        "backend_remark": choice.remark or host.obstacle,
        "gpu": None,
    }
    if host.gpu is None:
        return facts
    found: dict[str, Any] = {
        "name": host.gpu.name,
        "compute_capability": list(host.gpu.capability),
        "multiprocessors": host.gpu.multiprocessors,
        "memory": host.gpu.memory,
        "driver": gpu.driver_version(),
        "driver_cuda": ".".join(map(str, host.gpu.cuda)),
        "torch_cuda": host.torch_cuda,
        "versions": _versions(),
        "rates": None,
    }
    return facts | {"gpu": found if host.obstacle else found | _measured()}


def print_gpu(facts: dict[str, Any]) -> None:
    """The same for people."""
    from headrace.cli.table import print_figures, size

    gpu, remark = facts["gpu"], facts["backend_remark"]
    chosen = f"{facts['backend']}{'; ' if remark else ''}{remark}"
    if gpu is None:
        print_figures("GPU", {"auto takes": chosen})
        return
    capability = ".".join(map(str, gpu["compute_capability"]))
    figures = {
        "auto takes": chosen,
        "GPU": f"{gpu['name']}, compute capability {capability}, {gpu['multiprocessors']} "
        "multiprocessors",
        "memory": size(gpu["memory"]),
        "driver": f"{gpu['driver'] or 'unknown'}, for CUDA {gpu['driver_cuda']} at most",
        "versions": ", ".join(f"{name} {number}" for name, number in gpu["versions"].items())
        or "neither torch nor triton",
    }
    if gpu["rates"]:
        figures["memory free"] = size(gpu["memory_free"])
        figures["memory read"] = f"{gpu['bandwidth'] / 1e9:,.0f} GB/s"
        figures["memory copied"] = f"{gpu['copy_bandwidth'] / 1e9:,.0f} GB/s, read and written"
        figures |= {
            f"{kind} products": f"{rate / 1e12:,.1f} T operations/s"
            for kind, rate in gpu["rates"].items()
            if rate
        }
        figures["ridge"] = (
            f"{gpu['rates']['bf16'] / gpu['bandwidth']:,.0f} bf16 operations per byte"
        )
        figures["a launch"] = (
            f"{1e6 * gpu['launch_seconds']:.1f} us, in a graph "
            f"{1e6 * gpu['graph_launch_seconds']:.1f} us"
        )
    print_figures("GPU", figures)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _measured() -> dict[str, Any]:
    """Bytes and operations per second, and seconds of a launch."""
    from headrace.backend.cuda.measure import copy_bandwidth, launch_seconds, rate
    from headrace.backend.cuda.memory import free_memory
    from headrace.planner import hardware

    free = free_memory()
    machine, launches = hardware.measure(backend="cuda"), launch_seconds()
    return {
        "memory_free": free,
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
