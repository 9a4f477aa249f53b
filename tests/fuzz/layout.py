"""Folders with changed names of files and tensors, and a multimodal configuration."""

import json
import random
from typing import Any

import numpy as np

from headrace.checkpoint.load import open_checkpoint
from headrace.errors import FormatError
from headrace.model import trace_model
from tests.fuzz.files import CONFIG, save_file, scratch, tensors
from tests.fuzz.mutate import mutate_json

_HEAD = "lm_head.weight"
_WHOLE = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "tie_word_embeddings": True,
    "text_config": {key: value for key, value in CONFIG.items() if key != "architectures"},
    "vision_config": {"hidden_size": 4},
}
_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
_INDEX = {"weight_map": {"model.norm.weight": _SHARDS[0], _HEAD: _SHARDS[1]}}
_EXTRA = [
    "model.",
    "model.language_model.",
    "language_model.model.",
    _HEAD,
    "consolidated.safetensors",
    "model.safetensors",
    "model-00001-of-99999.safetensors",
    "model-1-of-1.safetensors",
    "mistral",
    "gemma3_text",
    "qwen2_vl",
    {"type": "mrope", "mrope_section": [1, 1, 2]},
]


def case(rng: random.Random) -> bytes:
    layout = {
        "prefix": rng.choice(["", "model.", "language_model.model.", "model.language_model."]),
        "head": rng.choice(["", _HEAD, "language_model.lm_head.weight"]),
        "files": _SHARDS,
        "config": rng.choice([CONFIG, _WHOLE]),
        "index": rng.choice([None, _INDEX]),
    }
    return mutate_json(rng, layout, _EXTRA)


def run(case: bytes) -> None:
    match _parsed(case):
        case {"prefix": str(prefix), "head": str(head), "files": [*files], **others} if (
            prefix + head
        ).isascii():
            pass
        case _:
            raise FormatError("not a layout")
    folder = scratch() / "layout"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    made = {prefix + name.removeprefix("model."): values for name, values in tensors().items()}
    if head:
        made[head] = np.ones((CONFIG["vocab_size"], CONFIG["hidden_size"]), np.float16)
    plain = [name for name in map(str, files) if name.isascii() and name.isprintable()]
    for i, name in enumerate(plain[:4]):
        if "/" not in name and 2 < len(name) < 200:
            save_file(dict(list(made.items())[i::2]), folder / name)
    (folder / "config.json").write_text(json.dumps(others.get("config")))
    if index := others.get("index"):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(folder)
    trace_model(checkpoint.spec, checkpoint.tensors)


def _parsed(case: bytes) -> Any:
    try:
        return json.loads(case)
    except (ValueError, RecursionError):
        return None
