"""GGUF v2 and v3 files, memory-mapped, bounds-checked and untrusted (ggml, `docs/gguf.md`).

Layout, little endian: magic, version, tensor count, key-value count; key-values; tensor records
(name, dimensions, type, offset); padding; tensor data.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.checkpoint.files import map_file
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model.fields import Fields
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.record import frozen

_MAX_RECORDS = 65_536
_MAX_KEY_BYTES = 65_535
_MAX_NAME_BYTES = 64
MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 64 << 10
_MAX_TEXT_BYTES = 4 << 20
_MAX_STRINGS = 4 << 20
_INT64_MAX = 2**63 - 1

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_SCALAR_BYTES = {kind: np.dtype(name).itemsize for kind, name in SCALARS.items()}

# By ggml's type number; ggml has retired the types "-".
TENSOR_TYPES = dict(
    enumerate(
        "F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS "
        "IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S "
        "IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4 NVFP4".split()
    )
)
_KNOWN = [name for name in TENSOR_TYPES.values() if name in FORMATS]

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


class _Cursor:
    """A position that never passes the end of the map."""

    def __init__(self, data: mmap.mmap, name: str, offset: int = 0) -> None:
        self.data = data
        self.bytes = np.frombuffer(data, np.uint8)
        self.name = name
        self.offset = offset

    def fail(self, message: str) -> NoReturn:
        raise FormatError(f"{self.name}: {message} (at byte {self.offset:,})")

    def take(self, size: int, item: str) -> int:
        start = self.offset
        if size > len(self.data) - start:
            self.fail(f"{item} needs {size:,} bytes, but {len(self.data) - start:,} remain")
        self.offset = start + size
        return start

    def u32(self, item: str) -> int:
        value: int = _U32(self.data, self.take(4, item))[0]
        return value

    def u64(self, item: str) -> int:
        value: int = _U64(self.data, self.take(8, item))[0]
        return value

    def text(self, item: str, limit: int, encoding: str) -> str:
        size = self.u64(item)
        if size > limit:
            self.fail(f"{item} of {size:,} bytes, more than the limit of {limit:,}")
        start = self.take(size, item)
        try:
            return self.data[start : start + size].decode(encoding)
        except UnicodeDecodeError:
            self.fail(f"{item} is not valid {encoding}")

    def skip_strings(self, count: int) -> None:
        try:
            self.offset = _native.skip_strings(self.bytes, self.offset, count)
        except IndexError:
            self.fail("an array of strings runs past the end of the file")

    def skip_value(self, kind: int, depth: int = 0) -> None:
        if kind in _SCALAR_BYTES:
            self.take(_SCALAR_BYTES[kind], "a value")
        elif kind == STRING:
            self.take(self.u64("a string length"), "a string")
        elif kind == ARRAY:
            if depth == _MAX_ARRAY_DEPTH:
                self.fail(f"arrays are nested more than {_MAX_ARRAY_DEPTH} deep")
            element, count = self.u32("an array type"), self.u64("an array length")
            if element in _SCALAR_BYTES:
                self.take(count * _SCALAR_BYTES[element], "an array")
                return
            # A string takes at least 8 bytes, an array 12.
            if count > (len(self.data) - self.offset) // 8:
                self.fail(f"an array of {count:,} entries does not fit in the file")
            if element == STRING:
                self.skip_strings(count)
                return
            for _ in range(count):
                self.skip_value(element, depth + 1)
        else:
            self.fail(f"unknown value type {kind}")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            size = self.u64("a string length")
            if size > _MAX_TEXT_BYTES:
                self.fail(f"a string of {size:,} bytes, more than the limit of {_MAX_TEXT_BYTES:,}")
            start = self.take(size, "a string")
            return self.data[start : start + size].decode()
        if kind != ARRAY:
            start = self.take(_SCALAR_BYTES[kind], "a value")
            scalar = np.frombuffer(self.data, SCALARS[kind], 1, start)[0].item()
            return bool(scalar) if kind == BOOL else scalar
        element, count = self.u32("an array type"), self.u64("an array length")
        if element == STRING:
            return self.strings(count)
        if element == ARRAY:
            return [self.value(ARRAY) for _ in range(count)]
        start = self.take(count * _SCALAR_BYTES[element], "an array")
        return np.frombuffer(self.data, SCALARS[element], count, start)

    def strings(self, count: int) -> list[str]:
        if count > _MAX_STRINGS:
            self.fail(f"an array of {count:,} strings, more than the limit of {_MAX_STRINGS:,}")
        strings, self.offset = _native.read_strings(self.bytes, self.offset, count)
        return strings


class RawValue(NamedTuple):
    kind: int
    data: bytes


class Metadata(Fields):
    """The key-values of a file, each decoded when it is read."""

    def __init__(self, data: mmap.mmap, name: str, entries: dict[str, tuple[int, int]]) -> None:
        self._data = data
        self._entries = entries  # key -> (type, offset of the value)
        self.where = name

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, key: str) -> Any:
        """int, float, bool, str, a numeric array (a view), or a list of strings or arrays."""
        kind, offset = self._entries[key]
        try:
            return _Cursor(self._data, self.where, offset).value(kind)
        except UnicodeDecodeError as error:
            raise FormatError(
                f"{self.where}: {key} is not valid UTF-8 (at byte {offset:,})"
            ) from error

    def raw(self, key: str) -> RawValue:
        kind, offset = self._entries[key]
        cursor = _Cursor(self._data, self.where, offset)
        cursor.skip_value(kind)
        return RawValue(kind, self._data[offset : cursor.offset])

    def strings(self, key: str) -> list[str]:
        value: list[str] = self._get(key, None, list, "an array of strings")
        if value and not isinstance(value[0], str):
            raise FormatError(f"{self.where}: {key} must be an array of strings")
        return value

    def numbers(self, key: str) -> NDArray[Any]:
        value: NDArray[Any] = self._get(key, None, np.ndarray, "an array of numbers")
        return value


@frozen(eq=False)
class GgufFile:
    path: Path
    version: int
    metadata: Metadata
    tensors: dict[str, StoredTensor]


def is_adapter(metadata: Metadata) -> bool:
    return metadata.get("general.type") == "adapter" or "adapter.type" in metadata


def read_gguf(path: Path) -> GgufFile:
    """Raises FormatError with the offset, or UnsupportedModelError for a tensor type."""
    cursor = _Cursor(map_file(path), path.name)
    start = cursor.take(4, "the magic number")
    if cursor.data[start : start + 4] != b"GGUF":
        cursor.fail("not a GGUF file")
    version = cursor.u32("the version")
    if version not in (2, 3):
        big_endian = version & 0xFFFF == 0 and version != 0
        cursor.fail(
            "a big-endian GGUF file; convert it to little-endian"
            if big_endian
            else f"GGUF version {version} is not supported; supported: 2, 3"
        )
    num_tensors, num_entries = cursor.u64("the tensor count"), cursor.u64("the key-value count")
    for count, item in ((num_tensors, "tensors"), (num_entries, "key-values")):
        if count > _MAX_RECORDS:
            cursor.fail(f"{count:,} {item}, more than the limit of {_MAX_RECORDS:,}")
    entries: dict[str, tuple[int, int]] = {}
    for _ in range(num_entries):
        key = cursor.text("a key", _MAX_KEY_BYTES, "ASCII")
        if key in entries:
            cursor.fail(f"the key {key} appears twice")
        kind = cursor.u32("a value type")
        entries[key] = (kind, cursor.offset)
        cursor.skip_value(kind)
    metadata = Metadata(cursor.data, path.name, entries)
    return GgufFile(path, version, metadata, _read_tensors(cursor, num_tensors, metadata))


class _Record(NamedTuple):
    name: str
    type: int
    shape: tuple[int, ...]  # NumPy order
    offset: int  # from the start of the tensor data


def _read_tensors(cursor: _Cursor, count: int, metadata: Metadata) -> dict[str, StoredTensor]:
    records = {record.name: record for record in (_read_record(cursor) for _ in range(count))}
    if len(records) != count:
        cursor.fail("two tensors have the same name")
    alignment = metadata.integer("general.alignment", 32)
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"alignment {alignment:,} is not a power of two from 8 to {MAX_ALIGNMENT:,}")
    base = -(-cursor.offset // alignment) * alignment
    data = cursor.bytes
    tensors: dict[str, StoredTensor] = {}
    end, last = base, "the header"
    for record in sorted(records.values(), key=lambda record: record.offset):
        type_name = TENSOR_TYPES.get(record.type, "unknown")
        if type_name not in _KNOWN:
            raise UnsupportedModelError(
                f"{cursor.name}: tensor {record.name} has type {record.type} ({type_name}); "
                f"supported: {', '.join(_KNOWN)}"
            )
        stored = FORMATS[type_name]
        if record.shape[-1] % stored.block:
            cursor.fail(
                f"tensor {record.name} has {record.shape[-1]:,} columns, not a multiple "
                f"of the block size {stored.block} of {type_name}"
            )
        nbytes = math.prod(record.shape) // stored.block * stored.nbytes
        start = base + record.offset
        if record.offset % alignment:
            cursor.fail(
                f"tensor {record.name} starts at {record.offset:,}, not a multiple of the "
                f"alignment {alignment}"
            )
        if start < end:
            cursor.fail(f"tensor {record.name} overlaps {last}")
        if nbytes > len(data) - start:
            cursor.fail(
                f"tensor {record.name} ends at {start + nbytes:,}, but the file at {len(data):,}"
            )
        tensors[record.name] = StoredTensor.from_bytes(
            record.name, stored, record.shape, data[start : start + nbytes]
        )
        end, last = start + nbytes, record.name
    return tensors


def _read_record(cursor: _Cursor) -> _Record:
    name = cursor.text("a tensor name", _MAX_NAME_BYTES, "UTF-8")
    num_dims = cursor.u32("a dimension count")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"tensor {name} has {num_dims:,} dimensions, not 1 to {MAX_DIMS}")
    shape = tuple(cursor.u64("a dimension") for _ in range(num_dims))[::-1]
    if 0 in shape or math.prod(shape) > _INT64_MAX // 8:
        cursor.fail(f"tensor {name} has shape {list(shape)}, which is empty or too large")
    return _Record(name, cursor.u32("a tensor type"), shape, cursor.u64("a tensor offset"))
