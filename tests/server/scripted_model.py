"""A tiny GPT-2 that says given texts: its next token depends on the position alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.checkpoint.conftest import byte_alphabet, element_type, value_type

END = "<|im_end|>"
_FIRST = 16
"""Length of the shortest prompt."""
_HEAD_DIM = _FFN = 32
_NORMAL, _CONTROL = 1, 3


class ScriptedModel:
    """A GGUF file. A prompt of `starts[i]` bytes makes the model say `texts[i]`."""

    def __init__(
        self,
        path: Path,
        texts: Sequence[str],
        *,
        control_tokens: Sequence[str] = (),
        ends: Sequence[str] = (END,),
        template: str = "",
    ) -> None:
        """Write the file. Texts that have none of `ends` at their end get the first one."""
        controls = list(dict.fromkeys([*ends, *control_tokens]))
        tokens = [*byte_alphabet(), "!!", *controls]
        scripts = [
            _split(text if text.endswith(tuple(ends)) else text + ends[0], controls)
            for text in texts
        ]
        # The last token of a prompt of n bytes has position n - 1.
        self.starts = [_FIRST + sum(map(len, scripts[:i])) for i in range(len(scripts))]
        self.lengths = [len(script) for script in scripts]
        """Tokens of each text, with its end."""
        self.path = path

        said = [0] * (_FIRST - 1)
        said += [tokens.index(token) for script in scripts for token in script]
        context = dim = -(-(1 + len(said)) // 32) * 32
        values = {
            "general.name": "scripted",
            "gpt2.block_count": 1,
            "gpt2.context_length": context,
            "gpt2.embedding_length": dim,
            "gpt2.feed_forward_length": _FFN,
            "gpt2.attention.head_count": 1,
            "gpt2.attention.key_length": _HEAD_DIM,
            "gpt2.attention.value_length": _HEAD_DIM,
            "gpt2.attention.layer_norm_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [_NORMAL] * 257 + [_CONTROL] * len(controls),
            "tokenizer.ggml.merges": ["! !"],
            "tokenizer.ggml.eos_token_id": tokens.index(ends[0]),
            "tokenizer.chat_template": template,
        }
        _write(path, values, said, dim, len(tokens))


def _split(text: str, controls: Sequence[str]) -> list[str]:
    """Split a text into control tokens and the characters of its bytes."""
    alphabet = byte_alphabet()
    tokens: list[str] = []
    while text:
        control = next(filter(text.startswith, sorted(controls, key=len, reverse=True)), None)
        tokens += [control] if control else [alphabet[byte] for byte in text[0].encode()]
        text = text[len(control or text[0]) :]
    return tokens


def _write(path: Path, values: dict[str, Any], said: list[int], dim: int, vocab: int) -> None:
    """Write a model without attention, in which position i predicts the token `said[i]`."""
    head = np.zeros((vocab, dim), np.float32)
    head[said, np.arange(len(said))] = 30.0  # certain at any usual temperature
    norms = {f"{name}.weight": np.ones(dim) for name in ("output_norm", "blk.0.attn_norm")}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, dim),
        "output_norm.bias": (dim,),
        "blk.0.attn_norm.bias": (dim,),
        "blk.0.attn_qkv.weight": (3 * _HEAD_DIM, dim),
        "blk.0.attn_qkv.bias": (3 * _HEAD_DIM,),
        "blk.0.attn_output.weight": (dim, _HEAD_DIM),
        "blk.0.attn_output.bias": (dim,),
        "blk.0.ffn_norm.weight": (dim,),
        "blk.0.ffn_norm.bias": (dim,),
        "blk.0.ffn_up.weight": (_FFN, dim),
        "blk.0.ffn_up.bias": (_FFN,),
        "blk.0.ffn_down.weight": (dim, _FFN),
        "blk.0.ffn_down.bias": (dim,),
    }
    tensors = {name: np.zeros(shape) for name, shape in shapes.items()} | norms
    tensors |= {"position_embd.weight": np.eye(dim), "output.weight": head}

    writer = gguf.GGUFWriter(path, "gpt2")
    for key, value in values.items():
        writer.add_key_value(key, value, value_type(value), *element_type(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
