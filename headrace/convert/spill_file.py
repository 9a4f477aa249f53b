import tempfile
from collections.abc import Iterator
from typing import Self

import numpy as np

from headrace.errors import HeadraceError
from headrace.quant.arrays import Floats


class SpillFile:
    """Blocks of float32 rows in a temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the object)
        self._shapes: list[tuple[int, ...]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[Floats]:
        self._file.seek(0)
        for shape in self._shapes:
            yield np.frombuffer(self._file.read(4 * int(np.prod(shape))), np.float32).reshape(shape)

    def add(self, rows: Floats) -> None:
        """Raises HeadraceError if the disk refuses."""
        try:
            self._file.seek(0, 2)
            self._file.write(np.ascontiguousarray(rows, np.float32).tobytes())
            self._file.flush()
        except OSError as error:
            raise HeadraceError(
                f"a temporary file in {tempfile.gettempdir()}: {error.strerror or error}; "
                "free space there, or set TMPDIR to another folder"
            ) from error
        self._shapes.append(rows.shape)
