"""What the targets that read files have in common: valid files to begin with, a folder to write to, and the use of a tokenizer."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from headrace.checkpoint.tokenizer import Tokenizer
from tests.checkpoint.conftest import sentencepiece_parts, write_tiny_gguf

TEXTS = ["", "Hello, wörld! <|im_end|> 12 \t\n", "aaaa\u0301 ▁ 日本語 👩‍👩‍👧 \0 <s></s> ﬃ"]


@cache
def scratch() -> Path:
    """A folder of this process, in memory where the machine has such a place."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tiny_gguf(kind: str, sentencepiece: bool) -> bytes:
    """The content of a small model with weights of that format."""
    path = scratch() / "valid.gguf"
    write_tiny_gguf(path, kind=kind, **sentencepiece_parts() if sentencepiece else {})
    return path.read_bytes()


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """Encode and decode a few texts in all ways."""
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special=special, parse_special=special)
            tokenizer.decode(ids[:1000], skip_special=not special)
    for token in (0, 1, tokenizer.vocab_size - 1, tokenizer.vocab_size, 2**31, -1):
        tokenizer.token_bytes(token)
    json.dumps([tokenizer.bos_token, tokenizer.eos_token, sorted(tokenizer.eos_ids)])
