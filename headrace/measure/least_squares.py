from collections.abc import Sequence

import numpy as np


def fit_factors(
    columns: Sequence[Sequence[float]], sums: Sequence[float], least: Sequence[float] = ()
) -> list[float]:
    """Factors of the columns whose sums have the least relative errors.

    No factor is below its entry in `least`, by default 0. Rows whose sum is 0 or less count as
    unknown.
    """
    known = [index for index, total in enumerate(sums) if total > 0]
    bounds = np.array(least or [0.0] * len(columns[0]))
    matrix = np.array([np.array(columns[index]) / sums[index] for index in known])
    found, used = bounds.copy(), list(range(len(bounds))) if known else []
    while used:
        rest = 1.0 - matrix @ bounds
        factors = np.linalg.lstsq(matrix[:, used], rest, rcond=None)[0]
        if (factors >= 0).all():
            found[used] += factors
            break
        # The share of the sums that a factor below its bound would take away is the measure.
        del used[int(np.argmin(factors * matrix[:, used].sum(axis=0)))]
    return [float(factor) for factor in found]
