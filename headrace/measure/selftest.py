"""Compares a tiny random model with the `reference` backend."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, compile_program, forward
from headrace.batch import KvRows, RaggedBatch
from headrace.config import KvConfig
from headrace.model import tensor_shapes, trace_model
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.quant.formats import FORMATS, StoredTensor

_TOKENS = 40
_TOLERANCE = 0.05
"""Maximum relative error of the logits: backends may round activations to 8 bits."""
_SPEC = ModelSpec(
    architecture="llama",
    name="self-test",
    num_layers=2,
    dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_dim=512,
    vocab_size=512,
    max_context=128,
    norm_eps=1e-5,
    rope=RopeSpec(64),
)


class Check(NamedTuple):
    name: str
    ok: bool
    detail: str


def selftest(*, backend: str = "cpu", threads: int = 0) -> list[Check]:
    """Check that a backend computes correctly.

    Logits are compared with the reference backend for each weight format, and must be bit-equal
    for any chunks of the prompt. `threads` 0 uses all cores.
    """
    return [check for name in ("Q4_1", "Q8_0", "BF16") for check in _checks(name, backend, threads)]


def _checks(format_name: str, backend: str, threads: int) -> Iterator[Check]:
    tensors = _random_model(format_name)
    whole = _logits(tensors, backend, [_TOKENS], threads)
    expected = _logits(tensors, "reference", [_TOKENS], threads)
    error = float(np.linalg.norm(whole - expected) / np.linalg.norm(expected))
    yield Check(
        name=f"{backend}: {format_name} against reference",
        ok=error < _TOLERANCE,
        detail=f"relative error {error:.4f}",
    )

    chunked = _logits(tensors, backend, [17, 1, 1, _TOKENS - 19], threads)
    equal = bool((whole == chunked).all())
    yield Check(
        name=f"{backend}: {format_name} whole and in chunks",
        ok=equal,
        detail="bit-equal" if equal else "differs",
    )


def _random_model(format_name: str) -> dict[str, StoredTensor]:
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in tensor_shapes(_SPEC).items():
        if len(shape) == 1:
            vector = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            tensors[name] = StoredTensor.from_floats(name, vector)
        else:
            matrix = _random_matrix(rng, format_name, shape)
            tensors[name] = StoredTensor.from_bytes(name, FORMATS[format_name], shape, matrix)
    return tensors


def _random_matrix(
    rng: np.random.Generator, format_name: str, shape: tuple[int, ...]
) -> NDArray[np.uint8]:
    rows, cols = shape
    deviation = cols**-0.5
    if format_name == "BF16":
        floats = rng.normal(0, deviation, rows * cols).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    num_blocks = rows * cols // 32
    scale = rng.uniform(0.5, 1, num_blocks) * deviation / (4 if format_name == "Q4_1" else 64)
    # A Q4_1 block is its scale, its minimum and 4-bit codes.
    constants = [scale, -7.5 * scale] if format_name == "Q4_1" else [scale]
    head = np.stack(constants, axis=1).astype(np.float16).view(np.uint8)
    code_bytes = FORMATS[format_name].nbytes - head.shape[1]
    codes = rng.integers(0, 256, (num_blocks, code_bytes), np.uint8)
    return np.concatenate([head, codes], axis=1).reshape(-1)


def _logits(
    tensors: dict[str, StoredTensor], backend: str, chunks: list[int], threads: int
) -> NDArray[np.float32]:
    """Logits of all rows of one prompt, [tokens, vocab], computed in chunks of these sizes."""
    program = trace_model(_SPEC, tensors)
    executable = compile_program(backend, program, tensors, KvConfig((4,)), threads)
    try:
        starts = np.cumsum([0, *chunks[:-1]])
        parts = [
            _step_logits(executable, int(start), rows)
            for start, rows in zip(starts, chunks, strict=True)
        ]
        return np.concatenate(parts)
    finally:
        executable.close()


def _step_logits(executable: Executable, start: int, rows: int) -> NDArray[np.float32]:
    def ints(values: object) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    positions = np.arange(start, start + rows, dtype=np.int32)
    local = np.arange(rows, dtype=np.int32)
    batch = RaggedBatch(
        tokens=positions * 37 % _SPEC.vocab_size,
        positions=positions,
        row_start=ints([0, rows]),
        context_len=ints([start]),
        scheduled_len=ints([rows]),
        kv=(KvRows(positions, ints([[0, 1, 2, 3]])),),
        ancestors=None,
        logit_rows=local,
        seq_of=np.zeros_like(local),
    )
    logits = forward(executable, batch).logits
    assert logits is not None, "the batch has logit rows"
    return logits.copy()
