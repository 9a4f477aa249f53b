"""SparseGPT (Frantar and Alistarh 2023): prune to 2:4, and let other columns compensate.

As in `gptq.py`, an error dW of a row costs |dW L|^2 with H = X^T X = L L^T, and columns are final
from the last to the first. Here 4 columns become final at a time. With the best changes of all
columns before them, their error e costs e S e^T, S = L' L'^T, for the 4 x 4 block L' of L.

The paper scores each weight alone. Four columns have only 6 pairs, so we take the best pair:
without the columns P it costs w_P M w_P^T with M = (inv(S)[P, P])^-1, and the kept two change by
-w_P M inv(S)[P, K] (OBS, Hassibi and Stork 1992). Rounding the kept two by d costs d S[K, K] d^T
more, so the second is moved by the error of the first.
"""

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.convert.gptq import Feedback
from headrace.convert.pruning import Mask
from headrace.quant.arrays import Floats
from headrace.quant.rounding import best_range, in_groups, round_column, to_table_rows
from headrace.quant.sparse import GROUP, KEPT
from headrace.quant.spec import QuantSpec, TableRows

_BLOCK = 32
"""Columns whose sums are computed by one product of matrices."""
_KEPT = np.array(list(combinations(range(GROUP), KEPT)))
"""The kept columns of each pattern [6, 2]."""
_CUT = np.array([[c for c in range(GROUP) if c not in kept] for kept in _KEPT])

Round = Callable[[int, NDArray[np.intp], Floats], Floats]
"""Rounds kept weights [rows]: the first column of their four, the rows' columns, the weights."""


def sparsegpt(weights: Floats, correction: Feedback, mask: Mask | None = None) -> Floats:
    """Prune a matrix [rows, cols] and change what remains. A mask given is kept."""
    return _final(weights, correction, _patterns(mask), None)[0]


def sparsegpt_rounded(
    weights: Floats, correction: Feedback, spec: QuantSpec, mask: Mask | None = None
) -> TableRows:
    """Prune and round in one pass. The ranges of the codes fit the pruned weights.

    The zero of `spec` must not be a minimum, so that 0 has a code.
    """
    pruned, patterns = _final(weights, correction, _patterns(mask), None)
    importance = in_groups(correction.importance[None], spec)[0]
    scales, zeros = best_range(in_groups(pruned, spec), spec, clip=True, importance=importance)

    every_row, cols = np.arange(len(weights)), weights.shape[1]
    zero_codes = np.full(scales.shape, 1 << spec.bits - 1) if zeros is None else zeros
    codes = np.repeat(zero_codes, spec.group or cols, axis=1)[:, :cols].astype(np.uint8)

    def round_kept(first: int, columns: NDArray[np.intp], wanted: Floats) -> Floats:
        group = first // (spec.group or cols)
        zero = None if zeros is None else zeros[:, group]
        rounded_codes, rounded = round_column(wanted, scales[:, group], zero, spec)
        codes[every_row, first + columns] = rounded_codes
        return rounded

    _final(weights, correction, patterns, round_kept)
    return to_table_rows(codes, scales, zeros, spec)


class _Groups(NamedTuple):
    """Constants of each four columns."""

    carry: Floats  # [groups, 4, 4] from sums of errors to changes
    costs: Floats  # [groups, 6, 2, 2] quadratic forms of the cut two
    changes: Floats  # [groups, 6, 2, 2] from the cut two to the kept two
    moves: Floats  # [groups, 6] from the error of the second kept weight to the first


def _groups(correction: Feedback) -> _Groups:
    count = len(correction.order) // GROUP
    starts = GROUP * np.arange(count)[:, None] + np.arange(GROUP)
    unit = np.tril(correction.lower[starts[:, :, None], starts[:, None, :]]).astype(np.float64)
    scaled = unit * correction.diagonal.reshape(count, 1, GROUP)
    squares = scaled @ scaled.swapaxes(1, 2)
    inverse = np.linalg.inv(squares)
    costs = np.linalg.inv(inverse[:, _CUT[:, :, None], _CUT[:, None, :]])
    changes = costs @ inverse[:, _CUT[:, :, None], _KEPT[:, None, :]]
    low, high = _KEPT.T
    return _Groups(
        np.linalg.inv(unit.swapaxes(1, 2)).astype(np.float32),
        costs.astype(np.float32),
        changes.astype(np.float32),
        (squares[:, low, high] / squares[:, low, low]).astype(np.float32),
    )


def _final(
    weights: Floats,
    correction: Feedback,
    patterns: NDArray[np.intp] | None,
    round_kept: Round | None,
) -> tuple[Floats, NDArray[np.intp]]:
    """Compute the final weights [rows, cols], and the patterns [cols / 4, rows]."""
    rows, cols = weights.shape
    order, lower, groups = correction.order, correction.lower, _groups(correction)
    weights = np.where(correction.importance == 0, np.float32(0), weights)
    # A column of the matrix is a row here, so that its numbers are neighbours.
    wanted = np.ascontiguousarray(weights.T[order])
    errors = np.empty((cols, rows), np.float32)
    result = np.zeros((rows, cols), np.float32)
    chosen = np.empty((cols // GROUP, rows), np.intp) if patterns is None else patterns
    every_row = np.arange(rows)

    for last in range(cols, 0, -_BLOCK):
        begin = max(0, last - _BLOCK)
        sums = lower[last:, begin:last].T @ errors[last:]
        for first in range(last - GROUP, begin - 1, -GROUP):
            end, group = first + GROUP, first // GROUP
            own = sums[first - begin : end - begin]
            own = own + lower[end:last, first:end].T @ errors[end:last]
            moved = wanted[first:end] + groups.carry[group] @ own

            column = order[first]
            if patterns is None:
                cut = moved[_CUT]
                costs = np.einsum("pir,pij,pjr->pr", cut, groups.costs[group], cut)
                chosen[column // GROUP] = costs.argmin(axis=0)
            pattern = chosen[column // GROUP]
            kept, cut_columns = _KEPT[pattern].T, _CUT[pattern].T
            cut_weights = moved[cut_columns, every_row]
            low, high = moved[kept, every_row] - np.einsum(
                "ir,rij->jr", cut_weights, groups.changes[group][pattern]
            )
            if round_kept:
                rounded = round_kept(column, kept[1], high)
                low = low + groups.moves[group][pattern] * (high - rounded)
                low, high = round_kept(column, kept[0], low), rounded
            result[every_row, column + kept[0]] = low
            result[every_row, column + kept[1]] = high
            errors[first:end] = wanted[first:end] - result[:, column : column + GROUP].T
    return result, chosen


def _patterns(mask: Mask | None) -> NDArray[np.intp] | None:  # [cols / 4, rows]
    if mask is None:
        return None
    rows, cols = mask.shape
    bits = mask.reshape(rows, cols // GROUP, GROUP) @ (1 << np.arange(GROUP))
    index = np.zeros(1 << GROUP, np.intp)
    for i, kept in enumerate(_KEPT.tolist()):
        index[sum(1 << c for c in kept)] = i
    return np.ascontiguousarray(index[bits].T)
