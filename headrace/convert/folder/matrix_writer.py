from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.convert.tensor_writer import PlannedTensor
from headrace.errors import RequestError
from headrace.quant.arrays import Bytes
from headrace.quant.spec import QuantSpec

Parts = Mapping[str, NDArray[Any]]
"""The parts of a `Format`: `codes` uint8 [rows, cols], `scales` and perhaps `zeros`
[rows, scales of a row]; for W8A8, int8 `codes` and `row_scales`.
"""

_CHUNK_BITS = 1 << 24


class MatrixWriter(Protocol):
    """Writes matrices of one method; `X.weight` becomes tensors named `X.*`."""

    @property
    def packs_embeddings(self) -> bool:
        """Whether embedding and head can be quantised next to them."""
        ...

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        """Make the `quantization_config`.

        `others` has formats of an embedding and a head by target, the name of a class or module.
        """
        ...

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        """Plan the tensors of a matrix. Raises RequestError if its columns do not fit."""
        ...

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        """Make the planned tensors."""
        ...


def check_groups(spec: QuantSpec, name: str, cols: int) -> None:
    if spec.group and cols % spec.group:
        fitting = [group for group in (256, 192, 128, 96, 64, 32, 16) if cols % group == 0]
        groups = f"groups of {' or '.join(map(str, fitting))}, or " if fitting else ""
        raise RequestError(
            f"tensor {name} has {cols:,} columns, not a multiple of the {spec.group} that "
            f"share a scale; choose {groups}whole rows"
        )


def pack_bits(codes: Bytes, bits: int) -> NDArray[np.int32]:
    """Pack codes [rows, cols] into 32-bit words [rows, words], lowest bits first."""
    rows, cols = codes.shape
    words = -(-cols * bits // 32)
    padding = ((0, 0), (0, 32 * words - cols * bits))
    result = np.empty((rows, words), np.int32)
    step = max(1, _CHUNK_BITS // max(1, cols * bits))
    for first in range(0, rows, step):
        chunk = codes[first : first + step, :, None]
        unpacked = np.unpackbits(chunk, axis=2, count=bits, bitorder="little")
        flat = unpacked.reshape(len(chunk), cols * bits)
        packed = np.packbits(np.pad(flat, padding), axis=1, bitorder="little")
        result[first : first + step] = packed.view("<i4")
    return result
