"""Vocabularies of GGUF files: odd tokens, types and ids, names of end tokens, control tokens."""

import json
import random
from functools import cache
from typing import Any

import numpy as np

from headrace.checkpoint.end_tokens import END_TOKENS
from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.tokenizer_gguf import END_LIST, tokenizer_from_gguf
from headrace.convert.gguf.header import gguf_file_layout, raw
from tests.checkpoint.conftest import byte_alphabet, sentencepiece_parts
from tests.fuzz.files import scratch, use_tokenizer

_PREFIX = "tokenizer.ggml."
_KEYS = ("bos", "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep", "unknown", "padding")
_NAMES = [*END_TOKENS, "", "<unk>", "<0x41>", "\u2581", " ", "a", "<|im_start|>", "\0", "[EMPTY_0]"]
_IDS = [0, 1, 2, 100, 263, 264, 699, 700, 2**31, 2**32 - 1]


@cache
def valid_inputs() -> list[dict[str, Any]]:
    """Values of a byte-level and of a SentencePiece vocabulary."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "ll"]
    byte_level = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 3] + [1] * 258,
        "merges": ["h e", "l l"],
    }
    values = sentencepiece_parts()["change"]
    given = {key: value for key, value in values.items() if value is not None}
    return [{f"{_PREFIX}{key}": value for key, value in byte_level.items()}, given]


def case(rng: random.Random) -> bytes:
    values = dict(rng.choice(valid_inputs()))
    tokens, types = list(values[f"{_PREFIX}tokens"]), list(values[f"{_PREFIX}token_type"])
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(tokens))
        match rng.randrange(6):
            case 0 | 1:
                tokens[at], types[at] = rng.choice(_NAMES), rng.choice([1, 3, 4, 5])
            case 2:
                types[at] = rng.randint(-1, 7)
            case 3:
                tokens[at], types[at] = rng.choice(tokens), rng.choice([1, 3, 5, 5, 5])
            case 4:
                values[f"{_PREFIX}{rng.choice(_KEYS)}_token_id"] = rng.choice(_IDS)
            case 5:
                values[END_LIST] = rng.choices(_IDS[:-2], k=rng.randint(1, 3))
    values |= {f"{_PREFIX}tokens": tokens, f"{_PREFIX}token_type": types}
    values["general.name"] = rng.choice(["tiny", "Phi-3 mini", "\u2581"])
    values["tokenizer.chat_template"] = rng.choice(["", *END_TOKENS])
    if rng.random() < 0.3:
        values[f"{_PREFIX}add_bos_token"] = rng.random() < 0.5
    return json.dumps(values).encode()


def run(case: bytes) -> None:
    values = {
        key: np.array(value, np.float32 if key.endswith("scores") else np.int32)
        if isinstance(value, list) and not isinstance(value[0], str)
        else value
        for key, value in json.loads(case).items()
    }
    path = scratch() / "vocabulary.gguf"
    layout = gguf_file_layout({key: raw(value) for key, value in values.items()}, [])
    path.write_bytes(layout.header)
    metadata = read_gguf(path).metadata
    tokenizer = tokenizer_from_gguf(metadata)
    use_tokenizer(tokenizer)

    assert tokenizer.eos_ids <= set(range(tokenizer.vocab_size))
    if END_LIST in metadata:
        assert tokenizer.eos_ids >= set(values[END_LIST].tolist())
