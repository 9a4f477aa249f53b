"""Sums and means of the pooled rows of a prompt."""

from math import fsum, sqrt

import numpy as np
from numpy.typing import NDArray


class RowSum:
    """A float64 sum of rows in order: its bits do not depend on the cut of a prompt into steps."""

    def __init__(self) -> None:
        self._total: NDArray[np.float64] | None = None

    def add(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Add rows [rows, dim]; returns the sum so far [dim]."""
        if self._total is None:
            self._total = np.zeros(rows.shape[1])
        # Infinities of both signs add up to NaN. The caller checks that the sum is finite.
        with np.errstate(invalid="ignore"):
            for row in rows:
                self._total += row
        return self._total.copy()


def mean_vector(total: NDArray[np.float64], num_rows: int, normalise: bool) -> NDArray[np.float32]:
    """The mean [dim] of `num_rows` rows, with length 1 if `normalise`, unless it is zero."""
    mean = total / num_rows
    if normalise and (length := sqrt(fsum((mean * mean).tolist()))):
        mean /= length
    return mean.astype(np.float32)
