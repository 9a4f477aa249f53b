"""LoRA adapters: configuration, tensor names and shapes, read for a small model."""

import json
import math
import random
from functools import cache
from typing import Any

import numpy as np

from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.load import open_checkpoint
from headrace.model.spec import ModelSpec
from tests.fuzz.files import folder, save_file, scratch
from tests.fuzz.mutate import mutate_json

_MODULES = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (16, 32), "mlp.down_proj": (32, 48)}
_CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "use_rslora": False,
    "alpha_pattern": {"v_proj": 3},
    "init_lora_weights": True,
}
ORIGINAL: dict[str, Any] = {
    "config": _CONFIG,
    "tensors": {
        f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight": shape
        for layer in range(2)
        for module, (rows, cols) in _MODULES.items()
        for half, shape in (("A", [4, cols]), ("B", [rows, 4]))
    },
}
_EXTRA = ["all", "pissa", {"q_proj": 2}, {"(a*)*b": 1}, [4, 32], [32, 4], [2000, 32], [1, 1], True]
_MAX_NUMBERS = 1 << 20
"""Maximum numbers of a written tensor."""


def case(rng: random.Random) -> bytes:
    return mutate_json(rng, ORIGINAL, _EXTRA)


def run(case: bytes) -> None:
    path = scratch() / "adapter"
    path.mkdir(exist_ok=True)
    try:
        found = json.loads(case)
        config, tensors = found["config"], found["tensors"].items()
        shapes = {
            name: shape
            for name, shape in tensors
            if _is_shape(shape) and math.prod(shape) <= _MAX_NUMBERS
        }
        save_file(
            {name: np.zeros(shape, np.float32) for name, shape in shapes.items()},
            path / "adapter_model.safetensors",
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        UnicodeError,
        RecursionError,
    ):  # not what this target is for
        config = None
    (path / "adapter_config.json").write_bytes(
        case if config is None else json.dumps(config).encode()
    )
    read_adapter(path, _spec())


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 4
        and all(type(size) is int and 0 < size <= _MAX_NUMBERS for size in value)
    )


@cache
def _spec() -> ModelSpec:
    return open_checkpoint(folder("adapted")).spec
