"""GGUF models in several files (llama.cpp, `gguf-split`), and the GGUF model of a folder.

Parts are named `NAME-00001-of-00003.gguf`. The first part has the metadata. Each part has its
number, from 0, the number of parts, and the number of all tensors.
"""

import os
import re
from pathlib import Path

from headrace.checkpoint.files import list_names
from headrace.checkpoint.gguf import GgufFile, read_gguf
from headrace.errors import FormatError, ModelNotFoundError
from headrace.quant.formats import StoredTensor

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_PROJECTOR = "mmproj"
"""Start of the names of vision towers for llama.cpp."""
_MAX_SHOWN = 8


def part_names(name: str) -> list[str]:
    """The names of all parts of the model with the part `name`; itself if it has no number."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    numbers = range(1, int(match["count"]) + 1)
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in numbers]


def read_gguf_model(path: Path) -> GgufFile:
    """Read a file, or all parts of the model of which it is a part.

    Raises as `read_gguf`, and ModelNotFoundError for missing parts.
    """
    file = read_gguf(path)
    count = file.metadata.integer("split.count", 1)
    if count <= 1:
        return file
    names = part_names(path.name)
    if len(names) != count:
        raise FormatError(
            f"{path.name}: the file is a part of a model with {count:,} parts, and its name must "
            f"end in -00001-of-{count:05}.gguf, with its number; rename the parts"
        )
    folder = path.parent
    if absent := [name for name in names if not os.path.lexists(folder / name)]:
        more = f" and {len(absent) - _MAX_SHOWN:,} more" if len(absent) > _MAX_SHOWN else ""
        raise ModelNotFoundError(
            f"{folder}: {len(absent):,} of {count:,} parts of the model are missing: "
            f"{', '.join(absent[:_MAX_SHOWN])}{more}; download all parts into one folder"
        )
    parts = [file if name == path.name else read_gguf(folder / name) for name in names]
    return _joined(parts)


def gguf_of_folder(folder: Path) -> Path | None:
    """A file of the only GGUF model in a folder; None if there is no such file.

    Raises ModelNotFoundError if there are several models.
    """
    models = {
        tuple(part_names(name)): name
        for name in reversed(list_names(folder))
        if name.endswith(".gguf") and not name.startswith(_PROJECTOR)
    }
    if len(models) > 1:
        names = sorted(models.values())
        raise ModelNotFoundError(
            f"{folder}: {len(names):,} GGUF models; name the file of one, for example "
            f"{', '.join(names[:_MAX_SHOWN])}"
        )
    return folder / next(iter(models.values())) if models else None


def _joined(parts: list[GgufFile]) -> GgufFile:
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        metadata, name = part.metadata, part.path.name
        found = metadata.integer("split.no"), metadata.integer("split.count")
        if found != (number, len(parts)):
            raise FormatError(
                f"{name}: the file is part {found[0]} (from 0) of {found[1]:,}, but its name says "
                f"part {number} of {len(parts):,}; download the parts again"
            )
        if double := sorted(part.tensors.keys() & tensors.keys()):
            raise FormatError(f"{name}: tensor {double[0]} is in another part, too")
        tensors |= part.tensors
    for part in parts:
        total = part.metadata.integer("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise FormatError(
                f"{part.path.name}: the model has {total:,} tensors, but its parts have "
                f"{len(tensors):,}; the parts are not of one model, so download them again"
            )
    first = parts[0]
    return GgufFile(first.path, first.version, first.metadata, tensors)
