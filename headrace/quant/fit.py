"""Fits scales and minima of blocks [values of a block, ...] by the squared error."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from headrace.quant.arrays import Bytes, Floats

_FACTORS = np.linspace(0.85, 1.3, 16, dtype=np.float32)
_SMALL = np.float32(1e-30)
_SINGULAR = np.float32(1e-5)
"""Relative determinant that counts as 0: all codes are equal."""


class Grid(Protocol):
    largest: np.float32
    """The value of maximum magnitude, with its sign."""

    def nearest(self, scaled: Floats) -> Floats: ...

    def codes(self, scaled: Floats) -> Bytes: ...


class Integers:
    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = np.float32(low), np.float32(high)
        self.largest = self.low if -low > high else self.high

    def nearest(self, scaled: Floats) -> Floats:
        rounded = np.rint(scaled)
        np.maximum(rounded, self.low, out=rounded)
        return np.minimum(rounded, self.high, out=rounded)

    def codes(self, scaled: Floats) -> Bytes:
        return (self.nearest(scaled) - self.low).astype(np.uint8)


class Table:
    """Integers whose midpoints are multiples of 1/2."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = np.array(values, np.float32)
        self.largest = self.values[np.abs(self.values).argmax()]
        self._low, self._high = self.values.min(), self.values.max()
        # The code of each interval of 1/2.
        middles = np.arange(self._low, self._high + 1, 0.5, dtype=np.float32) + np.float32(0.25)
        self._by_halves = np.abs(middles[:, None] - self.values).argmin(axis=1).astype(np.uint8)

    def nearest(self, scaled: Floats) -> Floats:
        return self.values[self.codes(scaled)]

    def codes(self, scaled: Floats) -> Bytes:
        halves = (np.clip(scaled, self._low, self._high) - self._low) * np.float32(2)
        codes: Bytes = self._by_halves[halves.astype(np.intp)]
        return codes


def inverse(numbers: Floats) -> Floats:
    return np.divide(
        np.float32(1), numbers, out=np.zeros_like(numbers), where=np.abs(numbers) > _SMALL
    )


def fit_scale(values: Floats, grid: Grid, weights: Floats | None = None) -> Floats:
    """Fit scales [...] of blocks [values of a block, ...] read as `scale * nearest`.

    Scales may be negative.
    """
    index = np.abs(values).argmax(axis=0)
    plain = grid.largest * inverse(np.take_along_axis(values, index[None], axis=0)[0])
    weighted = values if weights is None else values * weights

    def refitted(inverse_scales: Floats) -> tuple[Floats, Floats]:
        rounded = grid.nearest(values * inverse_scales)
        product = (weighted * rounded).sum(axis=0)
        squares = rounded * rounded if weights is None else rounded * rounded * weights
        scales = product * inverse(squares.sum(axis=0))
        return scales, scales * product

    result = max_gain = np.zeros(values.shape[1:], np.float32)
    for factor in _FACTORS:
        scales, gain = refitted(plain * factor)
        is_better = gain > max_gain
        result = np.where(is_better, scales, result)
        max_gain = np.where(is_better, gain, max_gain)
    return refitted(inverse(result))[0]


def fit_range(
    values: Floats, high: int, weights: Floats | None = None, *, signed: bool
) -> tuple[Floats, Floats]:
    """Fit scales and minima [...] of blocks read as `scale * code + minimum`.

    Codes go from 0 to `high`. Minima are 0 or below, unless `signed`.
    """
    grid = Integers(0, high)
    minima = values.min(axis=0) if signed else np.minimum(values.min(axis=0), np.float32(0))
    # Squares of a large common part would lose the digits of the differences.
    above = values - minima
    weighted, count = above, np.full(minima.shape, len(values), np.float32)
    if weights is not None:
        weighted, count = above * weights, weights.sum(axis=0)
    total, squares = weighted.sum(axis=0), (weighted * above).sum(axis=0)
    plain = grid.high * inverse(above.max(axis=0))

    def refitted(inverse_scales: Floats, offsets: Floats) -> tuple[Floats, Floats, Floats]:
        rounded = grid.nearest((above - offsets) * inverse_scales)
        product = (weighted * rounded).sum(axis=0)
        codes = rounded if weights is None else rounded * weights
        code_sum, code_squares = codes.sum(axis=0), (codes * rounded).sum(axis=0)

        # Solve the normal equations of two unknowns.
        determinant = count * code_squares - code_sum * code_sum
        determinant[determinant < _SINGULAR * count * code_squares] = 0
        offsets = (code_squares * total - code_sum * product) * inverse(determinant)
        if not signed:
            offsets = np.minimum(offsets, -minima)
        product -= offsets * code_sum
        scales = product * inverse(code_squares)
        errors = squares - 2 * offsets * total + offsets * offsets * count - scales * product
        return scales, offsets, errors

    best_scales = best_offsets = np.zeros_like(minima)
    min_errors = np.full_like(minima, np.inf)
    for factor in _FACTORS:
        scales, offsets, errors = refitted(plain * factor, np.zeros_like(minima))
        is_better = errors < min_errors
        best_scales = np.where(is_better, scales, best_scales)
        best_offsets = np.where(is_better, offsets, best_offsets)
        min_errors = np.where(is_better, errors, min_errors)
    scales, offsets, _ = refitted(inverse(best_scales), best_offsets)
    return scales, offsets + minima
