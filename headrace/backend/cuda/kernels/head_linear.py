"""A matrix per head: out[t, head] = x[t, head] @ heads[head].T."""

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.product import product
from headrace.backend.cuda.kernels.tiles import tile_of_one_matrix
from headrace.backend.cuda.kernels.weight_format import weight_args, weight_format
from headrace.backend.cuda.launch import Launch, blocks, power_of_2
from headrace.backend.cuda.packing import PackedWeight


def head_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    heads: PackedWeight,
    num_heads: int,
    activations: torch.dtype | None = None,
) -> Launch:
    """Compute the products; `heads` has stacked matrices, `x` is [rows, heads * cols] or [rows,
    cols].
    """
    outputs = heads.rows // num_heads
    multiply_type = activations or x.dtype
    block_m = power_of_2(min(len(x), 64), 16)
    tile = tile_of_one_matrix(block_m, outputs, heads.layout, multiply_type, x.dtype)
    return Launch(
        head_linear_kernel,
        (blocks(len(x), block_m), blocks(outputs, tile.block_n), num_heads),
        (
            *(out, x, *weight_args(heads), len(x), outputs, heads.rows, heads.cols),
            *(out.stride(0), x.stride(0), 0 if x.shape[1] == heads.cols else heads.cols),
        ),
        {
            "FORMAT": weight_format(heads, multiply_type),
            **tile.constants,
        },
    )


@triton.jit(do_not_specialize=["M"])
def head_linear_kernel(
        out, x, codes, scales, zeros, lookup, order, M, N, num_rows, K, out_stride, x_stride,
    head_stride,
    FORMAT: tl.constexpr, UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one head."""
    head = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[:, None] & (n < N)[None, :]
    rows = head * N + tl.where(n < N, n, 0)
    offsets = m.to(tl.int64) * x_stride + head * head_stride
    y = product(
        x, offsets, m < M, K, codes, scales, zeros, lookup, order, rows, num_rows,
        0, tl.cdiv(K, FORMAT.tile), FORMAT, UNROLL,
    )  # fmt: skip
    tl.store(
        out + m.to(tl.int64)[:, None] * out_stride + head * N + n[None, :],
        tl.trans(y).to(out.dtype.element_ty),
        mask=inside,
    )
