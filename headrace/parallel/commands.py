"""Commands from rank 0 to the other ranks, as bytes without pickle.

header  kind, number of the program, number of arrays, bytes after the header: 4 x int32
shape   dtype (0: the array is None), dimensions, size of each dimension: 5 x int32 per array
array   numbers in row order
"""

import math
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.batch import KvRows, RaggedBatch
from headrace.errors import FormatError
from headrace.program.adapter import LowRank

Array = NDArray[Any]
HEADER = struct.Struct("<4i")
MAX_BYTES = 1 << 31
_SHAPE = struct.Struct("<5i")
_DTYPES = (None, np.dtype(np.int32), np.dtype(np.uint64), np.dtype(np.float32), np.dtype(np.uint8))


class CommandKind(IntEnum):
    JOIN = 1
    """Join the process group; the array has the port of its store."""
    RUN = 2
    MOVE_SLOTS = 3
    ADD_ADAPTER = 4
    REMOVE_ADAPTER = 5
    CLOSE = 6
    STAGE_STEPS = 7


class Command(NamedTuple):
    kind: CommandKind
    program: int = 0
    arrays: Sequence[Array | None] = ()


def encode(command: Command) -> bytes:
    shapes, bodies = [], []
    for array in command.arrays:
        if array is None:
            shapes.append(_SHAPE.pack(0, 0, 0, 0, 0))
            continue
        sizes = (*array.shape, *(0,) * (3 - array.ndim))
        shapes.append(_SHAPE.pack(_DTYPES.index(array.dtype), array.ndim, *sizes))
        bodies.append(np.ascontiguousarray(array).tobytes())
    body = b"".join([*shapes, *bodies])
    return HEADER.pack(command.kind, command.program, len(command.arrays), len(body)) + body


def body_size(header: bytes) -> int:
    """Return the bytes after a header. Raises FormatError."""
    kind, _, num_arrays, size = HEADER.unpack(header)
    is_known = kind in CommandKind.__members__.values()
    if not is_known or not 0 <= num_arrays * _SHAPE.size <= size <= MAX_BYTES:
        raise FormatError("a rank received an invalid command header")
    return int(size)


def decode(header: bytes, body: bytes) -> Command:
    kind, program, num_arrays, _ = HEADER.unpack(header)
    arrays: list[Array | None] = []
    offset = num_arrays * _SHAPE.size
    for i in range(num_arrays):
        number, ndim, *sizes = _SHAPE.unpack_from(body, i * _SHAPE.size)
        if not 0 <= number < len(_DTYPES) or not 0 <= ndim <= 3 or min(sizes) < 0:
            raise FormatError("a rank received an array of unknown type")
        dtype = _DTYPES[number]
        if dtype is None:
            arrays.append(None)
            continue
        shape = tuple(sizes[:ndim])
        count = math.prod(shape)
        if offset + count * dtype.itemsize > len(body):
            raise FormatError("a rank received an array that is cut off")
        arrays.append(np.frombuffer(body, dtype, count, offset).reshape(shape))
        offset += count * dtype.itemsize
    if offset != len(body):
        raise FormatError("a rank received bytes after the arrays of a command")
    return Command(CommandKind(kind), program, arrays)


_BATCH_FIELDS = (
    "tokens",
    "positions",
    "row_start",
    "context_len",
    "scheduled_len",
    "logit_rows",
    "seq_of",
    "ancestors",
    "inputs",
    "adapters",
    "pooled_rows",
)


def batch_to_arrays(batch: RaggedBatch) -> list[Array | None]:
    fields = [getattr(batch, name) for name in _BATCH_FIELDS]
    return [*fields, *(array for rows in batch.kv for array in rows)]


def batch_from_arrays(arrays: Sequence[Array | None]) -> RaggedBatch:
    fields: dict[str, Any] = dict(zip(_BATCH_FIELDS, arrays[: len(_BATCH_FIELDS)], strict=True))
    kv = arrays[len(_BATCH_FIELDS) :]
    groups = [
        KvRows(slots, table)
        for slots, table in zip(kv[::2], kv[1::2], strict=True)
        if slots is not None and table is not None
    ]
    return RaggedBatch(**fields, kv=tuple(groups))


def adapter_to_arrays(adapter: Mapping[str, LowRank]) -> list[Array | None]:
    arrays: list[Array | None] = []
    for name, (down, up, scale) in adapter.items():
        arrays += [np.frombuffer(name.encode(), np.uint8), down, up]
        arrays.append(np.array([scale], np.float32))
    return arrays


def adapter_from_arrays(arrays: Sequence[Array | None]) -> dict[str, LowRank]:
    adapter = {}
    for name, down, up, scale in zip(*(arrays[i::4] for i in range(4)), strict=True):
        if name is None or down is None or up is None or scale is None:
            raise FormatError("a rank received an adapter with a missing array")
        adapter[name.tobytes().decode()] = LowRank(down, up, float(scale[0]))
    return adapter
