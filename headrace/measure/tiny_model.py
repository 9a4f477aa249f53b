"""A tiny model with random weights, as a folder that every entry point of the engine reads."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_DIM = 64
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _DIM,
    "intermediate_size": _DIM,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, vocab: int) -> None:
    """Write a model of one layer with `vocab` tokens."""
    (folder / "config.json").write_text(json.dumps(_CONFIG | {"vocab_size": vocab}))
    vocabulary = {chr(ord("!") + i): i for i in range(93)}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    bpe = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": bpe})
    )
    rng = np.random.default_rng(0)
    layer = "model.layers.0."
    square = [f"{layer}self_attn.{part}_proj.weight" for part in "qkvo"]
    square += [f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    norms = [f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"]
    tensors: dict[str, NDArray[np.float32]] = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, _DIM), np.float32),
        **{name: rng.standard_normal((_DIM, _DIM), np.float32) for name in square},
        **{name: np.ones(_DIM, np.float32) for name in (*norms, "model.norm.weight")},
    }
    (folder / "model.safetensors").write_bytes(_safetensors(tensors))


def _safetensors(tensors: dict[str, NDArray[np.float32]]) -> bytes:
    """The bytes of a safetensors file: length of the header, header, data."""
    header, end = {}, 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {
            "dtype": "F32",
            "shape": values.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    return len(text).to_bytes(8, "little") + text + data
