"""Fingerprints are equal for copies of a model and differ for any other model."""

from pathlib import Path

import numpy as np

from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import open_checkpoint
from tests.checkpoint.conftest import metadata, tensors, write_tiny_gguf

TOKENS = metadata("llama")["tokenizer.ggml.tokens"]


def mark_of(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    return fingerprint(checkpoint, checkpoint.load_tokenizer())


def test_any_other_model_has_another(tmp_path: Path) -> None:
    weights = tensors(len(TOKENS))
    first = mark_of(write_tiny_gguf(tmp_path / "first.gguf"))
    assert first == mark_of(write_tiny_gguf(tmp_path / "again.gguf"))
    assert first == mark_of(
        write_tiny_gguf(tmp_path / "template.gguf", {"tokenizer.chat_template": "{{ messages }}"})
    )
    others = [
        write_tiny_gguf(tmp_path / f"{name}.gguf", None, {name: weights[name] * np.float32(1.01)})
        for name in ("output_norm.weight", "blk.1.ffn_down.weight", "token_embd.weight")
    ]
    others += [
        write_tiny_gguf(tmp_path / "q8.gguf", kind="Q8_0"),
        write_tiny_gguf(tmp_path / "rope.gguf", {"llama.rope.freq_base": 500.0}),
        write_tiny_gguf(tmp_path / "bos.gguf", {"tokenizer.ggml.bos_token_id": 0}),
        write_tiny_gguf(
            tmp_path / "tokens.gguf",
            {"tokenizer.ggml.tokens": [*TOKENS[:4], *TOKENS[5:7], TOKENS[4], *TOKENS[7:]]},
        ),
    ]
    marks = [first, *map(mark_of, others)]
    assert len(set(marks)) == len(marks)
