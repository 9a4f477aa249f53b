"""Number of examples per kernel test: few by default, since each tile costs milliseconds;
more in `make test-triton`.
"""

import os


def examples(number: int) -> int:
    """The default number times HEADRACE_TRITON_EXAMPLES."""
    return number * int(os.environ.get("HEADRACE_TRITON_EXAMPLES", "1"))
