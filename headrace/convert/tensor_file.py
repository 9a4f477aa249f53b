"""Files of tensors that are being written: a header, and tensors whose places are known before any
of them is there.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.record import frozen


@frozen
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    format: str
    """As the file calls it: Q4_K or F32 in GGUF, I32 or F8_E4M3 in safetensors."""
    shape: tuple[int, ...]
    """In NumPy order, rows first."""
    nbytes: int


@frozen
class Plan:
    """What a file begins with, and where each tensor will be: the byte that it starts at, and its
    size.
    """

    header: bytes
    places: Mapping[str, tuple[int, int]]
    size: int
    """Of the whole file."""


class TensorFile:
    """A file of tensors, which are written in any order, each of them once. Raises OSError as files
    do.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self._file = path.open("xb")
        self._missing = dict(plan.places)
        self._file.write(plan.header)
        self._file.truncate(plan.size)

    def write(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        """The bytes of a tensor, piece after piece."""
        start, nbytes = self._missing.pop(name)
        self._file.seek(start)
        for piece in pieces:
            np.ascontiguousarray(piece).tofile(self._file)
        assert self._file.tell() == start + nbytes, (
            f"{name}: {self._file.tell() - start:,} bytes, expected {nbytes:,}"
        )

    def close(self) -> None:
        """Finish the file, in which every tensor is."""
        self._file.close()
        assert not self._missing, f"not written: {', '.join(self._missing)}"
