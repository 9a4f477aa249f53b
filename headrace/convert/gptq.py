"""GPTQ (Frantar et al. 2022): round column by column, and let later columns compensate.

An error dW costs tr(dW H dW^T) with H = X^T X. Columns with a large diagonal of H come first
("act order"), but groups keep the original order ("static groups").

With H = L L^T and L lower triangular, the cost is |dW L|^2. Column c of dW L is
L[c, c] (dW[c] + sum of dW[j] L[j, c] / L[c, c] over j > c). So columns are rounded from the last
to the first, and each is moved by the sum before it is rounded (LDLQ, Chee et al. 2023, which
equals GPTQ). No inverse is needed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import Floats
from headrace.quant.rounding import (
    best_range,
    in_groups,
    round_column,
    to_table_rows,
)
from headrace.quant.spec import QuantSpec, TableRows

DAMPING = 0.01
"""Relative to the mean diagonal of H; makes H invertible."""
_BLOCK = 32
"""Columns whose sums are computed by one product of matrices."""
_FACTOR_BLOCK = 512


class Feedback(NamedTuple):
    """How errors of rounded columns move the columns that are rounded later."""

    order: NDArray[np.int64]  # [cols] columns, the last is rounded first
    lower: Floats  # [cols, cols] L[j, c] / L[c, c], in this order
    importance: Floats  # [cols] the diagonal of H, in the original order
    diagonal: Floats  # [cols] L[c, c], in this order


def feedback(products: Floats, *, damping: float = DAMPING, together: int = 1) -> Feedback:
    """Factorise mean products X^T X [cols, cols].

    `together` neighbouring columns stay neighbours, in their order. Raises
    numpy.linalg.LinAlgError if the damped products are not positive definite.
    """
    importance = np.diag(products).copy()
    diagonal = np.where(importance == 0, np.float32(1), importance)
    diagonal = diagonal + np.float32(damping * diagonal.mean(dtype=np.float64))
    by_group = diagonal.reshape(-1, together)
    groups = np.argsort(by_group.sum(axis=1), kind="stable")
    order = (together * groups[:, None] + np.arange(together)).reshape(-1)
    lower = products[np.ix_(order, order)]
    np.fill_diagonal(lower, diagonal[order])
    _factorise(lower)
    factor_diagonal = np.diag(lower).copy()
    lower /= factor_diagonal
    return Feedback(order, lower, importance, factor_diagonal)


def _factorise(a: Floats) -> None:
    """Replace the lower triangle of a matrix by its Cholesky factor, in blocks.

    `numpy.linalg.cholesky` needs three more copies, of gigabytes for wide matrices.
    """
    for first in range(0, len(a), _FACTOR_BLOCK):
        last = min(first + _FACTOR_BLOCK, len(a))
        block = np.linalg.cholesky(a[first:last, first:last].astype(np.float64))
        a[first:last, first:last] = block
        if last == len(a):
            break
        panel = a[last:, first:last] @ np.linalg.inv(block).T.astype(np.float32)
        a[last:, first:last] = panel
        for start in range(last, len(a), 2 * _FACTOR_BLOCK):
            end = start + 2 * _FACTOR_BLOCK
            a[start:, start:end] -= panel[start - last :] @ panel[start - last : end - last].T


def gptq(weights: Floats, correction: Feedback, spec: QuantSpec) -> TableRows:
    """Round a matrix [rows, cols], given the feedback of its input's products."""
    rows, cols = weights.shape
    order, lower, importance = correction[:3]
    weights = np.where(importance == 0, np.float32(0), weights)
    by_group = in_groups(importance[None], spec)[0]
    scales, zeros = best_range(in_groups(weights, spec), spec, clip=True, importance=by_group)

    # A column of the matrix is a row here, so that its numbers are neighbours.
    wanted = np.ascontiguousarray(weights.T[order])
    scale_of = np.ascontiguousarray(scales.T)
    zero_of = None if zeros is None else np.ascontiguousarray(zeros.T)
    group = (np.arange(cols) // (spec.group or cols))[order]
    codes = np.empty((cols, rows), np.uint8)
    errors = np.empty((cols, rows), np.float32)
    for last in range(cols, 0, -_BLOCK):
        first = max(0, last - _BLOCK)
        moved = wanted[first:last] + lower[last:, first:last].T @ errors[last:]
        for c in range(last - 1, first - 1, -1):
            target = moved[c - first]
            # A product of BLAS would be split over threads, which costs more than it saves.
            target += np.einsum("j,jr->r", lower[c + 1 : last, c], errors[c + 1 : last])
            zero = None if zero_of is None else zero_of[group[c]]
            codes[order[c]], rounded = round_column(target, scale_of[group[c]], zero, spec)
            np.subtract(wanted[c], rounded, out=errors[c])
    return to_table_rows(np.ascontiguousarray(codes.T), scales, zeros, spec)
