"""`config.json` of every family and of a quantised model, opened with fitting weights
and traced.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.assemble import stored_shapes
from headrace.checkpoint.load import open_checkpoint
from headrace.model import FAMILIES, trace_model
from headrace.model.fields import JsonFields
from tests.families import VARIANTS, config_of
from tests.fuzz.files import CONFIG, folder, save_file, scratch
from tests.fuzz.mutate import mutate_json

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
    "beta_fast": 32,
    "beta_slow": 1,
}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "weights": _INT8,
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
ORIGINALS: list[dict[str, Any]] = [
    CONFIG,
    CONFIG
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 16,
        "rope_parameters": None,
    },
    CONFIG
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        "rope_scaling": _YARN,
    },
    CONFIG | {"quantization_config": _QUANTISED},
]
_EXTRA = [
    "linear",
    "dynamic",
    "longrope",
    "sliding_attention",
    {"rope_type": "linear", "factor": 2.0},
    _YARN,
    "MistralForCausalLM",
    "gelu",
]
_VARIANT = b"variant "
"""The first bytes of a case with the weights of a variant; its name and, on the next
line, the configuration follow.
"""


def case(rng: random.Random) -> bytes:
    if rng.randrange(4) == 0:
        return mutate_json(rng, rng.choice(ORIGINALS), _EXTRA)
    name = rng.choice([*VARIANTS])
    return _VARIANT + name.encode() + b"\n" + mutate_json(rng, _variant_config(name), _EXTRA)


def run(case: bytes) -> None:
    if case.startswith(_VARIANT):
        first, _, case = case.partition(b"\n")
        path = _variant_folder(first.removeprefix(_VARIANT).decode())
    else:
        quantised = b"quantization_config" in case
        path = folder("quantised" if quantised else "plain", quantised)
    (path / "config.json").write_bytes(case)
    checkpoint = open_checkpoint(path)
    trace_model(checkpoint.spec, checkpoint.tensors)


@cache
def _variant_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(config_of(name).to_json_string(use_diff=False))
    return config | {"architectures": [VARIANTS[name].model]}


@cache
def _variant_folder(name: str) -> Path:
    """A folder with weights of a variant, all zero, by its layout's names."""
    family = FAMILIES[VARIANTS[name].family]
    assert family.config
    spec = family.config.spec(JsonFields(_variant_config(name), name).named(family.config.fields))
    shapes = stored_shapes(spec, family.config)
    path = scratch() / f"variant-{name}"
    path.mkdir()
    save_file(
        {name: np.zeros(shape, np.float16) for name, shape in shapes.items()},
        path / "model.safetensors",
    )
    return path
