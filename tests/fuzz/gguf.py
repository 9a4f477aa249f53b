"""GGUF files: opened, tensors checked, tokenizer built and used, small tensors read."""

import random
from functools import cache

import numpy as np

from headrace.checkpoint.load import open_checkpoint
from tests.fuzz.files import scratch, tiny_gguf, use_tokenizer
from tests.fuzz.mutate import mutate_bytes

_SCALES = {
    "blk.1.ffn_up.scale": np.array([0.5], np.float32),
    "blk.1.ffn_up.input_scale": np.array([2.0], np.float32),
}


@cache
def valid_inputs() -> list[tuple[bytes, int]]:
    """Contents of valid files, and the ends of their headers."""
    kinds = (("Q4_0", False, {}), ("Q8_0", True, {}), ("F32", False, _SCALES))
    contents = [tiny_gguf(kind, sentencepiece, weights) for kind, sentencepiece, weights in kinds]
    return [(content, content.index(b"blk.1.ffn_down.weight") + 100) for content in contents]


def case(rng: random.Random) -> bytes:
    content, header = rng.choice(valid_inputs())
    return mutate_bytes(rng, content, header)


def run(case: bytes) -> None:
    path = scratch() / "tiny.gguf"
    path.write_bytes(case)
    checkpoint = open_checkpoint(path)
    for name in ("norm", "layers.0.attn_norm", "layers.1.k", "layers.1.up"):
        checkpoint.tensors[name].dequantise()
    use_tokenizer(checkpoint.load_tokenizer())
