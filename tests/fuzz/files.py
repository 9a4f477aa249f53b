"""Shared parts of targets that read files: valid files, a scratch folder, the use of a
tokenizer.
"""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.checkpoint.tokenizer import Tokenizer
from tests.checkpoint.conftest import sentencepiece_parts, write_tiny_gguf

TEXTS = ["", "Hello, wörld! <|im_end|> 12 \t\n", "aaaa\u0301 ▁ 日本語 👩‍👩‍👧 \0 <s></s> ﬃ"]


@cache
def scratch() -> Path:
    """A folder of this process, in memory if possible."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tiny_gguf(kind: str, sentencepiece: bool, weights: dict[str, Any] | None = None) -> bytes:
    """The content of a small model with weights of that format, and further tensors."""
    path = scratch() / "valid.gguf"
    parts = sentencepiece_parts() if sentencepiece else {}
    parts["weights"] = {**(parts.get("weights") or {}), **(weights or {})}
    write_tiny_gguf(path, kind=kind, **parts)
    return path.read_bytes()


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300,
    "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 2],
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}  # noqa: E501
    | {"original_max_position_embeddings": 64},
}  # fmt: skip
"""A small model with the weights of `folder`, from which other families differ little."""


def tensors(quantised: bool = False) -> dict[str, NDArray[Any]]:
    """The weights of `CONFIG` by Hugging Face's names; `quantised` as int8 with a scale
    per row.
    """
    dim, ffn, kv = (
        CONFIG["hidden_size"],
        CONFIG["intermediate_size"],
        CONFIG["num_key_value_heads"] * CONFIG["head_dim"],
    )
    shapes = {"q_proj": (dim, dim), "k_proj": (kv, dim), "v_proj": (kv, dim), "o_proj": (dim, dim)}
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    shapes |= {"mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim), "mlp.down_proj": (dim, ffn)}
    made: dict[str, NDArray[Any]] = {
        "model.embed_tokens.weight": np.ones((CONFIG["vocab_size"], dim), np.float16)
    }
    made["model.norm.weight"] = np.ones(dim, np.float32)
    for i in range(CONFIG["num_hidden_layers"]):
        made |= {
            f"model.layers.{i}.{name}_layernorm.weight": np.ones(dim, np.float32)
            for name in ("input", "post_attention")
        }
        for name, shape in shapes.items():
            made[f"model.layers.{i}.{name}.weight"] = np.ones(
                shape, np.int8 if quantised else np.float16
            )
            if quantised:
                made[f"model.layers.{i}.{name}.weight_scale"] = np.ones((shape[0], 1), np.float32)
    return made


@cache
def folder(name: str, quantised: bool = False) -> Path:
    """A folder of a small model without a tokenizer."""
    path = scratch() / name
    path.mkdir()
    save_file(tensors(quantised), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """Encode and decode some texts in all ways."""
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special=special, parse_special=special)
            tokenizer.decode(ids[:1000], skip_special=not special)
        tokenizer.has_control_token(text)
        for border in (0, 1, len(text) // 2):
            segments = [(text[:border], True), (text[border:], False), (text, True)]
            tokenizer.decode(tokenizer.encode_segments(segments)[:1000])
    for token in (0, 1, tokenizer.vocab_size - 1, tokenizer.vocab_size, 2**31, -1):
        tokenizer.token_bytes(token)
    json.dumps([tokenizer.bos_token, tokenizer.eos_token, sorted(tokenizer.eos_ids)])
