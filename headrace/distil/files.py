"""Arrays and JSON in files that are written whole or not at all."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.folder.header import safetensors_layout
from headrace.convert.tensor_writer import PlannedTensor, TensorWriter
from headrace.errors import HeadraceError
from headrace.whole_file import replace_file, replacing

DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("u1"),
}
"""The type of an array for each type of a file."""


def write_safetensors(path: Path, arrays: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Write arrays by name, each with the type that the file states, or replace the file."""
    planned = [
        PlannedTensor(name, dtype, array.shape, array.size * DTYPES[dtype].itemsize)
        for name, (dtype, array) in arrays.items()
    ]
    with replacing(path, survives=True) as scratch:
        writer = TensorWriter(scratch, safetensors_layout(planned))
        for name, (dtype, array) in arrays.items():
            writer.write(name, [array.astype(DTYPES[dtype], copy=False)])
        writer.close()


def write_json(path: Path, value: object) -> None:
    """Write a file, or replace it at once."""
    replace_file(path, json.dumps(value, indent=2) + "\n", survives=True)


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn a refusal of the disk into HeadraceError."""
    try:
        yield
    except OSError as error:
        raise HeadraceError(
            f"{out}: {error.strerror or error}; all whole files in it are kept: free some space "
            "and repeat the command, or name another place"
        ) from error
