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
    """A stored number format: `block` consecutive values of a row share `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


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
}
"""Formats by name; block layouts as in ggml's `ggml-common.h`."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredTensor:
    """A tensor in its stored format, usually a view of a memory map: nothing is read until it is used.

    `shape` is in NumPy order (rows first, columns last). Where `row_order` is given, row i of the tensor is stored row
    `row_order[i]`; `data` itself stays as the file has it.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # [nbytes]
    row_order: NDArray[np.int64] | None = None  # [rows]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

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
        begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:  # pages shared with a neighbour stay
            owner.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def dequantise(self) -> NDArray[np.float32]:
        """The values as float32, exactly as ggml defines them, in the tensor's shape."""
        data = self.data if self.row_order is None else self._stored_rows()[self.row_order]
        return dequantise(self.format.name, data, self.format.block, self.format.nbytes).reshape(self.shape)

    def dequantise_rows(self, rows: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """The given rows as float32, [len(rows), cols]."""
        index = np.asarray(rows, dtype=np.int64)
        stored = index if self.row_order is None else self.row_order[index]
        data = self._stored_rows()[stored]
        return dequantise(self.format.name, data, self.format.block, self.format.nbytes).reshape(len(index), self.cols)

    def _stored_rows(self) -> NDArray[np.uint8]:  # [rows, bytes of a row]
        return self.data.reshape(self.rows, -1)
