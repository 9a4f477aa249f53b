import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from headrace.quant import dequantise as dq
from headrace.quant.arrays import Bytes, Floats
from headrace.quant.spec import (
    NUMBERS,
    POWERS,
    Codebook,
    QuantSpec,
    ScaleType,
    TableRows,
    dequantise_rows,
    small_floats,
)
from headrace.record import frozen


@frozen
class TensorPart:
    """An array of a stored tensor, by stored row or shared by all rows."""

    dtype: str
    by_row: bool = True


_CODES = {"codes": TensorPart("u1")}


@frozen(eq=False)
class Format:
    """A stored number format.

    The part `codes` is uint8 [stored rows, blocks of a row, nbytes]: `block` values of a row
    share `nbytes` bytes.
    """

    name: str
    block: int
    nbytes: int
    values: dq.Values
    parts: Mapping[str, TensorPart]
    spec: QuantSpec | None = None
    """None for plain numbers."""
    table_rows: Callable[[dq.Parts, dq.Rows], TableRows] | None = None
    split: Callable[[Bytes], dq.BlockCodes] | None = None
    """Unpacks blocks [blocks, bytes]."""
    integers: Callable[[], NDArray[np.int8]] | None = None
    """The table of looked-up codes: 16 integers, or grid points [points, columns of a
    point].
    """

    @property
    def bits(self) -> float:
        """Bits of a number, without scales."""
        if self.spec and self.spec.is_sparse:
            return self.spec.bits / 2 + 1
        return self.spec.bits if self.spec else 8 * self.nbytes / self.block

    @property
    def is_plain(self) -> bool:
        """Whether a value is one number on its own."""
        return self.block == 1 and len(self.parts) == 1

    @property
    def quantised(self) -> bool:
        """Whether kernels multiply it with int8 activations."""
        return not self.is_plain and not self.is_bf16

    @property
    def is_bf16(self) -> bool:
        """Whether values are bf16, all of them or two of four."""
        return self.name == "BF16" or (self.spec is not None and self.spec.codebook == "bf16")

    @property
    def needs_rows_in_int8(self) -> bool:
        """Whether kernels multiply it with int8 activations that have one scale per row."""
        if self.spec is not None and self.spec.is_sparse:
            return self.spec.needs_rows_in_int8
        return "row_scales" in self.parts and self.table_rows is None

    @property
    def needs_floats(self) -> bool:
        return self.table_rows is not None and self.spec is not None and self.spec.needs_floats


def _numbers(name: str, nbytes: int, convert: Callable[[Bytes], Floats]) -> Format:
    values = dq.of_blocks(convert, 1)
    return Format(name=name, block=1, nbytes=nbytes, values=values, parts=_CODES)


def _blocks(name: str, spec: QuantSpec, split: Callable[[Bytes], dq.BlockCodes]) -> Format:
    block = spec.super_block or spec.group
    return Format(
        name=name,
        block=block,
        nbytes=spec.table_bytes(1, block),
        values=dq.of_blocks(dq.block_values(split), block),
        parts=_CODES,
        spec=spec,
        split=split,
    )


def _lookup_blocks(name: str, spec: QuantSpec) -> Format:
    # The module is imported with its grids when a model has such blocks.
    def split(blocks: Bytes) -> dq.BlockCodes:
        from headrace.quant import gguf_blocks

        return gguf_blocks.split(name, blocks)

    def integers() -> NDArray[np.int8]:
        from headrace.quant import gguf_blocks

        return gguf_blocks.integers(name)

    return replace(_blocks(name, spec, split), integers=integers)


def table_format(
    name: str,
    spec: QuantSpec,
    parts: Mapping[str, TensorPart],
    table_rows: Callable[[dq.Parts, dq.Rows], TableRows],
) -> Format:
    """A format that `table_rows` unpacks.

    With a part `column_order` [cols], column i of its result is column `column_order[i]` of the
    matrix.
    """

    def values(stored: dq.Parts, rows: dq.Rows) -> Floats:
        result = dequantise_rows(spec, table_rows(stored, rows))
        if "column_order" not in stored:
            return result
        in_order = np.empty_like(result)
        in_order[:, stored["column_order"]] = result
        return in_order

    return Format(
        name=name,
        block=1,
        nbytes=1,
        values=values,
        parts=parts,
        spec=spec,
        table_rows=table_rows,
    )


def table_parts(spec: QuantSpec) -> dict[str, TensorPart]:
    """The tables [rows, scales of a row] that hold numbers."""
    tables = {"scales": spec.scale, "zeros": spec.zero_type}
    return {
        name: TensorPart(NUMBERS[number].str)
        for name, number in tables.items()
        if number in NUMBERS
    }


def _table_blocks(name: str, block: int, nbytes: int, spec: QuantSpec) -> Format:
    def table_rows(parts: dq.Parts, rows: dq.Rows) -> TableRows:
        from headrace.quant import gguf_blocks

        return gguf_blocks.table_rows(name, parts["codes"][rows])

    return replace(table_format(name, spec, _CODES, table_rows), block=block, nbytes=nbytes)


@cache
def plain_table(spec: QuantSpec) -> Format:
    """The format of a matrix whose parts are the arrays of `TableRows`, one code in a number."""
    parts = {"codes": TensorPart("<u2" if spec.codebook == "bf16" else "u1"), **table_parts(spec)}
    if spec.is_sparse:
        parts["places"] = TensorPart("u1")

    def table_rows(stored: dq.Parts, rows: dq.Rows) -> TableRows:
        codes = stored["codes"][rows]
        return TableRows(
            codes,
            stored["scales"][rows] if "scales" in stored else np.empty((len(codes), 0), np.float32),
            stored["zeros"][rows] if "zeros" in stored else None,
            stored["places"][rows] if "places" in stored else None,
        )

    return table_format(spec.name, spec, parts, table_rows)


def _with_minima(bits: int) -> QuantSpec:
    return QuantSpec(bits=bits, group=32, scale="f16", zero="minimum", zero_type="f16")


def _k_blocks(
    bits: int, group: int, scale: ScaleType, zero: Literal["none", "minimum"]
) -> QuantSpec:
    return QuantSpec(bits=bits, group=group, scale=scale, zero=zero, super_block=256)


def _grid_blocks(bits: int, group: int, scale: ScaleType, codebook: Codebook) -> QuantSpec:
    return QuantSpec(
        bits=bits, group=group, scale=scale, codebook=codebook, code_cols=8, super_block=256
    )


_MXFP4 = QuantSpec(bits=4, group=32, scale="e8m0", codebook="e2m1")
_I8_VALUES = dq.row_scaled(dq.of_blocks(dq.numbers("i1"), 1))
_I8_PARTS = {**_CODES, "row_scales": TensorPart("f4")}

_FORMATS = (
    _numbers("F32", 4, dq.f32),
    _numbers("F16", 2, dq.f16),
    _numbers("BF16", 2, dq.bf16),
    _blocks("Q4_0", QuantSpec(bits=4, group=32), dq.q4_0),
    _blocks("Q4_1", _with_minima(4), dq.q4_1),
    _blocks("Q5_0", QuantSpec(bits=5, group=32), dq.q5_0),
    _blocks("Q5_1", _with_minima(5), dq.q5_1),
    _blocks("Q8_0", QuantSpec(bits=8, group=32), dq.q8_0),
    _blocks("Q2_K", _k_blocks(2, 16, "4-bit", "minimum"), dq.q2_k),
    _blocks("Q3_K", _k_blocks(3, 16, "6-bit", "none"), dq.q3_k),
    _blocks("Q4_K", _k_blocks(4, 32, "6-bit", "minimum"), dq.q4_k),
    _blocks("Q5_K", _k_blocks(5, 32, "6-bit", "minimum"), dq.q5_k),
    _blocks("Q6_K", _k_blocks(6, 16, "8-bit", "none"), dq.q6_k),
    _lookup_blocks("IQ1_S", _grid_blocks(11, 32, "4-bit", "iq1")),
    _lookup_blocks("IQ1_M", _grid_blocks(12, 16, "3-bit", "iq1")),
    _lookup_blocks("IQ2_XXS", _grid_blocks(15, 32, "4-bit", "iq2")),
    _lookup_blocks("IQ2_XS", _grid_blocks(16, 16, "4-bit", "iq2")),
    _lookup_blocks("IQ2_S", _grid_blocks(18, 16, "4-bit", "iq2")),
    _lookup_blocks("IQ3_XXS", _grid_blocks(23, 32, "4-bit", "iq3_xxs")),
    _lookup_blocks("IQ3_S", _grid_blocks(26, 32, "4-bit", "iq3_s")),
    _table_blocks("IQ4_NL", 32, 18, QuantSpec(bits=4, group=32, codebook="iq4_nl")),
    _lookup_blocks(
        "IQ4_XS",
        QuantSpec(bits=4, group=32, scale="6-bit", codebook="iq4_nl", super_block=256),
    ),
    _table_blocks("TQ1_0", 256, 54, QuantSpec(bits=2, group=256)),
    _table_blocks("TQ2_0", 256, 66, QuantSpec(bits=2, group=256)),
    Format(
        name="MXFP4",
        block=32,
        nbytes=17,
        values=dq.of_blocks(dq.mxfp4, 32),
        parts=_CODES,
        spec=_MXFP4,
    ),
    Format(
        name="MXFP4_PAIRS",
        block=32,
        nbytes=16,
        values=dq.mxfp4_pairs,
        parts={**_CODES, "block_scales": TensorPart("u1")},
        spec=_MXFP4,
    ),
    _table_blocks("NVFP4", 64, 36, QuantSpec(bits=4, group=16, codebook="e2m1")),
    Format(
        name="I8_ROW",
        block=1,
        nbytes=1,
        values=_I8_VALUES,
        parts=_I8_PARTS,
        spec=QuantSpec(bits=8, group=0, scale="f32"),
    ),
    Format(
        name="I8_MIXED",
        block=1,
        nbytes=1,
        values=_I8_VALUES,
        parts=_I8_PARTS,
        spec=QuantSpec(bits=8, group=0, scale="f32", has_wide_outliers=True),
    ),
)

FORMATS: dict[str, Format] = {stored.name: stored for stored in _FORMATS}
"""GGUF's formats, MXFP4 with separate scales (gpt-oss), and int8 by row."""

RAW_FORMATS: dict[str, Format] = {
    name: _numbers(name, np.dtype(dtype).itemsize, dq.numbers(dtype))
    for name, dtype in {
        "BOOL": "u1",
        "U8": "u1",
        "I8": "i1",
        "I16": "<i2",
        "I32": "<i4",
        "I64": "<i8",
        "U32": "<u4",
    }.items()
} | {
    name: _numbers(name, 1, dq.look_up(values))
    for name, values in (
        ("F8_E4M3", small_floats(3)),
        ("F8_E5M2", small_floats(2)),
        ("F8_E8M0", POWERS),
    )
}
"""Plain numbers by safetensors' names."""


@dataclass(frozen=True, eq=False, slots=True)  # with slots: hostile files have many
class StoredTensor:
    """A tensor in its stored format, usually a view of a memory map.

    `shape` has rows first. With `row_order`, row i of the tensor is stored row `row_order[i]`.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    parts: Mapping[str, NDArray[Any]]
    row_order: NDArray[np.int64] | None = None  # [rows]

    def __post_init__(self) -> None:
        found = {name: part.dtype for name, part in self.parts.items()}
        assert found == {name: np.dtype(part.dtype) for name, part in self.format.parts.items()}, (
            f"{self.name}: {found}"
        )

    @classmethod
    def from_bytes(
        cls,
        name: str,
        format: Format,
        shape: tuple[int, ...],
        data: Bytes,
        **parts: NDArray[Any],
    ) -> "StoredTensor":
        rows = math.prod(shape[:-1])
        codes = data.reshape(rows, (shape[-1] if shape else 1) // format.block, format.nbytes)
        return cls(name=name, format=format, shape=shape, parts={"codes": codes, **parts})

    @classmethod
    def from_floats(cls, name: str, values: Floats) -> "StoredTensor":
        data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
        return cls.from_bytes(name, FORMATS["F32"], values.shape, data)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        total = 0
        for name, part in self.parts.items():
            if self.format.parts[name].by_row:
                total += part.nbytes // max(len(part), 1) * self.rows
            else:
                total += part.nbytes
        return total

    @property
    def column_order(self) -> NDArray[np.int64] | None:
        """The columns [cols] in the order of the codes, or None."""
        return self.parts.get("column_order")

    @property
    def scales(self) -> NDArray[Any] | None:
        return self.parts.get("row_scales", self.parts.get("block_scales"))

    def take(self, name: str, rows: NDArray[np.int64]) -> "StoredTensor":
        """Select stored rows as a matrix; adjacent rows as a view."""
        first, last = int(rows.min()), int(rows.max()) + 1
        parts = self.parts
        if last - first == len(rows) and all(part.by_row for part in self.format.parts.values()):
            parts = {key: part[first:last] for key, part in parts.items()}
            rows = rows - first if first else rows
        order = None if np.array_equal(rows, np.arange(len(rows))) else rows
        return replace(self, name=name, shape=(len(rows), self.cols), parts=parts, row_order=order)

    def transposed(self) -> "StoredTensor":
        assert self.format.block == 1 and self.parts.keys() == {"codes"} and self.row_order is None
        parts = {"codes": self.parts["codes"].swapaxes(0, 1)}
        return replace(self, shape=(self.cols, self.rows), parts=parts)

    @property
    def is_mapped(self) -> bool:
        """Whether the codes are pages of a mapped file."""
        return _file_map(self.parts["codes"]) is not None

    def release(self) -> None:
        """Give back the pages of a mapped file."""
        for part in self.parts.values():
            _release(part)

    def dequantise(self) -> Floats:
        stored = slice(None) if self.row_order is None else self.row_order
        return self._values(stored).reshape(self.shape)

    def dequantise_rows(self, rows: Sequence[int] | NDArray[np.integer]) -> Floats:
        """Compute rows [len(rows), cols]."""
        index = np.asarray(rows, dtype=np.int64)
        return self._values(index if self.row_order is None else self.row_order[index])

    def _values(self, stored: dq.Rows) -> Floats:  # [stored rows, cols]
        return self.format.values(self.parts, stored)


def _file_map(array: NDArray[Any]) -> mmap.mmap | None:
    """The map of a file that an array is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) and hasattr(owner, "madvise") else None


def _release(array: NDArray[Any]) -> None:
    owner = _file_map(array)
    if owner is None:
        return
    start = np.frombuffer(owner, np.uint8).ctypes.data
    first, last = (address - start for address in byte_bounds(array))
    # Pages that are shared with a neighbouring array stay.
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        owner.madvise(mmap.MADV_DONTNEED, begin, end - begin)
