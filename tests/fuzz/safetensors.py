"""safetensors files: headers changed as JSON and as bytes, and all other bytes."""

import json
import random
from functools import cache

from headrace.checkpoint.safetensors import read_safetensors
from tests.fuzz.files import folder, scratch
from tests.fuzz.mutate import mutate_bytes, mutate_json

_EXTRA = [
    "F32",
    "F16",
    "BF16",
    "I8",
    "F8_E4M3",
    [0, 16],
    [2**62, 8],
    {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
]


@cache
def valid_input() -> tuple[bytes, int]:
    """The content of a valid file, and the end of its header."""
    content = (folder("plain") / "model.safetensors").read_bytes()
    return content, 8 + int.from_bytes(content[:8], "little")


def case(rng: random.Random) -> bytes:
    content, header = valid_input()
    if rng.random() < 0.5:
        return mutate_bytes(rng, content, header)
    changed = mutate_json(rng, json.loads(content[8:header]), _EXTRA)
    return len(changed).to_bytes(8, "little") + changed + content[header:]


def run(case: bytes) -> None:
    path = scratch() / "made.safetensors"
    path.write_bytes(case)
    for tensor in read_safetensors(path).values():
        if not tensor.format.name.startswith("I"):
            tensor.dequantise()
