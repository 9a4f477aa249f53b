"""Matrices as several methods store them: codes of some bits one after the other, and scales of a
tensor, of rows, groups or blocks.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.arrays import Bytes
from headrace.quant.dequantise import Parts, Rows
from headrace.quant.formats import Format, StoredTensor, TensorPart, table_format
from headrace.quant.spec import (
    NUMBERS,
    PLAIN,
    POWERS,
    Codebook,
    Number,
    QuantSpec,
    TableRows,
    floats,
    small_floats,
)
from headrace.record import frozen

_WIDTHS = (2, 3, 4, 8)
"""Bits of codes that kernels read."""


@frozen
class Codes:
    """How a file has the codes of a row: `bits` of each, the first in the lowest ones, without
    gaps; of 8 bits perhaps signed.
    """

    cols: int
    bits: int = 8
    is_signed: bool = False

    def read(self, packed: Bytes) -> Bytes:
        """The codes of rows [rows, cols] out of their bytes [rows, bytes]; signed ones grow
        by 128.
        """
        codes = unpacked(packed, self.bits, self.cols)
        return codes ^ np.uint8(128) if self.is_signed else codes


@frozen
class Scales:
    """What shares a scale, and how a file has scales: as numbers, powers of two, or small floats
    over a scale of the whole tensor.
    """

    group: int
    """Columns; 0: all."""
    number: Number | Literal["e8m0", "e4m3"]
    block_rows: int = 1
    """Rows; those of more than one are float32."""

    @property
    def parts(self) -> dict[str, TensorPart]:
        dtype = NUMBERS["u8" if self.number == "e8m0" or self.number == "e4m3" else self.number]
        whole = {"tensor_scale": TensorPart("f4", by_row=False)} if self.number == "e4m3" else {}
        return {"scales": TensorPart(dtype.str, by_row=self.block_rows == 1), **whole}

    def read(self, of: Parts, rows: Rows) -> NDArray[np.generic]:
        """The scales of rows [rows, scales of a row]; what is no number of its own becomes
        float32.
        """
        if self.block_rows > 1:
            return of["scales"][row_numbers(of, rows) // self.block_rows]
        scales = of["scales"][rows]
        if self.number == "e8m0":
            return POWERS[scales]
        return small_floats(3)[scales] / of["tensor_scale"] if self.number == "e4m3" else scales


def unpacked(packed: Bytes, bits: int, cols: int) -> Bytes:  # [rows, cols]
    """Codes of 1 to 8 bits in rows of bytes [rows, bytes], the first in the lowest bits, without
    gaps.
    """
    if bits == 8:
        return packed[:, :cols]
    unit = bits // math.gcd(bits, 8)  # bytes that begin and end with a code
    rows, per_unit, units = len(packed), 8 * unit // bits, -(-cols * bits // (8 * unit))
    spare = units * unit - packed.shape[1]
    whole = np.pad(packed, ((0, 0), (0, spare))) if spare > 0 else packed[:, : units * unit]
    split = whole.reshape(rows, units, unit)
    codes = np.empty((rows, units, per_unit), np.uint8)
    for i in range(per_unit):
        byte, shift = divmod(i * bits, 8)
        field = split[:, :, byte] >> np.uint8(shift)
        if shift + bits > 8:
            field |= split[:, :, byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(field, np.uint8((1 << bits) - 1), out=codes[:, :, i])
    return codes.reshape(rows, -1)[:, :cols]


def row_numbers(of: Parts, rows: Rows) -> NDArray[np.int64]:
    """The numbers of stored rows."""
    numbers: NDArray[np.int64] = np.arange(len(of["codes"]))[rows]
    return numbers


@cache
def packed_format(
    codebook: Codebook, codes: Codes, scales: Scales, has_points: bool = False
) -> Format:
    """The format of a matrix with such codes and scales, and zero points in uint8 perhaps.

    Codes of a width that no kernel reads are widened as they are read. Floats of 8 bits that are
    not finite raise ValueError on their way to the kernels, and are themselves as values.
    """
    bits = next(width for width in _WIDTHS if width >= codes.bits)
    number: Number = "f32" if scales.number == "e8m0" or scales.number == "e4m3" else scales.number
    zero: Any = {"zero": "point", "zero_type": "u8"} if has_points else {}
    spec = QuantSpec(bits, scales.group, number, codebook=codebook, **zero)
    growth = np.uint8(0 if has_points else (1 << bits - 1) - (1 << codes.bits - 1))

    def read(of: Parts, rows: Rows) -> TableRows:
        found = codes.read(of["codes"][rows])
        return TableRows(
            found + growth if growth else found,
            scales.read(of, rows),
            of["zeros"][rows] if has_points else None,
        )

    is_finite = np.isfinite(
        spec.values[: 1 << bits - 1]
    )  # of small floats those of the largest magnitudes are not
    limit = int(is_finite.argmin())

    def checked(of: Parts, rows: Rows) -> TableRows:
        table = read(of, rows)
        if (table.codes & np.uint8(127)).max() >= limit:
            raise ValueError(f"one of its numbers in {codebook} is not finite")
        return table

    parts = {
        "codes": TensorPart("u1"),
        **scales.parts,
        **({"zeros": TensorPart("u1")} if has_points else {}),
    }
    made = table_format(spec.name, spec, parts, read)
    return made if is_finite.all() else replace(made, table_rows=checked)


def scales_of(
    scale: StoredTensor, shape: tuple[int, ...], where: str, block: tuple[int, int] | None = None
) -> tuple[Scales, NDArray[Any]]:
    """What shares a scale by the shape of the scales of a matrix, and their part of it.

    That is one number for the tensor, or [rows] or [rows, 1], or [rows, groups], or by blocks [rows
    / block, columns / block], rounded up. Raises FormatError for other shapes and for scales that
    are no finite numbers, UnsupportedModelError for groups that no kernel reads.
    """
    if scale.format.name not in PLAIN and not (block and scale.format.name == "F8_E8M0"):
        raise FormatError(
            f"{where}: tensor {scale.name} has {scale.format.name}, and scales are floats"
        )
    number, numbers = PLAIN.get(scale.format.name, "f32"), plain(scale)
    if not np.isfinite(floats(numbers, number)).all():
        raise FormatError(f"{where}: tensor {scale.name} has a number that is not finite")
    if len(shape) == 2:
        rows, cols = shape
        if numbers.size == 1:
            return Scales(0, number), np.broadcast_to(numbers.reshape(1, 1), (rows, 1))
        if scale.shape in ((rows,), (rows, 1)):
            return Scales(0, number), numbers.reshape(rows, 1)
        if block and scale.shape == (-(-rows // block[0]), -(-cols // block[1])):
            return Scales(_group(block[1], scale, where), "f32", block[0]), floats(numbers, number)
    return Scales(group_of(scale, shape, where), number), numbers


def group_of(scale: StoredTensor, shape: tuple[int, ...], where: str) -> int:
    """Columns of a matrix that share a scale of [rows, groups]. Raises as `scales_of`."""
    if (
        len(shape) != 2
        or len(scale.shape) != 2
        or scale.shape[0] != shape[0]
        or shape[1] % scale.shape[1]
    ):
        kinds = (
            "by tensor, rows, groups that divide its columns, or blocks of the size that the "
            "configuration names"
        )
        raise FormatError(
            f"{where}: tensor {scale.name} has shape {list(scale.shape)}, which gives a "
            f"matrix {list(shape)} no scales {kinds}"
        )
    return _group(shape[1] // scale.shape[1], scale, where)


def _group(columns: int, scale: StoredTensor, where: str) -> int:
    if columns != 16 and columns % 32:
        raise UnsupportedModelError(
            f"{where}: tensor {scale.name} has scales of {columns} columns each; what is "
            "supported: 16, multiples of 32, and whole rows"
        )
    return columns


def plain(tensor: StoredTensor) -> NDArray[Any]:
    """The numbers of a tensor, in its shape: a view, with bf16 as its 16 bits; those that NumPy has
    no type for become float32.
    """
    dtype = {
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "U8": "u1",
        "I8": "i1",
        "I16": "<i2",
        "I32": "<i4",
        "I64": "<i8",
    }
    if tensor.format.name in dtype:
        return (
            tensor.parts["codes"].reshape(-1).view(dtype[tensor.format.name]).reshape(tensor.shape)
        )
    return tensor.dequantise()


def codes_of(tensor: StoredTensor) -> Bytes:  # [rows, bytes of a row]
    """The bytes of a tensor, row after row: a view."""
    return tensor.parts["codes"].reshape(tensor.rows, -1)


def float8_matrix(tensor: StoredTensor, scales: Scales, numbers: NDArray[Any]) -> StoredTensor:
    """A matrix of floats of 8 bits with scales."""
    codebook: Codebook = "e4m3" if tensor.format.name == "F8_E4M3" else "e5m2"
    parts = {"codes": codes_of(tensor), "scales": numbers}
    return replace(tensor, format=packed_format(codebook, Codes(tensor.cols), scales), parts=parts)
