"""Chooses the experts of a row and their weights."""

from typing import Any, Literal

import triton
import triton.language as tl

from headrace.backend.cuda.launch import Launch, power_of_2


@triton.jit
def _keep_groups(
    wanted,
    is_expert,
    groups,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Exclude the experts outside the best groups, by a score below any float32 number."""
    within = tl.where(is_expert, wanted, -float("inf"))
    best = tl.max(within, 1)
    if BEST_TWO:
        is_best = tl.arange(0, SIZE)[None, :] == tl.argmax(within, 1, keep_dims=True)
        best += tl.max(tl.where(is_best, -float("inf"), within), 1)
    group = tl.arange(0, GROUPS)
    best = tl.where(group < groups, best, -float("inf"))
    is_kept = group < 0
    for _ in range(TOP_GROUPS):
        at = tl.argmax(best, 0)
        is_kept = is_kept | (group == at)
        best = tl.where(group == at, -float("inf"), best)
    return tl.where(is_kept[:, None], wanted, -1e300)


@triton.jit
def route_kernel(
    out,  # [rows, 2 * TOP_K] float32
    x,  # [rows, groups * size] float32
    bias,  # [groups * size] float32; None: there is none
    out_stride,
    x_stride,
    groups,
    size,
    factor,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BEST_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Route one row, in one warp."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, GROUPS)[:, None] * size + tl.arange(0, SIZE)[None, :]
    is_expert = (tl.arange(0, GROUPS)[:, None] < groups) & (tl.arange(0, SIZE)[None, :] < size)
    # In float32 the scores of a sigmoid are all 1 from 17 on.
    logits = tl.load(x + row * x_stride + expert, is_expert, 0.0).to(tl.float64)
    zeros = logits * 0.0
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        highest = tl.max(tl.max(tl.where(is_expert, logits, -float("inf")), 1), 0)
        scores = tl.where(is_expert, tl.exp(logits - highest), 0.0)
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    wanted = scores
    if bias is not None:
        added = tl.load(bias + expert, is_expert, 0.0).to(tl.float64)
        wanted += added
        zeros += added * 0.0
    if GROUPS > 1:
        wanted = _keep_groups(wanted, is_expert, groups, TOP_GROUPS, BEST_TWO, GROUPS, SIZE)
    can_choose = tl.sum(tl.sum(zeros, 1), 0) == 0.0  # and not NaN
    wanted = tl.where(can_choose, wanted, -expert.to(tl.float64))
    wanted = tl.reshape(tl.where(is_expert, wanted, -float("inf")), [GROUPS * SIZE])
    scores = tl.reshape(tl.where(can_choose, scores, float("nan")), [GROUPS * SIZE])
    numbers = tl.reshape(expert, [GROUPS * SIZE])
    at, choice = tl.arange(0, GROUPS * SIZE), tl.arange(0, CHOICES)
    chosen, weights = tl.zeros([CHOICES], tl.int32), tl.zeros([CHOICES], tl.float64)
    total = tl.sum(weights, 0)
    for k in range(TOP_K):
        best = tl.argmax(wanted, 0)  # of equal ones the first
        weight = tl.sum(tl.where(at == best, scores, 0.0), 0)
        chosen = tl.where(choice == k, tl.sum(tl.where(at == best, numbers, 0), 0), chosen)
        weights = tl.where(choice == k, weight, weights)
        total += weight
        wanted = tl.where(at == best, -float("inf"), wanted)
    if NORMALISED:
        weights = weights / total
    to = out + row * out_stride + choice
    tl.store(to, chosen.to(tl.float32), choice < TOP_K)
    tl.store(to + TOP_K, (weights * factor).to(tl.float32), choice < TOP_K)


def route(
    out: Any,
    x: Any,
    bias: Any | None,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    normalised: bool,
    factor: float,
    groups: int,
    top_groups: int,
) -> Launch:
    """Choose `top_k` experts from the logits `x` [rows, experts]: numbers, best first, then
    weights.

    `headrace.program.moe.Route` defines the choice. `out` is float32 [rows, 2 * top_k], `bias`
    float32 [experts].
    """
    rows, experts = x.shape
    size = experts // groups
    constants = {
        "TOP_K": top_k,
        "TOP_GROUPS": top_groups,
        "SIGMOID": scoring == "sigmoid",
        "NORMALISED": normalised,
        "BEST_TWO": scoring == "sigmoid" and size > 1,
        "GROUPS": power_of_2(groups),
        "SIZE": power_of_2(size, 32 if groups == 1 else 1),
        "CHOICES": power_of_2(top_k),
        "num_warps": 1,
    }
    return Launch(
        route_kernel,
        (rows,),
        (out, x, bias, out.stride(0), x.stride(0), groups, size, factor),
        constants,
    )
