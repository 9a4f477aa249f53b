"""Element-wise ops: activations, gates, sums and factors. Values are float32, results float32 or
bf16.
"""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.activations import activated, gated
from headrace.backend.cuda.kernels.activations import soft_cap as bent
from headrace.backend.cuda.kernels.flat import flat, place
from headrace.backend.cuda.launch import Launch
from headrace.program.ops import Activation


@triton.jit(do_not_specialize=["rows"])
def glu_kernel(
    out,
    rows,
    out_stride,
    gate,
    gate_stride,
    up,
    up_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    g = tl.load(gate + row * gate_stride + column, mask).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask).to(tl.float32)
    tl.store(
        out + row * out_stride + column, gated(g, u, ACTIVATION).to(out.dtype.element_ty), mask
    )


def glu(out: Any, gate: Any, up: Any, activation: Activation) -> Launch:
    """Compute `out` = activation(gate) * up, all [rows, width]."""
    return flat(glu_kernel, out, gate, gate.stride(0), up, up.stride(0), ACTIVATION=activation)


@triton.jit(do_not_specialize=["rows"])
def activate_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    v = tl.load(x + row * x_stride + column, mask).to(tl.float32)
    tl.store(
        out + row * out_stride + column, activated(v, ACTIVATION).to(out.dtype.element_ty), mask
    )


def activate(out: Any, x: Any, activation: Activation) -> Launch:
    """Compute `out` = activation(x), both [rows, width]."""
    return flat(activate_kernel, out, x, x.stride(0), ACTIVATION=activation)


@triton.jit(do_not_specialize=["rows"])
def scale_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    factor,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    v = tl.load(x + row * x_stride + column, mask).to(tl.float32)
    tl.store(out + row * out_stride + column, (factor * v).to(out.dtype.element_ty), mask)


def scale(out: Any, x: Any, factor: float) -> Launch:
    """Compute `out` = factor * x, both [rows, width]."""
    return flat(scale_kernel, out, x, x.stride(0), factor)


@triton.jit(do_not_specialize=["rows"])
def soft_cap_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    cap,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    v = tl.load(x + row * x_stride + column, mask).to(tl.float32)
    tl.store(out + row * out_stride + column, bent(v, cap).to(out.dtype.element_ty), mask)


def soft_cap(out: Any, x: Any, cap: float) -> Launch:
    """Compute `out` = cap * tanh(x / cap), both [rows, width]."""
    return flat(soft_cap_kernel, out, x, x.stride(0), cap)


@triton.jit(do_not_specialize=["rows"])
def add_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    y,
    y_stride,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    v = tl.load(x + row * x_stride + column, mask).to(tl.float32) + tl.load(
        y + row * y_stride + column, mask
    ).to(tl.float32)
    tl.store(out + row * out_stride + column, v.to(out.dtype.element_ty), mask)


def add(out: Any, x: Any, y: Any) -> Launch:
    """Compute `out` = x + y, all [rows, width]."""
    return flat(add_kernel, out, x, x.stride(0), y, y.stride(0))


@triton.jit(do_not_specialize=["rows"])
def gate_rows_kernel(
    out,
    rows,
    out_stride,
    x,
    x_stride,
    gate,
    gate_stride,
    WIDTH: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = place(rows, WIDTH, INDEX, BLOCK)
    v = tl.load(x + row * x_stride + column, mask).to(tl.float32)
    g = tl.load(gate + row * gate_stride, mask).to(tl.float32)
    # A gate of minus infinity would bring back a row of zeros.
    y = v / (1.0 + tl.exp(-g)) + g * 0.0
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask)


def gate_rows(out: Any, x: Any, gate: Any) -> Launch:
    """Compute out[t] = x[t] / (1 + exp(-gate[t])), with `gate` [rows, 1]."""
    return flat(gate_rows_kernel, out, x, x.stride(0), gate, gate.stride(0))
