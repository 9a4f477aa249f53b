"""Rows of numbers that are kept on disk, to be read again and again."""

import tempfile
from collections.abc import Iterator
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError

Floats = NDArray[np.float32]


class Remembered:
    """Blocks of rows in a temporary file: the log-probabilities of a whole text would fill the
    memory of a small machine.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the object)
        self._shapes: list[tuple[int, ...]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[Floats]:
        """All blocks, in their order."""
        self._file.seek(0)
        for shape in self._shapes:
            yield np.frombuffer(self._file.read(4 * int(np.prod(shape))), np.float32).reshape(shape)

    def add(self, rows: Floats) -> None:
        """Add a block. Raises HeadraceError where the disk refuses."""
        try:
            self._file.seek(0, 2)
            self._file.write(np.ascontiguousarray(rows, np.float32).tobytes())
            self._file.flush()
        except OSError as error:
            raise HeadraceError(
                f"a temporary file in {tempfile.gettempdir()}: {error.strerror or error}"
            ) from error
        self._shapes.append(rows.shape)
