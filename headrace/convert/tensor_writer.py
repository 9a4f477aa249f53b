from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.record import frozen


@frozen
class PlannedTensor:
    name: str
    format: str
    """The file's name, such as Q4_K or F8_E4M3."""
    shape: tuple[int, ...]
    """Rows first."""
    nbytes: int


class ByteRange(NamedTuple):
    start: int
    nbytes: int


@frozen
class FileLayout:
    header: bytes
    places: Mapping[str, ByteRange]
    size: int


class TensorWriter:
    """Writes each tensor once. Raises OSError."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._file = path.open("xb")
        self._missing = dict(layout.places)
        self._file.write(layout.header)
        self._file.truncate(layout.size)

    def write(self, name: str, chunks: Iterable[NDArray[Any]]) -> None:
        start, nbytes = self._missing.pop(name)
        self._file.seek(start)
        for chunk in chunks:
            np.ascontiguousarray(chunk).tofile(self._file)
        written = self._file.tell() - start
        assert written == nbytes, f"{name}: {written:,} bytes, expected {nbytes:,}"

    def close(self) -> None:
        self._file.close()
        assert not self._missing, f"not written: {', '.join(self._missing)}"
