"""Walsh-Hadamard transform of rows (`quant/kv.py`), for int8 keys and values; it is its own
inverse.
"""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.launch import Launch, blocks, power_of_2


@triton.jit
def hadamard(x, ROWS: tl.constexpr, COLS: tl.constexpr, LOG: tl.constexpr):
    """Transform every 2**LOG columns of `x` [ROWS, COLS].

    A pass adds and subtracts neighbours and moves the lowest bit of their index to the top, so
    after all passes every number is at its place.
    """
    SIZE: tl.constexpr = 2**LOG
    y = tl.reshape(x, (ROWS * COLS // SIZE, SIZE))
    for _ in tl.static_range(LOG):
        even, odd = tl.split(tl.reshape(y, (ROWS * COLS // SIZE, SIZE // 2, 2)))
        y = tl.reshape(
            tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS * COLS // SIZE, SIZE)
        )
    return tl.reshape(y, (ROWS, COLS)) * (2 ** (-LOG / 2))


def log_size(dim: int) -> int:
    """Logarithm of the block size for vectors of `dim` numbers."""
    return (dim & -dim).bit_length() - 1


@triton.jit
def hadamard_kernel(
    out, out_stride, x, x_stride, rows,
        NUM_HEADS: tl.constexpr, DIM: tl.constexpr, LOG: tl.constexpr, HEADS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Transform some of the heads of all rows."""
    unit = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row, head, column = (
        (unit // NUM_HEADS).to(tl.int64),
        unit % NUM_HEADS,
        tl.arange(0, COLS)[None, :],
    )
    mask = (row < rows)[:, None] & (column < DIM)
    numbers = tl.load(x + (row * x_stride + head * DIM)[:, None] + column, mask, 0.0)
    tl.store(
        out + (row * out_stride + head * DIM)[:, None] + column,
        hadamard(numbers, HEADS, COLS, LOG),
        mask,
    )


def transform_heads(out: Any, x: Any, dim: int) -> Launch:
    """Transform every head of `x` [rows, heads * dim], float32, into `out`."""
    rows, width = x.shape
    heads, cols = heads_per_program(rows * width // dim, dim)
    constants = {
        "NUM_HEADS": width // dim,
        "DIM": dim,
        "LOG": log_size(dim),
        "HEADS": heads,
        "COLS": cols,
        "num_warps": 4,
    }
    return Launch(
        hadamard_kernel,
        (blocks(rows * width // dim, heads),),
        (out, out.stride(0), x, x.stride(0), rows),
        constants,
    )


_NUMBERS = 16384 if is_interpreting() else 1024
"""Of a program. No result depends on it, and the interpreter takes a time for each program that
hardly depends on it either.
"""


def heads_per_program(num_heads: int, *dims: int) -> tuple[int, ...]:
    """Heads per program, over all rows, and the padded dimensions of a head."""
    padded = tuple(power_of_2(dim, 2) for dim in dims)
    return min(power_of_2(max(1, num_heads)), max(1, _NUMBERS // max(padded))), *padded
