"""How folders of safetensors have quantised matrices: what a writer of a method's files says and
does.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.convert.tensor_file import PlannedTensor
from headrace.errors import RequestError
from headrace.quant.spec import QuantSpec

Parts = Mapping[str, NDArray[Any]]
"""Of a matrix that was quantised, as its `Format` has them: `codes` uint8 [rows, cols], `scales`
[rows, scales of a row] and perhaps `zeros` like these; of W8A8 int8 `codes` and `row_scales`.
"""


class Packing(Protocol):
    """The files of one method. A matrix called `X.weight` has parts in the file, whose names begin
    with `X.`.
    """

    def config(self, left: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of a model, where the matrices of the modules `left` are not
        quantised.
        """
        ...

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        """What a matrix becomes. Raises RequestError, which names it, where its columns do not fit
        the format.
        """
        ...

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        """The planned tensors of a matrix."""
        ...


def check_groups(spec: QuantSpec, name: str, cols: int) -> None:
    """Raise RequestError where the columns are no whole groups: no file of these methods has a
    shorter one.
    """
    if spec.group and cols % spec.group:
        fitting = [group for group in (256, 192, 128, 96, 64, 32, 16) if cols % group == 0]
        advice = (
            f"take groups of {' or '.join(map(str, fitting))}, or whole rows"
            if fitting
            else "take whole rows"
        )
        raise RequestError(
            f"tensor {name} has {cols:,} columns, no multiple of the {spec.group} that "
            f"share a scale: {advice}"
        )


def pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Codes [rows, cols] one after the other, the first in the lowest bits, without gaps, in words
    of 32 bits [rows, words].
    """
    rows, cols = codes.shape
    words = -(-cols * bits // 32)
    result = np.empty((rows, words), np.int32)
    step = max(1, _CHUNK_BITS // max(1, cols * bits))
    for first in range(0, rows, step):
        some = codes[first : first + step]
        flat = np.unpackbits(some[:, :, None], axis=2, count=bits, bitorder="little").reshape(
            len(some), cols * bits
        )
        packed = np.packbits(
            np.pad(flat, ((0, 0), (0, 32 * words - cols * bits))), axis=1, bitorder="little"
        )
        result[first : first + step] = packed.view("<i4")
    return result


_CHUNK_BITS = 1 << 24
"""Bits that are bytes of their own for a moment."""
