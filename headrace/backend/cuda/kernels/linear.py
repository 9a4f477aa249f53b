"""Linear ops: x @ weight.T with bias, activation, gate and residual, one kernel for any rows."""

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.activations import activated, gated
from headrace.backend.cuda.kernels.product import (
    int8_product,
    product,
    weight_args,
    weight_constants,
)
from headrace.backend.cuda.kernels.tiles import tile_for
from headrace.backend.cuda.launch import Launch, blocks
from headrace.backend.cuda.packing import PackedWeight


def linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "",
    residual: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    gate: bool = False,
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None,
    activations: torch.dtype | None = None,
) -> Launch:
    """Compute out = residual + activation(x @ weight.T + delta + bias), all [rows, width].

    With `gate` the upper half of the weight's rows are gates and the lower half up projections:
    out = activation(gate) * up. `delta` and `bias` are as wide as the weight has rows.
    `quantised` is x in int8 [rows, whole tiles] with scales [rows], for int8 weights by row.
    `activations` is the type that x is multiplied in, if it differs from x's own.
    """
    num_outputs = weight.rows // 2 if gate else weight.rows
    codes, code_scales = quantised or (x, x)
    tile = tile_for(len(x), num_outputs, weight.cols, weight.layout, activations or x.dtype, gate)
    return Launch(
        linear_kernel,
        (blocks(len(x), tile.block_m) * blocks(num_outputs, tile.block_n),),
        (
            *(out, x, *weight_args(weight)),
            *(out if t is None else t for t in (bias, residual, delta)),
            *(codes, code_scales, len(x), num_outputs, weight.rows, weight.cols),
            *(0 if t is None else t.stride(0) for t in (out, x, residual, delta, codes)),
        ),
        {
            **weight_constants(weight, activations or x.dtype),
            **{"ACTIVATION": activation, "GATE": gate},
            **{
                "BIAS": bias is not None,
                "RESIDUAL": residual is not None,
                "DELTA": delta is not None,
            },
            **{"INT8": quantised is not None, "OUTLIERS": weight.layout.outliers},
            **tile.constants,
        },
    )


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    out, x, codes, scales, zeros, lookup, order, bias, residual, delta, x_codes, x_scales,
    M, N, num_rows, K, out_stride, x_stride, residual_stride, delta_stride, codes_stride,
        STORE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, ZERO_STORE: tl.constexpr,
    OFFSET: tl.constexpr, LOOKUP: tl.constexpr,
        ORDERED: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, COMPUTE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
        ACTIVATION: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    DELTA: tl.constexpr,
    INT8: tl.constexpr, OUTLIERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile; consecutive programs read the same rows of the weight."""
    program, tiles_m = tl.program_id(0), tl.cdiv(M, BLOCK_M)
    m = (program % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (program // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, inside = m < M, (m < M)[:, None] & (n < N)[None, :]
    row = tl.where(
        n < N, n, 0
    )  # of the weight; that columns of results are adjacent is known of `n` alone
    m = m.to(tl.int64)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = y
    for half in tl.static_range(2 if GATE else 1):
        rows = row + half * N
        if INT8:
            part = int8_product(
                                x_codes, x_scales, x, m, in_m, m * codes_stride, m * x_stride, K,
                codes, scales, rows, PART, OUTLIERS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            part = product(
                                tl.zeros([BLOCK_M, BLOCK_N], tl.float32), x, m * x_stride, in_m, K,
                codes, scales, zeros, lookup, order, rows, num_rows,
                                STORE, SCALE, ZERO, ZERO_STORE, OFFSET, LOOKUP, ORDERED, GROUP,
                PART, COMPUTE, IN_PAIRS, PRECISION,
            )  # fmt: skip
        if DELTA:
            part += tl.load(
                delta + m[:, None] * delta_stride + (half * N + n)[None, :], mask=inside, other=0.0
            )
        if BIAS:
            part += tl.load(bias + rows)[None, :]
        if half == 0:
            y = part
        else:
            up = part
    if GATE:
        y = gated(y, up, ACTIVATION)
    elif ACTIVATION != "":
        y = activated(y, ACTIVATION)
    if RESIDUAL:
        y = (
            tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=inside, other=0.0)
            + y
        )
    tl.store(out + m[:, None] * out_stride + n[None, :], y.to(out.dtype.element_ty), mask=inside)
