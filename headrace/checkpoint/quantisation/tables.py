"""Packed codes, and scales by tensor, row, group or block."""

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

_NUMPY_TYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
_WIDTHS = (2, 3, 4, 8)


@frozen
class Codes:
    """Codes of `bits` bits, lowest first, without gaps; 8-bit codes may be signed."""

    cols: int
    bits: int = 8
    is_signed: bool = False

    def read(self, packed: Bytes) -> Bytes:
        """Unpack [rows, bytes] to [rows, cols]; 128 is added to signed codes."""
        codes = unpacked(packed, self.bits, self.cols)
        return codes ^ np.uint8(128) if self.is_signed else codes


@frozen
class Scales:
    group: int
    """Columns; 0 for a row."""
    number: Number | Literal["e8m0", "e4m3"]
    block_rows: int = 1
    """Scales of several rows are float32."""
    is_multiplied: bool = False
    """Whether the scale of the tensor multiplies e4m3; else it divides."""

    @property
    def parts(self) -> dict[str, TensorPart]:
        dtype = NUMBERS["u8" if self.number == "e8m0" or self.number == "e4m3" else self.number]
        parts = {"scales": TensorPart(dtype.str, by_row=self.block_rows == 1)}
        if self.number == "e4m3":
            parts["tensor_scale"] = TensorPart("f4", by_row=False)
        return parts

    def read(self, stored: Parts, rows: Rows) -> NDArray[np.generic]:
        """[rows, scales of a row]; powers and small floats as float32."""
        if self.block_rows > 1:
            return stored["scales"][row_numbers(stored, rows) // self.block_rows]
        scales = stored["scales"][rows]
        if self.number == "e8m0":
            return POWERS[scales]
        if self.number == "e4m3":
            values = small_floats(3)[scales]
            factor = stored["tensor_scale"]
            return values * factor if self.is_multiplied else values / factor
        return scales


def unpacked(packed: Bytes, bits: int, cols: int) -> Bytes:  # [rows, cols]
    """Codes of 1 to 8 bits from [rows, bytes]."""
    if bits == 8:
        return packed[:, :cols]
    # A unit is the smallest number of bytes that begins and ends with a code.
    unit_bytes = bits // math.gcd(bits, 8)
    unit_codes, num_units = 8 * unit_bytes // bits, -(-cols * bits // (8 * unit_bytes))
    rows, padding = len(packed), num_units * unit_bytes - packed.shape[1]
    if padding > 0:
        packed = np.pad(packed, ((0, 0), (0, padding)))
    units = packed[:, : num_units * unit_bytes].reshape(rows, num_units, unit_bytes)

    codes = np.empty((rows, num_units, unit_codes), np.uint8)
    for i in range(unit_codes):
        byte, shift = divmod(i * bits, 8)
        field = units[:, :, byte] >> np.uint8(shift)
        if shift + bits > 8:
            field |= units[:, :, byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(field, np.uint8((1 << bits) - 1), out=codes[:, :, i])
    return codes.reshape(rows, -1)[:, :cols]


def row_numbers(stored: Parts, rows: Rows) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = np.arange(len(stored["codes"]))[rows]
    return numbers


@cache
def packed_format(
    codebook: Codebook, codes: Codes, scales: Scales, has_points: bool = False
) -> Format:
    """The format of a matrix with these codes, scales and perhaps zero points.

    Codes of other widths than kernels read are widened. Kernels refuse small floats that are
    not finite with ValueError.
    """
    bits = next(width for width in _WIDTHS if width >= codes.bits)
    spec = QuantSpec(
        bits=bits,
        group=scales.group,
        scale="f32" if scales.number == "e8m0" or scales.number == "e4m3" else scales.number,
        zero="point" if has_points else "none",
        zero_type="u8" if has_points else None,
        codebook=codebook,
    )
    # Without zero points, the code of 0 is in the middle of all codes.
    offset = np.uint8(0 if has_points else (1 << bits - 1) - (1 << codes.bits - 1))

    def table_rows(stored: Parts, rows: Rows) -> TableRows:
        unpacked_codes = codes.read(stored["codes"][rows])
        return TableRows(
            unpacked_codes + offset if offset else unpacked_codes,
            scales.read(stored, rows),
            stored["zeros"][rows] if has_points else None,
        )

    # Small floats are not finite from some magnitude on.
    is_finite = np.isfinite(spec.values[: 1 << bits - 1])
    limit = int(is_finite.argmin())

    def finite_table_rows(stored: Parts, rows: Rows) -> TableRows:
        table = table_rows(stored, rows)
        if (table.codes & np.uint8(127)).max() >= limit:
            raise ValueError(f"a number in {codebook} is not finite; the file is damaged")
        return table

    parts = {"codes": TensorPart("u1"), **scales.parts}
    if has_points:
        parts["zeros"] = TensorPart("u1")
    stored_format = table_format(spec.name, spec, parts, table_rows)
    if is_finite.all():
        return stored_format
    return replace(stored_format, table_rows=finite_table_rows)


def scales_of(
    scale: StoredTensor, shape: tuple[int, ...], where: str, block: tuple[int, int] | None = None
) -> tuple[Scales, NDArray[Any]]:
    """The layout and the numbers of scales: one number, [rows], [rows, 1], [rows, groups], or
    by blocks.

    Raises FormatError or UnsupportedModelError.
    """
    if scale.format.name not in PLAIN and not (block and scale.format.name == "F8_E8M0"):
        raise FormatError(
            f"{where}: tensor {scale.name} is {scale.format.name}, expected floats for scales"
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
    """Columns per scale of [rows, groups]. Raises as `scales_of`."""
    if (
        len(shape) != 2
        or len(scale.shape) != 2
        or scale.shape[0] != shape[0]
        or shape[1] % scale.shape[1]
    ):
        raise FormatError(
            f"{where}: tensor {scale.name} has shape {list(scale.shape)}; the scales of a matrix "
            f"{list(shape)} are by tensor, by row, by groups that divide its columns, or by the "
            "blocks of the configuration"
        )
    return _group(shape[1] // scale.shape[1], scale, where)


def _group(columns: int, scale: StoredTensor, where: str) -> int:
    if columns != 16 and columns % 32:
        raise UnsupportedModelError(
            f"{where}: tensor {scale.name} has scales of {columns} columns each; supported: 16, "
            "multiples of 32, whole rows"
        )
    return columns


def plain(tensor: StoredTensor) -> NDArray[Any]:
    """The numbers as a view; bf16 as 16 bits, small floats as float32."""
    if dtype := _NUMPY_TYPES.get(tensor.format.name):
        return tensor.parts["codes"].reshape(-1).view(dtype).reshape(tensor.shape)
    return tensor.dequantise()


def codes_of(tensor: StoredTensor) -> Bytes:  # [rows, bytes of a row]
    return tensor.parts["codes"].reshape(tensor.rows, -1)


def float8_matrix(tensor: StoredTensor, scales: Scales, numbers: NDArray[Any]) -> StoredTensor:
    codebook: Codebook = "e4m3" if tensor.format.name == "F8_E4M3" else "e5m2"
    parts = {"codes": codes_of(tensor), "scales": numbers}
    return replace(tensor, format=packed_format(codebook, Codes(tensor.cols), scales), parts=parts)
