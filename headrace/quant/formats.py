"""Number formats in which checkpoints store weights, and a tensor stored in one of them."""

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from headrace.quant import dequantise as dq
from headrace.quant.spec import NUMBERS, POWERS, QuantSpec, TableRows, dequantise_rows, small_floats
from headrace.record import frozen


@frozen
class TensorPart:
    """One of the arrays that a stored tensor is made of.

    With `by_row` its first axis is the stored rows of the tensor (as a transposed view, where the
    file has it otherwise); without, all rows share it: a codebook, the group of each column, scales
    of scales.
    """

    dtype: str  # NumPy's
    by_row: bool = True


_CODES = {"codes": TensorPart("u1")}


@frozen(eq=False)
class Format:
    """A stored number format.

    Each has the part `codes`, uint8 [stored rows, blocks of a row, nbytes]: `block` consecutive
    values of a row share `nbytes` bytes. What does not lie among these is a part of its own, named
    by what it is and what for: `row_scales`. `values` says what it all means.
    """

    name: str
    block: int
    nbytes: int
    values: dq.Values
    parts: Mapping[str, TensorPart]
    spec: QuantSpec | None = None
    """What codes and scales are, of plain numbers None; where there is `table_rows`, as these give
    them.
    """
    table_rows: Callable[[dq.Parts, dq.Rows], TableRows] | None = None
    """The given stored rows code by code, for formats that are packed as codes with a table of
    scales. Blocks of ggml are packed natively, and held to this.
    """
    split: Callable[[dq.Bytes], dq.BlockCodes] | None = None
    """Blocks [blocks, bytes] taken apart, for formats whose blocks hold codes and scales and that
    have no `table_rows`.
    """
    integers: Callable[[], NDArray[np.int8]] | None = None
    """The values of codes that kernels look up in blocks as they lie: 16, or the points of a grid
    [points, columns of a point].
    """

    @property
    def quantised(self) -> bool:
        """Whether values are codes with scales: such weights are multiplied with int8 activations,
        if they do not need floats.
        """
        return self.block > 1 or len(self.parts) > 1

    @property
    def needs_floats(self) -> bool:
        """Whether kernels have no integer product for it; they have one for all that they read from
        the file as it is.
        """
        return self.table_rows is not None and self.spec is not None and self.spec.needs_floats

    @property
    def has_column_order(self) -> bool:
        """Whether rows are read with their columns in another order than the matrix has them:
        `column_order`.
        """
        return "column_order" in self.parts


def _numbers(name: str, nbytes: int, convert: Callable[[dq.Bytes], dq.Floats]) -> Format:
    return Format(name, 1, nbytes, dq.of_blocks(convert, 1), _CODES)


def _blocks(name: str, spec: QuantSpec, split: Callable[[dq.Bytes], dq.BlockCodes]) -> Format:
    """A format whose blocks, of a group or a super-block, hold codes and scales together."""
    block = spec.super_block or spec.group
    return Format(
        name,
        block,
        spec.table_bytes(1, block),
        dq.of_blocks(dq.values_of(split), block),
        _CODES,
        spec,
        split=split,
    )


def _lookup_blocks(name: str, spec: QuantSpec) -> Format:
    """The same for codes that are looked up."""

    def split(blocks: dq.Bytes) -> dq.BlockCodes:
        from headrace.quant import gguf_blocks  # with its grids, where a model has such blocks

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
    """A format whose rows are read code by code, from parts that lie as a method's files have them;
    its `codes` have no blocks.

    Where it has the part `column_order`, int64 [cols], `table_rows` gives column `column_order[i]`
    of the matrix as its column i.
    """

    def values(of: dq.Parts, rows: dq.Rows) -> dq.Floats:
        found = dequantise_rows(spec, table_rows(of, rows))
        if "column_order" not in of:
            return found
        in_order = np.empty_like(found)
        in_order[:, of["column_order"]] = found
        return in_order

    return Format(name, 1, 1, values, parts, spec, table_rows)


def table_parts(spec: QuantSpec) -> dict[str, TensorPart]:
    """The scales and zeros of a matrix [rows, scales of a row], where they are numbers of their
    own.
    """
    named = {"scales": spec.scale, "zeros": spec.zero_type}
    return {
        name: TensorPart(NUMBERS[number].str) for name, number in named.items() if number in NUMBERS
    }


def _table_blocks(name: str, block: int, nbytes: int, spec: QuantSpec) -> Format:
    """A format whose blocks are taken apart into codes and scales as they are read."""

    def rows_of(of: dq.Parts, rows: dq.Rows) -> TableRows:
        from headrace.quant import gguf_blocks  # with its grids, where a model has such blocks

        return gguf_blocks.table_rows(name, of["codes"][rows])

    return replace(table_format(name, spec, _CODES, rows_of), block=block, nbytes=nbytes)


@cache
def plain_table(spec: QuantSpec) -> Format:
    """The format of a matrix that is stored code by code: uint8 [rows, cols], and tables [rows,
    scales of a row].
    """
    parts = _CODES | table_parts(spec)

    def rows_of(of: dq.Parts, rows: dq.Rows) -> TableRows:
        return TableRows(
            of["codes"][rows], of["scales"][rows], of["zeros"][rows] if "zeros" in of else None
        )

    return table_format(spec.name, spec, parts, rows_of)


_MXFP4 = QuantSpec(4, 32, "e8m0", codebook="e2m1")
_I8_VALUES = dq.row_scaled(dq.of_blocks(dq.numbers("i1"), 1))

FORMATS: dict[str, Format] = {
    stored.name: stored
    for stored in (
        _numbers("F32", 4, dq.f32),
        _numbers("F16", 2, dq.f16),
        _numbers("BF16", 2, dq.bf16),
        _blocks("Q4_0", QuantSpec(4, 32), dq.q4_0),
        _blocks("Q4_1", QuantSpec(4, 32, "f16", "minimum", "f16"), dq.q4_1),
        _blocks("Q5_0", QuantSpec(5, 32), dq.q5_0),
        _blocks("Q5_1", QuantSpec(5, 32, "f16", "minimum", "f16"), dq.q5_1),
        _blocks("Q8_0", QuantSpec(8, 32), dq.q8_0),
        _blocks("Q2_K", QuantSpec(2, 16, "4-bit", "minimum", super_block=256), dq.q2_k),
        _blocks("Q3_K", QuantSpec(3, 16, "6-bit", super_block=256), dq.q3_k),
        _blocks("Q4_K", QuantSpec(4, 32, "6-bit", "minimum", super_block=256), dq.q4_k),
        _blocks("Q5_K", QuantSpec(5, 32, "6-bit", "minimum", super_block=256), dq.q5_k),
        _blocks("Q6_K", QuantSpec(6, 16, "8-bit", super_block=256), dq.q6_k),
        _lookup_blocks(
            "IQ1_S", QuantSpec(11, 32, "4-bit", codebook="iq1", point=8, super_block=256)
        ),
        _lookup_blocks(
            "IQ1_M", QuantSpec(12, 16, "3-bit", codebook="iq1", point=8, super_block=256)
        ),
        _lookup_blocks(
            "IQ2_XXS", QuantSpec(15, 32, "4-bit", codebook="iq2", point=8, super_block=256)
        ),
        _lookup_blocks(
            "IQ2_XS", QuantSpec(16, 16, "4-bit", codebook="iq2", point=8, super_block=256)
        ),
        _lookup_blocks(
            "IQ2_S", QuantSpec(18, 16, "4-bit", codebook="iq2", point=8, super_block=256)
        ),
        _lookup_blocks(
            "IQ3_XXS", QuantSpec(23, 32, "4-bit", codebook="iq3_xxs", point=8, super_block=256)
        ),
        _lookup_blocks(
            "IQ3_S", QuantSpec(26, 32, "4-bit", codebook="iq3_s", point=8, super_block=256)
        ),
        _table_blocks("IQ4_NL", 32, 18, QuantSpec(4, 32, codebook="iq4_nl")),
        _lookup_blocks("IQ4_XS", QuantSpec(4, 32, "6-bit", codebook="iq4_nl", super_block=256)),
        _table_blocks("TQ1_0", 256, 54, QuantSpec(2, 256)),
        _table_blocks("TQ2_0", 256, 66, QuantSpec(2, 256)),
        Format("MXFP4", 32, 17, dq.of_blocks(dq.mxfp4, 32), _CODES, _MXFP4),
        Format(
            "MXFP4_PAIRS",
            32,
            16,
            dq.mxfp4_pairs,
            {**_CODES, "block_scales": TensorPart("u1")},
            _MXFP4,
        ),
        _table_blocks("NVFP4", 64, 36, QuantSpec(4, 16, codebook="e2m1")),
        Format(
            "I8_ROW",
            1,
            1,
            _I8_VALUES,
            {**_CODES, "row_scales": TensorPart("f4")},
            QuantSpec(8, 0, "f32"),
        ),
        Format(
            "I8_MIXED",
            1,
            1,
            _I8_VALUES,
            {**_CODES, "row_scales": TensorPart("f4")},
            QuantSpec(8, 0, "f32", has_wide_outliers=True),
        ),
    )
}
"""Formats of weights by name: those of GGUF files, block layouts as in ggml's `ggml-common.h`,
MXFP4 with its scales apart (gpt-oss), and int8 with one scale a row, of two kinds by what they are
multiplied with.
"""

RAW_FORMATS: dict[str, Format] = {
    name: _numbers(name, np.dtype(dtype).itemsize, dq.numbers(dtype))
    for name, dtype in {
        "BOOL": "u1",
        "U8": "u1",
        "I8": "i1",
        "I16": "<i2",
        "I32": "<i4",
        "I64": "<i8",
    }.items()
} | {
    name: _numbers(name, 1, dq.look_up(values))
    for name, values in (
        ("F8_E4M3", small_floats(3)),
        ("F8_E5M2", small_floats(2)),
        ("F8_E8M0", POWERS),
    )
}
"""Plain numbers, by the name that safetensors has for them, which only a quantisation method can
make weights of.
"""


@dataclass(frozen=True, eq=False, slots=True)  # hostile files have many
class StoredTensor:
    """A tensor in its stored format, usually a view of a memory map: nothing is read until it is
    used.

    `shape` is in NumPy order (rows first, columns last) and `parts` has what the format says. Where
    `row_order` is given, row i of the tensor is stored row `row_order[i]`; the parts themselves
    stay as the file has them.
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
        data: NDArray[np.uint8],
        **parts: NDArray[Any],
    ) -> "StoredTensor":
        """A tensor whose codes lie in `data` row after row, with its other parts."""
        rows = math.prod(shape[:-1])
        codes = data.reshape(rows, (shape[-1] if shape else 1) // format.block, format.nbytes)
        return cls(name, format, shape, {"codes": codes, **parts})

    @classmethod
    def from_floats(cls, name: str, values: NDArray[np.float32]) -> "StoredTensor":
        """The values themselves, in the format F32."""
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
        """Bytes of the tensor's rows in all parts, and of what they share."""
        kinds = self.format.parts
        return sum(
            part.nbytes // max(len(part), 1) * self.rows if kinds[name].by_row else part.nbytes
            for name, part in self.parts.items()
        )

    @property
    def column_order(self) -> NDArray[np.int64] | None:
        """Where its codes are read with their columns in another order: the columns in that order
        [cols].
        """
        return self.parts.get("column_order")

    @property
    def scales(self) -> NDArray[Any] | None:
        """The scales of rows, float32 [stored rows], or of blocks, uint8 [stored rows, blocks],
        where they lie apart from the codes.
        """
        return self.parts.get("row_scales", self.parts.get("block_scales"))

    def take(self, name: str, rows: NDArray[np.int64]) -> "StoredTensor":
        """The given stored rows as a matrix of its own: a view, of a part of the file where they
        lie together.
        """
        first, last = int(rows.min()), int(rows.max()) + 1
        parts = self.parts
        if last - first == len(rows) and all(part.by_row for part in self.format.parts.values()):
            parts, rows = (
                {key: part[first:last] for key, part in parts.items()},
                rows - first if first else rows,
            )
        order = None if np.array_equal(rows, np.arange(len(rows))) else rows
        return replace(self, name=name, shape=(len(rows), self.cols), parts=parts, row_order=order)

    def transposed(self) -> "StoredTensor":
        """The matrix with rows for columns: a view, of numbers that are stored one by one."""
        assert self.format.block == 1 and self.parts.keys() == {"codes"} and self.row_order is None
        return replace(
            self, shape=(self.cols, self.rows), parts={"codes": self.parts["codes"].swapaxes(0, 1)}
        )

    def release(self) -> None:
        """Give the memory of the tensor's pages back where it is a view of a mapped file; reading
        it again brings them back.

        A packed copy beside pages that were read once would count twice in the memory of the
        process.
        """
        for part in self.parts.values():
            _release(part)

    def dequantise(self) -> NDArray[np.float32]:
        """The values as float32, exactly as ggml defines them, in the tensor's shape; int8 codes
        times their row's scale.
        """
        return self._values(slice(None) if self.row_order is None else self.row_order).reshape(
            self.shape
        )

    def dequantise_rows(self, rows: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """The given rows as float32, [len(rows), cols]."""
        index = np.asarray(rows, dtype=np.int64)
        return self._values(index if self.row_order is None else self.row_order[index])

    def _values(
        self, stored: slice | NDArray[np.int64]
    ) -> NDArray[np.float32]:  # [stored rows, cols]
        return self.format.values(self.parts, stored)


def _release(array: NDArray[Any]) -> None:
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(owner, "madvise"):
        return
    start = np.frombuffer(owner, np.uint8).ctypes.data
    first, last = (at - start for at in byte_bounds(array))
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:  # pages shared with a neighbour stay
        owner.madvise(mmap.MADV_DONTNEED, begin, end - begin)
