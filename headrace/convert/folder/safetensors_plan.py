"""The beginning of a safetensors file (huggingface/safetensors): its size, then JSON that says
where each tensor is.
"""

import json
from collections.abc import Sequence

from headrace.convert.tensor_file import Plan, PlannedTensor

_ALIGNMENT = 8
"""Bytes of which the length of the JSON is a multiple, so that tensors are aligned to the largest
number.
"""


def safetensors_plan(tensors: Sequence[PlannedTensor]) -> Plan:
    """The tensors without gaps, in the order that is given, with those of the widest numbers first
    so that each is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: -_WIDTHS.get(tensor.format, 1))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = []
    end = 0
    for tensor in ordered:
        offsets = [end, end + tensor.nbytes]
        entries[tensor.name] = {
            "dtype": tensor.format,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        end += tensor.nbytes
        ends.append(end)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    places = {
        tensor.name: (len(header) + stop - tensor.nbytes, tensor.nbytes)
        for tensor, stop in zip(ordered, ends, strict=True)
    }
    return Plan(header, places, len(header) + end)


_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of a number, by the name of its type; 1 of all others."""
