"""The choice between the logits of an early exit and of all layers (`ops.ExitChoice`)."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.launch import Launch, power_of_2

_BLOCK = 4096


@triton.jit
def exit_choice_kernel(
    out,  # [rows, width] float32
    early,  # the same
    late,  # the same; None: rows that stay have NaN
    out_stride,
    early_stride,
    late_stride,
    min_margin,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take a row of `early` if its best token leads by `min_margin`; sums have one order."""
    row = tl.program_id(0).to(tl.int64)
    of_early = early + row * early_stride
    column = tl.arange(0, BLOCK)
    best = -float("inf")
    following = -float("inf")
    for start in range(0, WIDTH, BLOCK):
        x = tl.load(of_early + start + column, start + column < WIDTH, -float("inf"))
        peak = tl.max(x, 0)
        is_peak = x == peak
        below = tl.max(tl.where(is_peak, -float("inf"), x), 0)
        second = tl.where(tl.sum(is_peak.to(tl.int32), 0) > 1, peak, below)
        following = tl.maximum(tl.maximum(following, second), tl.minimum(best, peak))
        best = tl.maximum(best, peak)

    total = 0.0
    for start in range(0, WIDTH, BLOCK):
        x = tl.load(of_early + start + column, start + column < WIDTH, -float("inf"))
        total += tl.sum(tl.exp(x - best), 0)
    leaves = (1.0 - tl.exp(following - best)) / total >= min_margin  # False for NaN

    for start in range(0, WIDTH, BLOCK):
        mask = start + column < WIDTH
        x = tl.load(of_early + start + column, mask, 0.0)
        if late is not None:
            stays = tl.load(late + row * late_stride + start + column, mask, 0.0)
        else:
            stays = tl.full((BLOCK,), float("nan"), tl.float32)
        tl.store(out + row * out_stride + start + column, tl.where(leaves, x, stays), mask)


def exit_choice(out: Any, early: Any, late: Any | None, min_margin: float) -> Launch:
    """Compute out[r] = early[r] if its margin is at least `min_margin`, else late[r] or NaN."""
    rows, width = out.shape
    strides = (out.stride(0), early.stride(0), late.stride(0) if late is not None else 0)
    constants = {"WIDTH": width, "BLOCK": min(_BLOCK, power_of_2(width, 16)), "num_warps": 8}
    return Launch(exit_choice_kernel, (rows,), (out, early, late, *strides, min_margin), constants)
