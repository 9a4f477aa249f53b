"""Linear ops: x @ weight.T with bias, activation, gate and residual, one kernel for any rows."""

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.activations import activated, gated
from headrace.backend.cuda.kernels.product import int8_product, product
from headrace.backend.cuda.kernels.tiles import Tile, splits_for, tile_for
from headrace.backend.cuda.kernels.weight_format import weight_args, weight_format
from headrace.backend.cuda.launch import Launch, blocks
from headrace.backend.cuda.packing import PackedWeight
from headrace.backend.cuda.workspace import Workspace


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
    workspace: Workspace | None = None,
    tile: Tile | None = None,
) -> Launch:
    """Compute out = residual + activation(x @ weight.T + delta + bias), all [rows, width].

    With `gate` the upper half of the weight's rows are gates and the lower half up projections:
    out = activation(gate) * up. `delta` and `bias` are as wide as the weight has rows.
    `quantised` is x in int8 [rows, whole tiles] with scales [rows], for int8 weights by row.
    `activations` is the type that x is multiplied in, if it differs from x's own. `workspace`
    lends memory for parts of sums, if they are computed by several programs. `tile` defaults to
    the choice of `tile_for`.
    """
    num_outputs = weight.rows // 2 if gate else weight.rows
    codes, code_scales = quantised or (x, x)
    multiply_type = activations or x.dtype
    splits = splits_for(weight.whole_rows or weight.rows, weight.cols, weight.layout, multiply_type)
    tile = tile or tile_for(
        len(x),
        weight.rows,
        weight.cols,
        weight.layout,
        multiply_type,
        splits=splits,
        stored=x.dtype,
    )
    num_tiles = blocks(len(x), tile.block_m) * blocks(weight.rows, tile.block_n)
    partials, arrivals = out, out
    if tile.is_parallel:
        memory = workspace or Workspace()
        partials = memory.take("partial sums", splits * len(x) * weight.rows, 1)
        arrivals = memory.take("arrivals", num_tiles, 1, torch.int32)
    return Launch(
        linear_kernel,
        (num_tiles, splits) if tile.is_parallel else (num_tiles,),
        (
            *(out, x, *weight_args(weight)),
            *(out if t is None else t for t in (bias, residual, delta)),
            *(codes, code_scales, partials, arrivals),
            *(len(x), num_outputs, weight.rows, weight.cols),
            *(0 if t is None else t.stride(0) for t in (out, x, residual, delta, codes)),
        ),
        {
            "FORMAT": weight_format(weight, multiply_type, in_int8=quantised is not None),
            **{"ACTIVATION": activation, "GATE": gate, "BIAS": bias is not None},
            **{"RESIDUAL": residual is not None, "DELTA": delta is not None},
            **{"SPLITS": splits, "PARALLEL": tile.is_parallel, **tile.constants},
        },
    )


@triton.jit
def _sum(
    x, x_codes, x_scales, m, mask, code_offsets, offsets, columns,
    codes, scales, zeros, lookup, order, rows, num_rows, first_split, last_split,
    FORMAT: tl.constexpr, SPLITS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum some ranges of columns of a product, one range after the other: [rows, rows of x]."""
    if FORMAT.family == "int8 rows" or FORMAT.family == "int8 rows, outliers":
        sums = int8_product(
            x_codes, x_scales, x, m, mask, code_offsets, offsets, columns, codes, scales, zeros,
            rows, num_rows, FORMAT,
        )  # fmt: skip
    elif SPLITS == 1:
        sums = product(
            x, offsets, mask, columns, codes, scales, zeros, lookup, order, rows, num_rows,
            0, tl.cdiv(columns, FORMAT.tile), FORMAT, UNROLL,
        )  # fmt: skip
    else:
        num_tiles = tl.cdiv(columns, FORMAT.tile)
        sums = tl.zeros([rows.shape[0], m.shape[0]], tl.float32)
        for split in range(first_split, last_split):
            sums += product(
                x, offsets, mask, columns, codes, scales, zeros, lookup, order, rows, num_rows,
                split * num_tiles // SPLITS, (split + 1) * num_tiles // SPLITS, FORMAT, UNROLL,
            )  # fmt: skip
    return sums


@triton.jit
def _partial(partials, split, m, M, rows, num_rows):
    """Addresses of the sums of a range of columns: [rows, rows of x]."""
    row = split * M.to(tl.int64) + m
    return partials + row[None, :] * num_rows + rows[:, None]


@triton.jit
def _sum_of_partials(partials, m, mask, M, rows, num_rows, SPLITS: tl.constexpr):
    """Add the sums of all ranges of columns in their order, as `_sum` does."""
    sums = tl.zeros([rows.shape[0], m.shape[0]], tl.float32)
    for split in range(SPLITS):
        at = _partial(partials, split, m, M, rows, num_rows)
        sums += tl.load(at, mask=mask[None, :], other=0.0, cache_modifier=".cg")
    return sums


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    out, x, codes, scales, zeros, lookup, order, bias, residual, delta, x_codes, x_scales,
    partials, arrivals,
    M, N, num_rows, K, out_stride, x_stride, residual_stride, delta_stride, codes_stride,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, DELTA: tl.constexpr, SPLITS: tl.constexpr, PARALLEL: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile; consecutive programs read the same rows of the weight.

    With GATE a tile has rows of gates, then as many of the up projection. With PARALLEL a program
    sums one range of columns, and the last one to end adds all ranges in their order. Otherwise a
    program sums all of them, in the same order.
    """
    program, tiles_m = tl.program_id(0), tl.cdiv(M, BLOCK_M)
    m = (program % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = m < M
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    first = program // tiles_m * WIDTH
    place = tl.arange(0, BLOCK_N)
    if GATE:
        row = first + place % WIDTH
        row = tl.where(row < N, row, 0) + place // WIDTH * N
    else:
        row = tl.where(first + place < N, first + place, 0)
    m = m.to(tl.int64)
    is_last = True
    if PARALLEL:
        split = tl.program_id(1)
        sums = _sum(
            x, x_codes, x_scales, m, in_m, m * codes_stride, m * x_stride, K,
            codes, scales, zeros, lookup, order, row, num_rows, split, split + 1,
            FORMAT, SPLITS, UNROLL,
        )  # fmt: skip
        own = _partial(partials, split, m, M, row, num_rows)
        tl.store(own, sums, mask=in_m[None, :])
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + program, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if PARALLEL:
            sums = _sum_of_partials(partials, m, in_m, M, row, num_rows, SPLITS)
        else:
            sums = _sum(
                x, x_codes, x_scales, m, in_m, m * codes_stride, m * x_stride, K,
                codes, scales, zeros, lookup, order, row, num_rows, 0, SPLITS,
                FORMAT, SPLITS, UNROLL,
            )  # fmt: skip
        y = tl.trans(sums)
        if DELTA:
            y += tl.load(
                delta + m[:, None] * delta_stride + row[None, :], mask=in_m[:, None], other=0.0
            )
        if BIAS:
            y += tl.load(bias + row)[None, :]
        if GATE:
            both = tl.permute(tl.reshape(y, [BLOCK_M, 2, WIDTH]), (0, 2, 1))
            gates, up = tl.split(both)
            y = gated(gates, up, ACTIVATION)
        elif ACTIVATION != "":
            y = activated(y, ACTIVATION)
        n = first + tl.arange(0, WIDTH)
        inside = in_m[:, None] & (n < N)[None, :]
        if RESIDUAL:
            added = residual + m[:, None] * residual_stride + n[None, :]
            y = tl.load(added, mask=inside, other=0.0) + y
        at = out + m[:, None] * out_stride + n[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=inside)
        if PARALLEL:
            tl.store(arrivals + program, 0)  # for the next launch
