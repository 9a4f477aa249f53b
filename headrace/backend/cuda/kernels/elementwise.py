"""Element-wise ops: activations, gates, sums and factors. Values are float32, results float32 or
bf16.
"""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels import activations
from headrace.backend.cuda.kernels.flat import flat, place
from headrace.backend.cuda.launch import Launch
from headrace.program.ops import Activation


@triton.jit(do_not_specialize=["rows"])
def elementwise_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    y,
    y_stride,
    factor,
    OP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute an op of x, and of a y [rows, width], or [rows, 1] for gates of rows."""
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    v = tl.load(x + row * x_stride + column, mask).to(tl.float32)
    if OP == "scale":
        v = factor * v
    elif OP == "soft cap":
        v = activations.soft_cap(v, factor)
    elif OP == "threshold":
        v = tl.where(tl.abs(v) <= factor, 0.0, v)
    elif OP == "activate":
        v = activations.activated(v, ACTIVATION)
    elif OP == "gate rows":
        g = tl.load(y + row * y_stride, mask).to(tl.float32)
        # A gate of minus infinity would bring back a row of zeros.
        v = v / (1.0 + tl.exp(-g)) + g * 0.0
    else:
        w = tl.load(y + row * y_stride + column, mask).to(tl.float32)
        v = activations.gated(v, w, ACTIVATION) if OP == "glu" else v + w
    tl.store(out + row * out_stride + column, v.to(out.dtype.element_ty), mask)


def _of_one(op: str, out: Any, x: Any, factor: float = 0.0, activation: str = "") -> Launch:
    args = (x, x.stride(0), x, 0, factor)
    return flat(elementwise_kernel, out, *args, OP=op, ACTIVATION=activation)


def _of_two(op: str, out: Any, x: Any, y: Any, activation: str = "") -> Launch:
    args = (x, x.stride(0), y, y.stride(0), 0.0)
    return flat(elementwise_kernel, out, *args, OP=op, ACTIVATION=activation)


def glu(out: Any, gate: Any, up: Any, activation: Activation) -> Launch:
    """Compute `out` = activation(gate) * up, all [rows, width]."""
    return _of_two("glu", out, gate, up, activation)


def activate(out: Any, x: Any, activation: Activation) -> Launch:
    """Compute `out` = activation(x), both [rows, width]."""
    return _of_one("activate", out, x, activation=activation)


def scale(out: Any, x: Any, factor: float) -> Launch:
    """Compute `out` = factor * x, both [rows, width]."""
    return _of_one("scale", out, x, factor)


def soft_cap(out: Any, x: Any, cap: float) -> Launch:
    """Compute `out` = cap * tanh(x / cap), both [rows, width]."""
    return _of_one("soft cap", out, x, cap)


def threshold(out: Any, x: Any, least: float) -> Launch:
    """Compute `out` = x where |x| > least, else 0, both [rows, width]."""
    return _of_one("threshold", out, x, least)


def add(out: Any, x: Any, y: Any) -> Launch:
    """Compute `out` = x + y, all [rows, width]."""
    return _of_two("add", out, x, y)


def gate_rows(out: Any, x: Any, gate: Any) -> Launch:
    """Compute out[t] = x[t] / (1 + exp(-gate[t])), with `gate` [rows, 1]."""
    return _of_two("gate rows", out, x, gate)
