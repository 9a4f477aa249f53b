"""GPTQ (Frantar et al. 2022): round column by column, and let later columns compensate.

An error dW costs tr(dW H dW^T) with H = X^T X. Columns with a large diagonal of H come first
("act order"), but groups keep the original order ("static groups").
"""

import numpy as np

from headrace.quant.arrays import Floats
from headrace.quant.rounding import (
    best_range,
    dequantise_groups,
    in_groups,
    nearest_codes,
    to_table_rows,
)
from headrace.quant.spec import QuantSpec, TableRows

DAMPING = 0.01
"""Relative to the mean diagonal of H; makes H invertible."""
_BLOCK = 128


def gptq(
    weights: Floats, products: Floats, spec: QuantSpec, *, damping: float = DAMPING
) -> TableRows:
    """Round a matrix [rows, cols], given its input's mean products X^T X [cols, cols].

    Raises numpy.linalg.LinAlgError if the damped products are not positive definite.
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
    # The upper Cholesky factor of the inverse: row i spreads the error of column i over the
    # columns after it.
    spread = np.linalg.cholesky(np.linalg.inv(h[np.ix_(order, order)])).T.astype(np.float32)

    remaining = weights[:, order]
    group = (np.arange(cols) // (spec.group or cols))[order]
    codes = np.empty((rows, cols), np.uint8)
    for first in range(0, cols, _BLOCK):
        last = min(first + _BLOCK, cols)
        errors = np.empty((rows, last - first), np.float32)
        for i in range(first, last):
            scale, zero = scales[:, group[i]], None if zeros is None else zeros[:, group[i]]
            code = nearest_codes(remaining[:, i, None], scale, zero, spec)
            codes[:, order[i]] = code[:, 0]
            rounded = dequantise_groups(code, scale, zero, spec)[:, 0]
            error = (remaining[:, i] - rounded) / spread[i, i]
            remaining[:, i + 1 : last] -= error[:, None] * spread[i, i + 1 : last]
            errors[:, i - first] = error
        remaining[:, last:] -= errors @ spread[first:last, last:]
    return to_table_rows(codes, scales, zeros, spec)
