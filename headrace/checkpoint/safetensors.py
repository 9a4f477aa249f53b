"""safetensors files, single and sharded, memory-mapped.

Layout: header length (u64, little endian), a JSON object `name -> dtype, shape, data_offsets`,
data without gaps, row-major.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.files import list_names, map_file, member, read_json
from headrace.checkpoint.head import is_equal
from headrace.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from headrace.quant.formats import FORMATS, RAW_FORMATS, StoredTensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {name: FORMATS[name] for name in ("F32", "F16", "BF16")} | RAW_FORMATS
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_OTHER_LAYOUT = "consolidated"
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,5})-of-(?P<count>\d{1,5})\.safetensors")
_MAX_SHOWN = 8
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
            raise FormatError(
                f"{path.name}: tensor {name} of {dtype} {list(shape)} is empty; if DeepSpeed "
                "ZeRO-3 trained the model, convert its checkpoint with zero_to_fp32.py"
            )
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
    """Read a file or shards, as transformers chooses them: a single file, then an index.

    Without an index, shards are known by their names (`-00001-of-00002`). Files in Mistral's own
    layout (`consolidated*`) are left alone if there are others. Raises as `read_safetensors`,
    ModelNotFoundError for missing shards, and UnsupportedModelError for pickles.
    """
    files = list_names(folder)
    names = [name for name in files if name.endswith(".safetensors")]
    names = [name for name in names if not name.startswith(_OTHER_LAYOUT)] or names
    indices = [name for name in files if name.endswith(".safetensors.index.json")]
    if _INDEX in files:
        indices = [_INDEX]
    shards: list[str] = []
    shard_of: dict[str, str] = {}
    if _SINGLE in files:
        shards = [_SINGLE]
    elif len(indices) == 1:
        shard_of = _shard_of(folder, indices[0])
        shards = sorted(set(shard_of.values()))
    elif len(names) > 1:
        shards = _numbered(folder, names)
    elif names:
        shards = names
    elif pickles := [name for name in files if name.endswith(_PICKLES)]:
        raise UnsupportedModelError(
            f"{folder.name}: {pickles[0]} is a pickle, which can run code; convert the "
            "model to safetensors"
        )
    else:
        raise ModelNotFoundError(
            f"{folder}: no safetensors file; download the *.safetensors files, or take a "
            "GGUF file of the model"
        )
    return _read_shards(folder, shards, shard_of)


def _shard_of(folder: Path, index: str) -> dict[str, str]:
    shard_of = read_json(member(folder, index), _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(shard_of, dict) or not all(
        isinstance(shard, str) for shard in shard_of.values()
    ):
        raise FormatError(f"{index}: weight_map does not map tensor names to file names")
    return shard_of


def _numbered(folder: Path, names: Sequence[str]) -> list[str]:
    """All shards of the model of which these files are shards. Raises FormatError."""
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    models = {(match["stem"], match["count"]) for match in matches}
    if len(models) != 1:
        raise FormatError(
            f"{folder.name}: several safetensors files but no {_INDEX}: {', '.join(names[:8])}; "
            f"download {_INDEX} too"
        )
    ((stem, count),) = models
    return [
        f"{stem}-{number:0{len(count)}}-of-{count}.safetensors"
        for number in range(1, int(count) + 1)
    ]


def _read_shards(
    folder: Path, shards: Sequence[str], shard_of: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """All tensors of the shards. `shard_of` says which of two tensors with one name counts."""
    paths = {shard: member(folder, shard) for shard in shards}
    if absent := [shard for shard, path in paths.items() if not os.path.lexists(path)]:
        more = f" and {len(absent) - _MAX_SHOWN:,} more" if len(absent) > _MAX_SHOWN else ""
        raise ModelNotFoundError(
            f"{folder}: {len(absent):,} of {len(shards):,} files of the model are missing: "
            f"{', '.join(absent[:_MAX_SHOWN])}{more}; download them into this folder"
        )
    tensors: dict[str, StoredTensor] = {}
    origin: dict[str, str] = {}
    for shard, path in paths.items():
        for name, tensor in read_safetensors(path).items():
            chosen = shard_of.get(name)
            is_known = name in origin and chosen not in (shard, origin[name])
            if is_known and not is_equal(tensors[name], tensor):
                raise FormatError(
                    f"{folder.name}: tensor {name[:100]} is in {origin[name]} and in {shard}; "
                    "remove either file"
                )
            if name not in origin or chosen == shard:
                tensors[name], origin[name] = tensor, shard
    if "tok_embeddings.weight" in tensors:
        raise UnsupportedModelError(
            f"{folder.name}: {origin['tok_embeddings.weight']} has the tensor names of Mistral's "
            "and Meta's own tools; download the model's files for transformers (model*.safetensors)"
        )
    return tensors


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
