"""Commands from rank 0 to the other ranks, as bytes without pickle.

header  kind, number of the program, number of arrays: 3 x int32; bytes after the header: int64
shape   dtype (0: the array is None), dimensions, size of each dimension: 5 x int32 per array
array   numbers in row order
"""

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.batch import KvRows, RaggedBatch, ints
from headrace.errors import FormatError
from headrace.program.adapter import Adapter, LowRank, OwnWeight, TokenRows
from headrace.quant.formats import FORMATS, RAW_FORMATS, StoredTensor

Array = NDArray[Any]
HEADER = struct.Struct("<3iq")
MAX_BYTES = 1 << 40
_CHANGE_ARRAYS = 13
"""Arrays of a change of an adapter."""
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
    PREPARE = 8
    """Prepare for steps of up to these rows and logit rows."""
    MAKE_HOST_BLOCKS = 9
    """Make host blocks, as many of each KV group."""
    SAVE_BLOCK = 10
    """Save a block of the KV group with the command's number to a host block."""
    LOAD_BLOCK = 11
    """Load a host block to a block of the KV group with the command's number."""


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


def adapter_to_arrays(adapter: Adapter) -> list[Array | None]:
    """Arrays of each change; absent parts are None."""
    arrays: list[Array | None] = []
    for name, change in adapter.items():
        own = OwnWeight(delta=change) if isinstance(change, LowRank) else change
        arrays += [_text(name), ints([isinstance(change, LowRank)])]
        arrays += _tensor_to_arrays(own.values)
        indices = own.rows and own.rows.indices.astype(np.int32)
        arrays += [indices, own.rows and own.rows.values]
        down, up, scale = own.delta or (None, None, None)
        arrays += [down, up, None if scale is None else np.array([scale], np.float32)]
        arrays += [own.added, own.row_norms, own.col_norms]
    return arrays


def adapter_from_arrays(arrays: Sequence[Array | None]) -> dict[str, LowRank | OwnWeight]:
    """Raises FormatError if an array is missing."""
    adapter: dict[str, LowRank | OwnWeight] = {}
    for change in zip(*(arrays[i::_CHANGE_ARRAYS] for i in range(_CHANGE_ARRAYS)), strict=True):
        name, is_low_rank, number_format, shape, data, indices, values, *others = change
        down, up, scale, added, row_norms, col_norms = others
        delta = None
        if down is not None and up is not None and scale is not None:
            delta = LowRank(down, up, float(scale[0]))
        if name is None or is_low_rank is None or (is_low_rank[0] and delta is None):
            raise FormatError("a rank received an adapter with a missing array")
        if is_low_rank[0] and delta:
            adapter[_read_text(name)] = delta
            continue
        rows = None
        if indices is not None and values is not None:
            rows = TokenRows(indices.astype(np.int64), values)
        adapter[_read_text(name)] = OwnWeight(
            values=_tensor_from_arrays(number_format, shape, data),
            rows=rows,
            delta=delta,
            added=added,
            row_norms=row_norms,
            col_norms=col_norms,
        )
    return adapter


def _tensor_to_arrays(tensor: StoredTensor | None) -> list[Array | None]:
    if tensor is None:
        return [None, None, None]
    assert tensor.parts.keys() == {"codes"}, "adapters have plain numbers"
    codes = tensor.parts["codes"]
    if tensor.row_order is not None:
        codes = codes[tensor.row_order]
    return [_text(tensor.format.name), ints(list(tensor.shape)), codes]


def _tensor_from_arrays(
    number_format: Array | None, shape: Array | None, data: Array | None
) -> StoredTensor | None:
    if number_format is None or shape is None or data is None:
        return None
    form = (FORMATS | RAW_FORMATS)[_read_text(number_format)]
    return StoredTensor.from_bytes("adapter", form, tuple(shape.tolist()), data)


def _text(text: str) -> Array:
    return np.frombuffer(text.encode(), np.uint8)


def _read_text(array: Array) -> str:
    return array.tobytes().decode()
