"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and each one's error is made
up for by those that follow.

With X the inputs of a matrix, its output changes by the quadratic form of H = X^T X. The columns
that matter most, by the diagonal of H, are rounded first ("act order"), while the ranges of groups
are those of the columns as they lie ("static groups"), so that nothing of the order is left in the
result. Ranges are clipped where that lessens the squared errors of columns times the diagonal of H.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.quant.rounding import best_range, in_groups, nearest_codes, table_rows, values_of
from headrace.quant.spec import QuantSpec, TableRows

Floats = NDArray[np.float32]

DAMPING = 0.01
"""Of the mean of the diagonal of H, added to all of it: what keeps it invertible."""
_BLOCK = 128
"""Columns whose errors are spread over each other at once, and over all others afterwards."""


def gptq(
    weights: Floats, products: Floats, spec: QuantSpec, *, damping: float = DAMPING
) -> TableRows:
    """The codes of a matrix [rows, cols] whose inputs have these mean products X^T X [cols, cols].

    Raises numpy.linalg.LinAlgError where these are not positive definite with the damping.
    """
    rows, cols = weights.shape
    h = products.astype(np.float64)
    unused = np.diag(h) == 0
    weights = np.where(unused, np.float32(0), weights)
    importance = in_groups(np.diag(products)[None], spec)[0]
    scales, zeros = best_range(in_groups(weights, spec), spec, clip=True, importance=importance)
    h[unused, unused] = 1
    h[np.diag_indices(cols)] += damping * np.mean(np.diag(h))
    order = np.argsort(-np.diag(h), kind="stable")
    # The upper Cholesky factor of the inverse: row i says how the error of column i is spread over
    # those after it.
    spread = np.linalg.cholesky(np.linalg.inv(h[np.ix_(order, order)])).T.astype(np.float32)
    left = weights[:, order]
    group = (np.arange(cols) // (spec.group or cols))[order]
    codes = np.empty((rows, cols), np.uint8)
    for first in range(0, cols, _BLOCK):
        last = min(first + _BLOCK, cols)
        errors = np.empty((rows, last - first), np.float32)
        for i in range(first, last):
            scale, zero = scales[:, group[i]], None if zeros is None else zeros[:, group[i]]
            code = nearest_codes(left[:, i, None], scale, zero, spec)
            codes[:, order[i]] = code[:, 0]
            error = (left[:, i] - values_of(code, scale, zero, spec)[:, 0]) / spread[i, i]
            left[:, i + 1 : last] -= error[:, None] * spread[i, i + 1 : last]
            errors[:, i - first] = error
        left[:, last:] -= errors @ spread[first:last, last:]
    return table_rows(codes, scales, zeros, spec)
