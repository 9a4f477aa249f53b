"""What rank 0 tells the others to do, as bytes: a head of fixed size, then the shapes and the
numbers of arrays. Nothing is pickled.

head    kind, number of the program, number of arrays, bytes behind the head: 4 x int32
shape   dtype (0: there is no array), dimensions, and the size of each: 5 x int32, for each array
array   its numbers, row by row
"""

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.batch import KvRows, RaggedBatch
from headrace.errors import FormatError
from headrace.program.adapter import Adapter, LowRank

Array = NDArray[Any]
HEAD = struct.Struct("<4i")
MAX_BYTES = 1 << 31
_SHAPE = struct.Struct("<5i")
_DTYPES = (None, np.dtype(np.int32), np.dtype(np.uint64), np.dtype(np.float32), np.dtype(np.uint8))


class Kind(IntEnum):
    """What is to be done."""

    JOIN = 1
    """Join the process group, whose store is at this port."""
    RUN = 2
    """Run a batch."""
    MOVE_SLOTS = 3
    ADD_ADAPTER = 4
    REMOVE_ADAPTER = 5
    CLOSE = 6
    STAGE_STEPS = 7
    """Say when steps ran."""


class Command(NamedTuple):
    """A command with what it needs."""

    kind: Kind
    program: int = 0
    arrays: Sequence[Array | None] = ()


def encode(command: Command) -> bytes:
    """A command as bytes."""
    shapes, parts = [], []
    for array in command.arrays:
        if array is None:
            shapes.append(_SHAPE.pack(0, 0, 0, 0, 0))
            continue
        sizes = (*array.shape, *(0,) * (3 - array.ndim))
        shapes.append(_SHAPE.pack(_DTYPES.index(array.dtype), array.ndim, *sizes))
        parts.append(np.ascontiguousarray(array).tobytes())
    body = b"".join([*shapes, *parts])
    return HEAD.pack(command.kind, command.program, len(command.arrays), len(body)) + body


def body_size(head: bytes) -> int:
    """Bytes behind a head. Raises FormatError for one that cannot be."""
    kind, _, arrays, size = HEAD.unpack(head)
    if kind not in Kind.__members__.values() or not 0 <= arrays * _SHAPE.size <= size <= MAX_BYTES:
        raise FormatError("a rank was sent what is no command")
    return int(size)


def decode(head: bytes, body: bytes) -> Command:
    """The command that `encode` has made bytes of. Raises FormatError."""
    kind, program, count, _ = HEAD.unpack(head)
    arrays: list[Array | None] = []
    at = count * _SHAPE.size
    for i in range(count):
        number, ndim, *sizes = _SHAPE.unpack_from(body, i * _SHAPE.size)
        if not 0 <= number < len(_DTYPES) or not 0 <= ndim <= 3 or min(sizes) < 0:
            raise FormatError("a rank was sent an array of no known kind")
        if (dtype := _DTYPES[number]) is None:
            arrays.append(None)
            continue
        shape = tuple(sizes[:ndim])
        numbers = math.prod(shape)
        if at + numbers * dtype.itemsize > len(body):
            raise FormatError("a rank was sent an array that is cut off")
        arrays.append(np.frombuffer(body, dtype, numbers, at).reshape(shape))
        at += numbers * dtype.itemsize
    if at != len(body):
        raise FormatError("a rank was sent more than the arrays of its command")
    return Command(Kind(kind), program, arrays)


_FIELDS = (
    *("tokens", "positions", "row_start", "context_len", "scheduled_len", "logit_rows", "seq_of"),
    *("ancestors", "inputs", "adapters", "pooled_rows"),
)


def batch_arrays(batch: RaggedBatch) -> list[Array | None]:
    """The arrays of a batch, whose tokens are all known."""
    return [
        *(getattr(batch, name) for name in _FIELDS),
        *(array for rows in batch.kv for array in rows),
    ]


def batch_of(arrays: Sequence[Array | None]) -> RaggedBatch:
    """The batch that `batch_arrays` has taken apart."""
    fields: dict[str, Any] = dict(zip(_FIELDS, arrays[: len(_FIELDS)], strict=True))
    kv = arrays[len(_FIELDS) :]
    pairs = [
        (slots, table)
        for slots, table in zip(kv[::2], kv[1::2], strict=True)
        if slots is not None and table is not None
    ]
    return RaggedBatch(**fields, kv=tuple(KvRows(*pair) for pair in pairs))


def adapter_arrays(adapter: Adapter) -> list[Array | None]:
    """The arrays of an adapter: the name of each weight, what goes down, what goes up, and the
    scale.
    """
    return [
        array
        for name, (down, up, scale) in adapter.items()
        for array in (
            np.frombuffer(name.encode(), np.uint8),
            down,
            up,
            np.array([scale], np.float32),
        )
    ]


def adapter_of(arrays: Sequence[Array | None]) -> dict[str, LowRank]:
    """The adapter that `adapter_arrays` has taken apart."""
    adapter = {}
    for name, down, up, scale in zip(*(arrays[i::4] for i in range(4)), strict=True):
        if name is None or down is None or up is None or scale is None:
            raise FormatError("a rank was sent an adapter with a gap")
        adapter[name.tobytes().decode()] = LowRank(down, up, float(scale[0]))
    return adapter
