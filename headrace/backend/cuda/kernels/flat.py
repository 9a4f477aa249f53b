"""A flat grid over the numbers of a matrix, shared by element-wise kernels."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.launch import Launch, blocks

_BLOCK = 1024


@triton.jit
def place(rows, WIDTH: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of the program's numbers, and whether they exist."""
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    row = at // WIDTH
    return row.to(tl.int64), (at % WIDTH).to(tl.int32), row < rows


def flat(kernel: Any, out: Any, *args: Any, **constants: Any) -> Launch:
    """Launch over the numbers of `out` [rows, width]: the kernel's first argument, before rows
    and stride.
    """
    rows, width = out.shape
    index = (
        tl.int32 if rows * width < 2**31 - _BLOCK else tl.int64
    )  # it is divided by the width, which costs more in 64 bits
    constants |= {"WIDTH": width, "INDEX": index, "BLOCK": _BLOCK, "num_warps": 4}
    return Launch(
        kernel, (blocks(rows * width, _BLOCK),), (out, rows, out.stride(0), *args), constants
    )
