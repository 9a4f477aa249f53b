"""2:4 sparsity: of every four columns of a row at most two values are not 0 (Accelerating
Sparse Deep Neural Networks, Mishra et al. 2021).

Places are bits, lowest first: bit c % 8 of byte c // 8 of a row says whether the value of column c
is kept. Exactly two bits of every four are set, so kept values need no table of where a row's next
four columns begin. If fewer values are not 0, a 0 is kept.
"""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import Bytes, Floats

GROUP = 4
KEPT = 2
"""Values of every `GROUP` columns."""

_Number = TypeVar("_Number", bound=np.generic)


def largest_two(magnitudes: Floats) -> NDArray[np.bool_]:  # [rows, cols]
    """Mark the two largest of every four columns; of equal ones, the first.

    Raises ValueError if the columns are no multiple of 4.
    """
    rows, cols = magnitudes.shape
    if cols % GROUP:
        raise ValueError(f"2:4 sparsity needs a multiple of 4 columns, not {cols}")
    groups = magnitudes.reshape(rows, cols // GROUP, GROUP)
    order = np.argsort(-groups, axis=2, kind="stable")
    is_kept = np.zeros(groups.shape, np.bool_)
    np.put_along_axis(is_kept, order[:, :, :KEPT], True, axis=2)
    return is_kept.reshape(rows, cols)


def places_of(is_kept: NDArray[np.bool_]) -> Bytes:  # [rows, bytes of a row]
    """Bits of the kept columns [rows, cols], of which every four have two."""
    return np.packbits(is_kept, axis=1, bitorder="little")


def kept(values: NDArray[_Number], is_kept: NDArray[np.bool_]) -> NDArray[_Number]:
    """Select the kept values, or codes, of a matrix [rows, cols] as [rows, cols / 2]."""
    return values[is_kept].reshape(len(values), -1)


def spread(values: NDArray[_Number], places: Bytes) -> NDArray[_Number]:
    """Put kept values [rows, cols / 2] to their columns, and 0 to all others, as [rows, cols].

    Raises ValueError for places that `check_places` refuses.
    """
    rows, num_kept = values.shape
    cols = num_kept * GROUP // KEPT
    check_places(places, cols)
    is_kept = np.unpackbits(places, axis=1, count=cols, bitorder="little").view(np.bool_)
    result: NDArray[Any] = np.zeros((rows, cols), values.dtype)
    result[is_kept] = values.reshape(-1)
    return result


_IS_PAIR = np.array([number.bit_count() == KEPT for number in range(1 << GROUP)])
"""Whether a number of four bits has two that are set."""


def check_places(places: Bytes, cols: int) -> None:
    """Raise ValueError unless every four of `cols` columns have two places and the rest none."""
    if cols % GROUP or places.shape[1] != -(-cols // 8):
        raise ValueError(
            f"places of {cols} columns have {places.shape[1]} bytes a row; 2:4 sparsity needs a "
            "multiple of 4 columns and a bit for each"
        )
    halves = np.stack([places & np.uint8(15), places >> np.uint8(4)], axis=2)
    groups = halves.reshape(len(places), -1)
    num_groups = cols // GROUP
    if not _IS_PAIR[groups[:, :num_groups]].all() or groups[:, num_groups:].any():
        raise ValueError("four columns have other than two kept values; the places are damaged")
