"""`headrace --version`: the version, the kernels of the build, and the backends."""

import os
from importlib.metadata import version

from headrace.planner import gpu


def print_version() -> None:
    """Imports neither NumPy nor torch."""
    print(f"headrace {version('headrace')}")
    try:
        from headrace import _native
    except ImportError as error:
        print(f"native module: missing ({error})")
        backends = ["reference"]
    else:
        isa = os.environ.get("HEADRACE_ISA") or _native.isa()
        print(f"kernels: {', '.join(_native.isas())}; in use: {isa}")
        backends = ["cpu", "reference"]

    obstacle = gpu.find_gpu_host().obstacle
    if not obstacle:
        backends.append("cuda")
    print(f"backends: {', '.join(backends)}")
    if obstacle:
        print(f"no cuda: {obstacle}")
