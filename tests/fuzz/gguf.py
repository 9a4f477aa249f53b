"""GGUF files: opened, tensors checked, tokenizer built and used, small tensors read."""

import random
from functools import cache

from headrace.checkpoint.load import open_checkpoint
from tests.fuzz.files import scratch, tiny_gguf, use_tokenizer
from tests.fuzz.mutate import mutate_bytes


@cache
def valid_inputs() -> list[tuple[bytes, int]]:
    """Contents of valid files, and the ends of their headers."""
    contents = [
        tiny_gguf(kind, sentencepiece) for kind, sentencepiece in (("Q4_0", False), ("Q8_0", True))
    ]
    return [(content, content.index(b"blk.1.ffn_down.weight") + 100) for content in contents]


def case(rng: random.Random) -> bytes:
    content, header = rng.choice(valid_inputs())
    return mutate_bytes(rng, content, header)


def run(case: bytes) -> None:
    path = scratch() / "tiny.gguf"
    path.write_bytes(case)
    checkpoint = open_checkpoint(path)
    for name in ("norm", "layers.0.attn_norm", "layers.1.k"):
        checkpoint.tensors[name].dequantise()
    use_tokenizer(checkpoint.load_tokenizer())
