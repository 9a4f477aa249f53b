"""How many examples a test of kernels tries: few, as each costs milliseconds for every tile, and
more in `make test-triton`.
"""

import os


def examples(number: int) -> int:
    """So many by default, times HEADRACE_TRITON_EXAMPLES."""
    return number * int(os.environ.get("HEADRACE_TRITON_EXAMPLES", "1"))
