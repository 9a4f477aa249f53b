"""Number formats in which checkpoints store weights, and a tensor stored in one of them."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.quant.dequantise import dequantise


@dataclass(frozen=True)
class Format:
    """A stored number format: `block` consecutive values of a row share `nbytes` bytes.

    With `row_scales` the bytes are codes alone, and each row has one float32 scale beside them.
    """

    name: str
    block: int
    nbytes: int
    row_scales: bool = False

    @property
    def quantised(self) -> bool:
        """Whether values are codes with scales: such weights are multiplied with int8 activations."""
        return self.block > 1 or self.row_scales


FORMATS: dict[str, Format] = {
    name: Format(name, block, nbytes)
    for name, block, nbytes in (
        ("F32", 1, 4),
        ("F16", 1, 2),
        ("BF16", 1, 2),
        ("Q4_0", 32, 18),
        ("Q4_1", 32, 20),
        ("Q5_0", 32, 22),
        ("Q5_1", 32, 24),
        ("Q8_0", 32, 34),
        ("Q2_K", 256, 84),
        ("Q3_K", 256, 110),
        ("Q4_K", 256, 144),
        ("Q5_K", 256, 176),
        ("Q6_K", 256, 210),
    )
} | {"I8_ROW": Format("I8_ROW", 1, 1, row_scales=True)}
"""Formats by name: those of GGUF files, block layouts as in ggml's `ggml-common.h`, and int8 with one scale a row (W8A8)."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredTensor:
    """A tensor in its stored format, usually a view of a memory map: nothing is read until it is used.

    `shape` is in NumPy order (rows first, columns last). Where `row_order` is given, row i of the tensor is stored row
    `row_order[i]`; `data` and `row_scales` themselves stay as the file has them.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # [nbytes]
    row_order: NDArray[np.int64] | None = None  # [rows]
    row_scales: NDArray[np.float32] | None = None  # [rows], in formats that have them

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.row_scales is None else self.row_scales.nbytes)

    def release(self) -> None:
        """Give the memory of the tensor's pages back where it is a view of a mapped file; reading it again brings them back.

        A packed copy beside pages that were read once would count twice in the memory of the process.
        """
        owner: Any = self.data
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if isinstance(owner, memoryview):
            owner = owner.obj
        if not isinstance(owner, mmap.mmap) or not hasattr(owner, "madvise"):
            return
        first = self.data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
        begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + self.data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:  # pages shared with a neighbour stay
            owner.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def dequantise(self) -> NDArray[np.float32]:
        """The values as float32, exactly as ggml defines them, in the tensor's shape; int8 codes times their row's scale."""
        return self._dequantise(slice(None) if self.row_order is None else self.row_order).reshape(self.shape)

    def dequantise_rows(self, rows: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """The given rows as float32, [len(rows), cols]."""
        index = np.asarray(rows, dtype=np.int64)
        return self._dequantise(index if self.row_order is None else self.row_order[index])

    def _dequantise(self, stored: slice | NDArray[np.int64]) -> NDArray[np.float32]:  # [stored rows, cols]
        codes = self.data.reshape(self.rows, -1)[stored]
        values = dequantise(self.format.name, codes, self.format.block, self.format.nbytes).reshape(-1, self.cols)
        return values if self.row_scales is None else values * self.row_scales[stored, None]
