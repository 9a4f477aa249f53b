"""Specifications of known models, read from configurations without weights."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.checkpoint.dummy import open_dummy_checkpoint
from headrace.model.spec import ModelSpec

LLAMA_8B_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LLAMA_2_7B_CONFIG = LLAMA_8B_CONFIG | {
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_70B_CONFIG = LLAMA_8B_CONFIG | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def _spec(config: dict[str, Any]) -> ModelSpec:
    with TemporaryDirectory() as folder:
        return open_dummy_checkpoint(write_config(Path(folder), config)).spec


LLAMA_8B = _spec(LLAMA_8B_CONFIG)
