"""The header of a GGUF file, version 3 (ggml, `docs/gguf.md`)."""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.gguf import (
    ARRAY,
    BOOL,
    MAX_ALIGNMENT,
    MAX_DIMS,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    RawValue,
)
from headrace.convert.tensor_writer import ByteRange, FileLayout, PlannedTensor
from headrace.errors import FormatError

_VERSION = 3
_ALIGNMENT = 32
_MAX_NAME_BYTES = 63
"""`GGML_MAX_NAME` without the final zero."""
_KINDS = {np.dtype(name): kind for kind, name in SCALARS.items() if kind != BOOL}
_TYPE_NUMBERS = {name: number for number, name in TENSOR_TYPES.items() if name != "-"}


def u32(value: int) -> RawValue:
    return _scalar(value, "<u4")


def f32(value: float) -> RawValue:
    return _scalar(value, "<f4")


def flag(value: bool) -> RawValue:
    return RawValue(BOOL, bytes([value]))


def string(value: str) -> RawValue:
    return RawValue(STRING, _text(value))


def strings(values: Sequence[str]) -> RawValue:
    return RawValue(ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(_text, values)))


def numbers(values: NDArray[Any]) -> RawValue:
    little = values.astype(values.dtype.newbyteorder("<"))
    return RawValue(ARRAY, struct.pack("<IQ", _KINDS[little.dtype], len(values)) + little.tobytes())


def raw(value: object) -> RawValue:
    """Integers and floats get 32 bits."""
    match value:
        case bool():
            return flag(value)
        case int():
            return u32(value)
        case float():
            return f32(value)
        case str():
            return string(value)
        case list():
            return strings(value)
        case np.ndarray():
            return numbers(value)
    raise TypeError(f"GGUF has no type for the value {value!r}")


def gguf_file_layout(
    metadata: Mapping[str, RawValue], tensors: Iterable[PlannedTensor]
) -> FileLayout:
    """Lay out a file. Raises FormatError for a tensor that GGUF cannot hold."""
    alignment = _alignment(metadata)
    records: list[bytes] = []
    offsets: dict[str, ByteRange] = {}
    end = 0
    for tensor in tensors:
        if tensor.name in offsets:
            raise FormatError(f"tensor {tensor.name}: the name occurs twice")
        records.append(_record(tensor, end))
        offsets[tensor.name] = ByteRange(end, tensor.nbytes)
        end += _padded(tensor.nbytes, alignment)

    entries = [
        _text(key) + struct.pack("<I", value.kind) + value.data for key, value in metadata.items()
    ]
    head = (
        b"GGUF"
        + struct.pack("<IQQ", _VERSION, len(records), len(entries))
        + b"".join(entries)
        + b"".join(records)
    )
    header = head.ljust(_padded(len(head), alignment), b"\0")
    places = {
        name: ByteRange(len(header) + offset, nbytes) for name, (offset, nbytes) in offsets.items()
    }
    return FileLayout(header, places, len(header) + end)


def _scalar(value: float, dtype: str) -> RawValue:
    return RawValue(_KINDS[np.dtype(dtype)], np.array(value, dtype).tobytes())


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _alignment(metadata: Mapping[str, RawValue]) -> int:
    if "general.alignment" not in metadata:
        return _ALIGNMENT
    alignment = int.from_bytes(metadata["general.alignment"].data, "little")
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise FormatError(
            f"general.alignment {alignment:,} is not a power of two from 8 to {MAX_ALIGNMENT:,}"
        )
    return alignment


def _record(tensor: PlannedTensor, offset: int) -> bytes:
    if tensor.format not in _TYPE_NUMBERS:
        raise FormatError(f"tensor {tensor.name}: GGUF has no format {tensor.format}")
    if not 1 <= len(tensor.shape) <= MAX_DIMS or math.prod(tensor.shape) == 0:
        raise FormatError(
            f"tensor {tensor.name}: GGUF cannot hold shape {list(tensor.shape)}; a tensor has "
            f"1 to {MAX_DIMS} dimensions, all above 0"
        )
    if len(tensor.name.encode()) > _MAX_NAME_BYTES:
        raise FormatError(f"tensor {tensor.name}: the name has more than {_MAX_NAME_BYTES} bytes")
    dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
    return _text(tensor.name) + dims + struct.pack("<IQ", _TYPE_NUMBERS[tensor.format], offset)
