"""The pooled rows of a prompt: their sum, and the vector that it becomes."""

from math import fsum, sqrt

import numpy as np
from numpy.typing import NDArray


class RowSum:
    """The sum of rows, added one by one in float64: its bits do not depend on how the rows are cut
    into steps.
    """

    def __init__(self) -> None:
        self._total: NDArray[np.float64] | None = None

    def add(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Add rows [rows, dim] in their order; returns the sum of all up to now [dim]."""
        if self._total is None:
            self._total = np.zeros(rows.shape[1])
        with np.errstate(
            invalid="ignore"
        ):  # infinities of both signs: the sum is not finite, as it says
            for row in rows:
                self._total += row
        return self._total.copy()


def mean_vector(total: NDArray[np.float64], num_rows: int, normalise: bool) -> NDArray[np.float32]:
    """The mean of so many rows by their sum [dim], at a length of 1 where it is to be normalised;
    zeros have no length and stay.
    """
    mean = total / num_rows
    if normalise and (length := sqrt(fsum((mean * mean).tolist()))):
        mean /= length
    return mean.astype(np.float32)
