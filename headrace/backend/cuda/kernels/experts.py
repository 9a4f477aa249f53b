"""Products of rows with the matrices of their experts, in tiles of one expert each."""

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.activations import gated
from headrace.backend.cuda.kernels.align_experts import Aligned
from headrace.backend.cuda.kernels.product import product
from headrace.backend.cuda.kernels.tiles import tile_of_one_matrix
from headrace.backend.cuda.kernels.weight_format import weight_args, weight_format
from headrace.backend.cuda.launch import Launch, blocks, power_of_2
from headrace.backend.cuda.packing import PackedWeight


def tile_rows(pairs: int, experts: int) -> int:
    """Rows per tile: the mean number of pairs per expert, within bounds. It changes speed, no
    bit.
    """
    return power_of_2(min(64, blocks(pairs, experts)), 16)


def expert_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    aligned: Aligned,
    weight: PackedWeight,
    num_experts: int,
    rows_per_x: int,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "",
    activations: torch.dtype | None = None,
) -> Launch:
    """Compute out[pair] = x[pair // rows_per_x] @ weight[expert].T + bias[expert].

    The matrices of all experts are stacked. With an `activation` the upper rows are gates and the
    lower rows the up projections: out = activation(gate) * up.
    """
    matrices = num_experts * (2 if activation else 1)
    outputs = weight.rows // matrices
    multiply_type = activations or x.dtype
    rows = 2 * outputs if activation else outputs
    tile = tile_of_one_matrix(aligned.block_m, rows, weight.layout, multiply_type, x.dtype)
    return Launch(
        expert_linear_kernel,
        (aligned.most_tiles, blocks(rows, tile.block_n)),
        (
            *(
                out,
                x,
                *weight_args(weight),
                out if bias is None else bias,
                aligned.pairs,
                aligned.experts,
                aligned.num_tiles,
            ),
            *(outputs, weight.rows, weight.cols, num_experts, out.stride(0), x.stride(0)),
        ),
        {
            "FORMAT": weight_format(weight, multiply_type),
            **{"ROWS_PER_X": rows_per_x, "BIAS": bias is not None, "ACTIVATION": activation},
            **tile.constants,
        },
    )


@triton.jit
def expert_linear_kernel(
    out, x, codes, scales, zeros, lookup, order, bias, pairs, experts, num_tiles,
    N, num_rows, K, num_experts, out_stride, x_stride,
    FORMAT: tl.constexpr, ROWS_PER_X: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a tile of pairs.

    With an ACTIVATION a tile has rows of gates, then as many of the up projection.
    """
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        pair = tl.load(pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        expert = tl.load(experts + tile)
        GATE: tl.constexpr = ACTIVATION != ""
        WIDTH: tl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
        first, place = tl.program_id(1) * WIDTH, tl.arange(0, BLOCK_N)
        if GATE:
            row = first + place % WIDTH
            row = tl.where(row < N, row, 0) + (expert + place // WIDTH * num_experts) * N
        else:
            row = tl.where(first + place < N, first + place, 0) + expert * N
        sums = product(
            x, pair // ROWS_PER_X * x_stride, pair >= 0, K, codes, scales, zeros, lookup, order,
            row, num_rows, 0, tl.cdiv(K, FORMAT.tile), FORMAT, UNROLL,
        )  # fmt: skip
        y = tl.trans(sums)
        if BIAS:
            y += tl.load(bias + row)[None, :]
        if GATE:
            both = tl.permute(tl.reshape(y, [BLOCK_M, 2, WIDTH]), (0, 2, 1))
            gates, up = tl.split(both)
            y = gated(gates, up, ACTIVATION)
        n = first + tl.arange(0, WIDTH)
        inside = (pair >= 0)[:, None] & (n < N)[None, :]
        at = out + pair[:, None] * out_stride + n[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=inside)
