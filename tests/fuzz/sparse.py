"""2:4 layers of compressed-tensors: parts of other types and shapes, and other masks."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save

from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.safetensors import read_safetensors
from tests.fuzz.files import scratch
from tests.fuzz.mutate import mutate_bytes, mutate_json

_EXTRA = ["BF16", "F16", "I8", "U8", "I16", "I32", "I64", "F8_E4M3", [2, 1], [6, 24], [6, 32]]
_LAYERS = {"f16": 0, "int8g": 0, "marlin4g": 4, "marlin8": 3}
"""Layers of the test file whose types NumPy has, and the number of their configuration."""


def _config(sparsity: dict[str, Any] | None, layout: str, bits: int = 8) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": bits, "strategy": "group"}}}
    fields = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    return fields | ({"sparsity_config": sparsity} if sparsity else {})


CONFIGS = [
    _config({"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}, "int-quantized"),
    _config({"format": "sparse-bitmask"}, "int-quantized"),
    _config({"format": "dense", "sparsity_structure": "2:4"}, "int-quantized"),
    _config(None, "marlin-24"),
    _config(None, "marlin-24", 4),
]


@cache
def valid_inputs() -> list[tuple[int, bytes]]:
    """Files with one layer each, and the numbers of their configurations."""
    path = Path(__file__).parents[1] / "data/sparse_24.safetensors"
    with safe_open(path, "numpy") as file:
        names = file.keys()
        layers = {
            layer: {name: file.get_tensor(name) for name in names if name.startswith(f"{layer}.")}
            for layer in _LAYERS
        }
    return [(_LAYERS[layer], save(parts)) for layer, parts in layers.items()]


def case(rng: random.Random) -> bytes:
    number, content = rng.choice(valid_inputs())
    if rng.random() < 0.2:
        number = rng.randrange(len(CONFIGS))
    header = 8 + int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        content = mutate_bytes(rng, content, header)
    else:
        changed = mutate_json(rng, json.loads(content[8:header]), _EXTRA)
        content = len(changed).to_bytes(8, "little") + changed + content[header:]
    return bytes([number]) + content


def run(case: bytes) -> None:
    path = scratch() / "sparse.safetensors"
    path.write_bytes(case[1:])
    config = CONFIGS[case[0] % len(CONFIGS) if case else 0]
    found = method_of(config).assemble(config, read_safetensors(path), path.name)
    for tensor in found.values():
        if tensor.format.spec is not None and tensor.format.spec.is_sparse:
            tensor.dequantise()
