"""The header of a safetensors file."""

import json
from collections.abc import Sequence

from headrace.convert.tensor_writer import ByteRange, FileLayout, PlannedTensor

_ALIGNMENT = 8
_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def safetensors_layout(tensors: Sequence[PlannedTensor]) -> FileLayout:
    """Lay out tensors without gaps, wide numbers first, which aligns all."""
    ordered = sorted(tensors, key=lambda tensor: -_WIDTHS.get(tensor.format, 1))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets = []
    end = 0
    for tensor in ordered:
        entries[tensor.name] = {
            "dtype": tensor.format,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        offsets.append(end)
        end += tensor.nbytes

    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    places = {
        tensor.name: ByteRange(len(header) + offset, tensor.nbytes)
        for tensor, offset in zip(ordered, offsets, strict=True)
    }
    return FileLayout(header, places, len(header) + end)
