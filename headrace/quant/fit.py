"""Scales and minima of blocks of values, by the squared error: candidates around the plain range,
each refitted by least squares.

Blocks lie along the first axis, [values of a block, ...], so that sums over a block are sums of
rows. Values are rounded to codes with a candidate, and the scale that these codes are best read
with follows from them; so it goes round once more with the best of all.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

_FACTORS = np.linspace(0.85, 1.3, 16, dtype=np.float32)
"""What the plain inverse scales are multiplied with: above 1 the ends of a range are clipped."""
_SMALL = np.float32(1e-30)
"""Numbers below are 0: they are far below the least scale of any block, which is a float16."""
_SINGULAR = np.float32(1e-5)
"""Part of its terms up to which a determinant is 0: the codes of a block are all the same."""


class Grid(Protocol):
    """What codes stand for, before they are scaled."""

    largest: np.float32
    """The value of largest magnitude, with its sign."""

    def nearest(self, scaled: Floats) -> Floats:
        """The nearest values of the grid."""

    def codes(self, scaled: Floats) -> Codes:
        """The codes of the nearest values."""


class Integers:
    """The integers from `low` to `high`, whose codes count from 0."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = np.float32(low), np.float32(high)
        self.largest = self.low if -low > high else self.high

    def nearest(self, scaled: Floats) -> Floats:
        rounded = np.rint(scaled)
        np.maximum(rounded, self.low, out=rounded)
        return np.minimum(rounded, self.high, out=rounded)

    def codes(self, scaled: Floats) -> Codes:
        return (self.nearest(scaled) - self.low).astype(np.uint8)


class Table:
    """Integers that are looked up, in any order. What is half way between two of them is a multiple
    of 1/2.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = np.array(values, np.float32)
        self.largest = self.values[np.abs(self.values).argmax()]
        self._low, self._high = self.values.min(), self.values.max()
        middles = np.arange(self._low, self._high + 1, 0.5, dtype=np.float32) + np.float32(0.25)
        self._by_halves = np.abs(middles[:, None] - self.values).argmin(axis=1).astype(np.uint8)

    def nearest(self, scaled: Floats) -> Floats:
        return self.values[self.codes(scaled)]

    def codes(self, scaled: Floats) -> Codes:
        halves = (np.clip(scaled, self._low, self._high) - self._low) * np.float32(2)
        found: Codes = self._by_halves[halves.astype(np.intp)]
        return found


def inverse(numbers: Floats) -> Floats:
    """1 over each number; 0 for 0."""
    return np.divide(
        np.float32(1), numbers, out=np.zeros_like(numbers), where=np.abs(numbers) > _SMALL
    )


def fit_scale(values: Floats, grid: Grid, weights: Floats | None = None) -> Floats:
    """The scales [...] of blocks [values of a block, ...] that are `scale * nearest`; of a block of
    zeros 0.

    With a factor of 1 the value of largest magnitude becomes the largest of the grid, so that
    scales may be negative.
    """
    at = np.abs(values).argmax(axis=0)
    plain = grid.largest * inverse(np.take_along_axis(values, at[None], axis=0)[0])
    weighted = values if weights is None else values * weights

    def refitted(inverse_scales: Floats) -> tuple[Floats, Floats]:
        """The scales that are best for the codes of others, and what they take off the sum of
        squares.
        """
        rounded = grid.nearest(values * inverse_scales)
        along = (weighted * rounded).sum(axis=0)
        squares = (rounded * rounded if weights is None else rounded * rounded * weights).sum(
            axis=0
        )
        scales = along * inverse(squares)
        return scales, scales * along

    result = most = np.zeros(values.shape[1:], np.float32)
    for factor in _FACTORS:
        scales, gain = refitted(plain * factor)
        better = gain > most
        result, most = np.where(better, scales, result), np.where(better, gain, most)
    return refitted(inverse(result))[0]


def fit_range(
    values: Floats, high: int, weights: Floats | None = None, *, signed: bool
) -> tuple[Floats, Floats]:
    """The scales and minima [...] of blocks [values of a block, ...] that are `scale * code +
    minimum`, codes from 0 to `high`.

    Minima are 0 or below, unless they are `signed`.
    """
    grid = Integers(0, high)
    least = values.min(axis=0) if signed else np.minimum(values.min(axis=0), np.float32(0))
    above = values - least  # of what all have in common, squares would leave no digits to the rest
    weighted = above if weights is None else above * weights
    count = (
        np.full(least.shape, len(values), np.float32) if weights is None else weights.sum(axis=0)
    )
    total, squares = weighted.sum(axis=0), (weighted * above).sum(axis=0)
    plain = grid.high * inverse(above.max(axis=0))

    def refitted(inverse_scales: Floats, offsets: Floats) -> tuple[Floats, Floats, Floats]:
        """The scales and offsets from the least value that are best for the codes of others, and
        their errors.
        """
        rounded = grid.nearest((above - offsets) * inverse_scales)
        along = (weighted * rounded).sum(axis=0)
        codes = rounded if weights is None else rounded * weights
        code_sum, code_squares = codes.sum(axis=0), (codes * rounded).sum(axis=0)
        determinant = count * code_squares - code_sum * code_sum
        determinant[determinant < _SINGULAR * count * code_squares] = 0
        offsets = (code_squares * total - code_sum * along) * inverse(determinant)
        if not signed:
            offsets = np.minimum(offsets, -least)
        along -= offsets * code_sum
        scales = along * inverse(code_squares)
        return (
            scales,
            offsets,
            squares - 2 * offsets * total + offsets * offsets * count - scales * along,
        )

    scales = offsets = np.zeros_like(least)
    errors = np.full_like(least, np.inf)
    for factor in _FACTORS:
        candidate = refitted(plain * factor, np.zeros_like(least))
        better = candidate[2] < errors
        scales, offsets, errors = (
            np.where(better, *pair)
            for pair in zip(candidate, (scales, offsets, errors), strict=True)
        )
    scales, offsets, _ = refitted(inverse(scales), offsets)
    return scales, offsets + least
