"""Adapters in GGUF files, read for a small model and made into weights."""

import random
from functools import cache

import gguf
import numpy as np

from headrace.checkpoint.adapter import read_adapter
from tests.fuzz.adapter import checkpoint, make_weights
from tests.fuzz.files import scratch
from tests.fuzz.mutate import mutate_bytes

_SHAPES = {
    "blk.0.attn_q.weight": (32, 32),
    "blk.1.ffn_down.weight": (32, 48),
    "token_embd.weight": (32, 300),
}
"""Rows and columns of the adapted weights."""


@cache
def valid_input() -> bytes:
    path = scratch() / "valid-adapter.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, (rows, cols) in _SHAPES.items():
        is_embedding = name.startswith("token_embd")
        down = (cols, 4) if is_embedding else (4, cols)
        writer.add_tensor(f"{name}.lora_a", np.ones(down, np.float32))
        writer.add_tensor(f"{name}.lora_b", np.ones((rows, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def case(rng: random.Random) -> bytes:
    content = valid_input()
    return mutate_bytes(rng, content, content.index(b"token_embd.weight.lora_b") + 60)


def run(case: bytes) -> None:
    path = scratch() / "adapter.gguf"
    path.write_bytes(case)
    make_weights(read_adapter(path, checkpoint().spec))
