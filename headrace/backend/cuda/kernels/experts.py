"""Products of rows with the matrices of their experts, in tiles of one expert each."""

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.activations import gated
from headrace.backend.cuda.kernels.align_experts import Aligned
from headrace.backend.cuda.kernels.product import product, weight_args, weight_constants
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
    # Few pairs are a matter of reading weights: many programs, with much on its way to each.
    is_narrow = aligned.block_m <= 32
    block_n = power_of_2(min(outputs, 2 * aligned.block_m if is_narrow else 64), 16)
    return Launch(
        expert_linear_kernel,
        (aligned.most_tiles, blocks(outputs, block_n)),
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
            **weight_constants(weight, activations or x.dtype),
            **{"ROWS_PER_X": rows_per_x, "BIAS": bias is not None, "ACTIVATION": activation},
            **{
                "BLOCK_M": aligned.block_m,
                "BLOCK_N": block_n,
                "num_warps": 4,
                "num_stages": 6 if is_narrow else 4,
            },
        },
    )


@triton.jit
def expert_linear_kernel(
    out, x, codes, scales, zeros, lookup, order, bias, pairs, experts, num_tiles,
    N, num_rows, K, num_experts, out_stride, x_stride,
        STORE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, ZERO_STORE: tl.constexpr,
    OFFSET: tl.constexpr, LOOKUP: tl.constexpr,
        ORDERED: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, COMPUTE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
        ROWS_PER_X: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a tile of pairs."""
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        pair = tl.load(pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        expert = tl.load(experts + tile)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (pair >= 0)[:, None] & (n < N)[None, :]
        row = tl.where(n < N, n, 0)
        offsets = pair // ROWS_PER_X * x_stride
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = y
        for half in tl.static_range(2 if ACTIVATION != "" else 1):
            rows = (expert + half * num_experts) * N + row
            part = product(
                                tl.zeros([BLOCK_M, BLOCK_N], tl.float32), x, offsets, pair >= 0, K,
                codes, scales, zeros, lookup, order, rows, num_rows,
                                STORE, SCALE, ZERO, ZERO_STORE, OFFSET, LOOKUP, ORDERED, GROUP,
                PART, COMPUTE, IN_PAIRS, PRECISION,
            )  # fmt: skip
            if BIAS:
                part += tl.load(bias + rows)[None, :]
            if half == 0:
                y = part
            else:
                up = part
        if ACTIVATION != "":
            y = gated(y, up, ACTIVATION)
        tl.store(
            out + pair[:, None] * out_stride + n[None, :], y.to(out.dtype.element_ty), mask=inside
        )
