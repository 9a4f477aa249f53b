"""safetensors files, single and sharded, memory-mapped.

Layout: header length (u64, little endian), a JSON object `name -> dtype, shape, data_offsets`,
data without gaps, row-major.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.files import find, list_names, map_file, member, read_json
from headrace.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from headrace.quant.formats import FORMATS, RAW_FORMATS, StoredTensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {name: FORMATS[name] for name in ("F32", "F16", "BF16")} | RAW_FORMATS
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_MAX_TENSORS = 65_536
_MAX_INDEX_BYTES = 64 << 20
_MAX_HEADER_BYTES = 6 << 20
"""96 bytes per tensor; the format's own limit of 100 MB would take too much memory."""


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Views of the file by name. Raises FormatError or UnsupportedModelError."""
    mapped = map_file(path)
    size = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or size > len(mapped) - 8:
        raise FormatError(
            f"{path.name}: a header of {size:,} bytes does not fit in the file's {len(mapped):,}"
        )
    if size > _MAX_HEADER_BYTES:
        raise FormatError(
            f"{path.name}: a header of {size:,} bytes, more than the limit of {_MAX_HEADER_BYTES:,}"
        )
    header = _parse_header(mapped[8 : 8 + size], path.name)
    data = np.frombuffer(mapped, np.uint8)[8 + size :]
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1][2]):
        dtype, shape, (start, stop) = entry
        if dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"{path.name}: tensor {name} has dtype {dtype[:32]}; supported: "
                f"{', '.join(_DTYPES)}"
            )
        stored = _DTYPES[dtype]
        if 0 in shape:
            raise FormatError(f"{path.name}: tensor {name} of {dtype} {list(shape)} is empty")
        if start != end or stop - start != math.prod(shape) * stored.nbytes:
            raise FormatError(
                f"{path.name}: tensor {name} of {dtype} {list(shape)} is at bytes {start:,} to "
                f"{stop:,}, expected from {end:,}"
            )
        if stop > len(data):
            raise FormatError(
                f"{path.name}: the data has {len(data):,} bytes, but tensor {name} ends at byte "
                f"{stop:,}; the file is truncated, download it again"
            )
        tensors[name] = StoredTensor.from_bytes(name, stored, shape, data[start:stop])
        end = stop
    if end < len(data):
        raise FormatError(
            f"{path.name}: the data has {len(data):,} bytes, but the tensors end at byte {end:,}"
        )
    return tensors


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Read a file or shards. Raises as `read_safetensors`, and UnsupportedModelError for
    pickles.
    """
    if index := find(folder, _INDEX):
        return _read_shards(folder, index)
    files = list_names(folder)
    names = [name for name in files if name.endswith(".safetensors")]
    if _SINGLE in names:
        names = [_SINGLE]
    if len(names) == 1:
        return read_safetensors(member(folder, names[0]))
    if names:
        raise FormatError(
            f"{folder.name}: several safetensors files but no {_INDEX}: {', '.join(names[:8])}"
        )
    if pickles := [name for name in files if name.endswith(_PICKLES)]:
        raise UnsupportedModelError(
            f"{folder.name}: {pickles[0]} is a pickle, which can run code; convert the "
            "model to safetensors"
        )
    raise ModelNotFoundError(f"{folder}: no safetensors file")


def _read_shards(folder: Path, index: Path) -> dict[str, StoredTensor]:
    shard_of = read_json(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(shard_of, dict) or not all(
        isinstance(shard, str) for shard in shard_of.values()
    ):
        raise FormatError(f"{_INDEX}: weight_map does not map tensor names to file names")
    shards = {
        shard: read_safetensors(member(folder, shard)) for shard in sorted(set(shard_of.values()))
    }
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise FormatError(f"{_INDEX}: tensor {name[:100]} is not in {shard}")
    return {name: shards[shard][name] for name, shard in shard_of.items()}


_Entry = tuple[str, tuple[int, ...], tuple[int, int]]


def _parse_header(header: bytes, file_name: str) -> dict[str, _Entry]:
    # Values take far more memory than their JSON, so count them before any is built.
    if header.count(b"{") > _MAX_TENSORS + 2 or header.count(b",") > 16 * _MAX_TENSORS:
        raise FormatError(f"{file_name}: more than the limit of {_MAX_TENSORS:,} tensors")
    try:
        parsed = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file_name}: the header is not valid: {error}") from error
    if not isinstance(parsed, dict):
        raise FormatError(f"{file_name}: the header is not a JSON object; download it again")
    parsed.pop("__metadata__", None)
    return {name: _entry(value, name, file_name) for name, value in parsed.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _entry(value: Any, name: str, file_name: str) -> _Entry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if (
            len(value) == 3
        ):
            sizes = (*shape, start, stop)
            if (
                all(type(size) is int and 0 <= size < 2**63 for size in sizes)
                and start <= stop
                and len(shape) <= 8
            ):
                return dtype, tuple(shape), (start, stop)
    raise FormatError(
        f"{file_name}: the entry of tensor {name[:100]} is not a dtype, a shape and two "
        "ascending offsets"
    )
