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
from itertools import combinations, combinations_with_replacement
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
_PRODUCTS = np.array(list(combinations_with_replacement(range(GROUP), 2))).T
"""Pairs of columns [2, 10]."""

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
    costs: Floats  # [groups, 6, 10] of each pattern, by products of two weights
    maps: Floats  # [groups, 6 * 4, 4] from weights to their changed values, 0 if cut
    moves: Floats  # [groups, 6] from the error of the second kept weight to the first


def _groups(correction: Feedback) -> _Groups:
    count = len(correction.order) // GROUP
    starts = GROUP * np.arange(count)[:, None] + np.arange(GROUP)
    unit = np.tril(correction.lower[starts[:, :, None], starts[:, None, :]]).astype(np.float64)
    factor = unit * correction.diagonal.reshape(count, 1, GROUP)
    squares = factor @ factor.swapaxes(1, 2)
    inverse = np.linalg.inv(squares)

    forms = np.zeros((count, len(_KEPT), GROUP, GROUP))
    maps = np.zeros_like(forms)
    for i, (kept, cut) in enumerate(zip(_KEPT, _CUT, strict=True)):
        form = np.linalg.inv(inverse[:, cut[:, None], cut])
        forms[:, i, cut[:, None], cut] = form
        maps[:, i, kept, kept] = 1
        maps[:, i, kept[:, None], cut] = -inverse[:, kept[:, None], cut] @ form
    first, second = _PRODUCTS
    low, high = _KEPT.T
    return _Groups(
        carry=np.linalg.inv(unit.swapaxes(1, 2)).astype(np.float32),
        costs=(forms[:, :, first, second] * np.where(first == second, 1, 2)).astype(np.float32),
        maps=maps.reshape(count, -1, GROUP).astype(np.float32),
        moves=(squares[:, low, high] / squares[:, low, low]).astype(np.float32),
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
    result = np.empty((cols // GROUP, rows, GROUP), np.float32)
    chosen = np.empty((cols // GROUP, rows), np.intp) if patterns is None else patterns
    every_row = np.arange(rows)
    first_of_product, second_of_product = _PRODUCTS

    for last in range(cols, 0, -_BLOCK):
        begin = max(0, last - _BLOCK)
        sums = lower[last:, begin:last].T @ errors[last:]
        for first in range(last - GROUP, begin - 1, -GROUP):
            end, group = first + GROUP, first // GROUP
            own = sums[first - begin : end - begin]
            own = own + lower[end:last, first:end].T @ errors[end:last]
            moved = wanted[first:end] + groups.carry[group] @ own

            place = order[first] // GROUP
            if patterns is None:
                costs = groups.costs[group] @ (moved[first_of_product] * moved[second_of_product])
                chosen[place] = costs.argmin(axis=0)
            pattern = chosen[place]
            changed = (groups.maps[group] @ moved).reshape(len(_KEPT), GROUP, rows)
            final = changed[pattern, :, every_row]  # [rows, 4]
            if round_kept:
                low, high = _KEPT[pattern].T
                wanted_high = final[every_row, high]
                rounded = round_kept(order[first], high, wanted_high)
                wanted_low = final[every_row, low]
                wanted_low += groups.moves[group][pattern] * (wanted_high - rounded)
                final[every_row, high] = rounded
                final[every_row, low] = round_kept(order[first], low, wanted_low)
            result[place] = final
            np.subtract(wanted[first:end], final.T, out=errors[first:end])
    return result.swapaxes(0, 1).reshape(rows, cols), chosen


def _patterns(mask: Mask | None) -> NDArray[np.intp] | None:  # [cols / 4, rows]
    if mask is None:
        return None
    rows, cols = mask.shape
    bits = mask.reshape(rows, cols // GROUP, GROUP) @ (1 << np.arange(GROUP))
    index = np.zeros(1 << GROUP, np.intp)
    for i, kept in enumerate(_KEPT.tolist()):
        index[sum(1 << c for c in kept)] = i
    return np.ascontiguousarray(index[bits].T)
