"""Adapters of PEFT and mlx-lm: configuration, tensor names and shapes, read for a small model, and
made into weights.
"""

import json
import math
import random
from functools import cache
from typing import Any

import numpy as np

from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.program.adapter import Adapter, OwnWeight
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
_OWN = _CONFIG | {
    "use_dora": True,
    "bias": "lora_only",
    "modules_to_save": ["norm", "lm_head"],
    "trainable_token_indices": {"embed_tokens": [1, 5]},
    "ensure_weight_tying": False,
}
_MLX = {
    "fine_tune_type": "dora",
    "num_layers": 2,
    "lora_parameters": {"rank": 4, "scale": 20.0, "keys": ["self_attn.q_proj"]},
}


def _peft(layers: int, magnitudes: bool) -> dict[str, list[int]]:
    shapes = {}
    for layer in range(layers):
        for module, (rows, cols) in _MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            shapes |= {f"{name}A.weight": [4, cols], f"{name}B.weight": [rows, 4]}
            if magnitudes:
                shapes[f"{name}magnitude_vector"] = [rows]
    return shapes


ORIGINALS: list[dict[str, Any]] = [
    {"config": _CONFIG, "tensors": _peft(2, magnitudes=False)},
    {
        "config": _OWN,
        "tensors": _peft(1, magnitudes=True)
        | {
            "base_model.model.lm_head.weight": [300, 32],
            "base_model.model.model.norm.modules_to_save.default.weight": [32],
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": [32],
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": [2, 32],
        },
    },
    {
        "config": _CONFIG,
        "tensors": {
            "base_model.model.model.embed_tokens.lora_embedding_A": [4, 300],
            "base_model.model.model.embed_tokens.lora_embedding_B": [32, 4],
            "base_model.model.model.embed_tokens.base_layer.weight": [300, 32],
        },
    },
    {
        "config": _MLX,
        "tensors": {
            "model.layers.0.self_attn.q_proj.lora_a": [32, 4],
            "model.layers.0.self_attn.q_proj.lora_b": [4, 32],
            "model.layers.0.self_attn.q_proj.m": [32],
            "model.layers.1.mlp.down_proj.weight": [32, 48],
        },
    },
]
_EXTRA = ["all", "pissa", {"q_proj": 2}, {"(a*)*b": 1}, [4, 32], [32, 4], [2000, 32], [1, 1], True]
_MAX_NUMBERS = 1 << 20
"""Maximum numbers of a written tensor."""


def case(rng: random.Random) -> bytes:
    return mutate_json(rng, rng.choice(ORIGINALS), _EXTRA)


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
        arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        for name in ("adapter_model.safetensors", "adapters.safetensors"):
            save_file(arrays, path / name)
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
    make_weights(read_adapter(path, checkpoint().spec))


def make_weights(adapter: Adapter) -> None:
    """Make each weight of the adapter's own from the model's."""
    tensors = checkpoint().tensors
    for name, change in adapter.items():
        if isinstance(change, OwnWeight):
            made = change.make(name, tensors.get("embed" if name == "head" else name))
            made.dequantise()


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 4
        and all(type(size) is int and 0 < size <= _MAX_NUMBERS for size in value)
    )


@cache
def checkpoint() -> Checkpoint:
    return open_checkpoint(folder("adapted"))
