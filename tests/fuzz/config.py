"""`config.json` of three families and of a quantised model, opened with weights that fit what it said, and traced."""

import random
from typing import Any

from headrace.checkpoint.load import open_checkpoint
from headrace.model import trace_model
from tests.fuzz.files import CONFIG, folder
from tests.fuzz.mutate import mutate_json

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4, "beta_fast": 32, "beta_slow": 1}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": _INT8, "input_activations": _INT8 | {"strategy": "token", "dynamic": True}}},
}
ORIGINALS: list[dict[str, Any]] = [
    CONFIG,
    CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16, "rope_parameters": None},
    CONFIG | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False, "rope_scaling": _YARN},
    CONFIG | {"quantization_config": _QUANTISED},
]
_EXTRA = ["linear", "dynamic", "longrope", "sliding_attention", {"rope_type": "linear", "factor": 2.0}, _YARN, "MistralForCausalLM", "gelu"]


def case(rng: random.Random) -> bytes:
    return mutate_json(rng, rng.choice(ORIGINALS), _EXTRA)


def run(case: bytes) -> None:
    quantised = b"quantization_config" in case
    path = folder("quantised" if quantised else "plain", quantised)
    (path / "config.json").write_bytes(case)
    checkpoint = open_checkpoint(path)
    trace_model(checkpoint.spec, checkpoint.tensors)
