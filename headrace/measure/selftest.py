"""A tiny random model, run on a backend and held against `reference`: do the kernels compute right
on this processor, or GPU?
"""

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
"""Most relative error of the logits: activations are rounded to 8 bits, the reference has none of
that.
"""
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
    """What was tried and what came of it."""

    name: str
    ok: bool
    detail: str


def run_checks(threads: int = 0, backend: str = "cpu") -> Iterator[Check]:
    """Each weight format against the reference, then chunked against whole, which must be equal to
    the last bit.
    """
    for name in ("Q4_1", "Q8_0", "BF16"):
        tensors = _random_model(name)
        whole = _logits(tensors, backend, [_TOKENS], threads)
        truth = _logits(tensors, "reference", [_TOKENS], threads)
        error = float(np.linalg.norm(whole - truth) / np.linalg.norm(truth))
        yield Check(
            f"{backend}: {name} against reference",
            error < _TOLERANCE,
            f"relative error {error:.4f}",
        )
        chunked = _logits(tensors, backend, [17, 1, 1, _TOKENS - 19], threads)
        yield Check(
            f"{backend}: {name} whole and in chunks",
            bool((whole == chunked).all()),
            "bit-equal" if (whole == chunked).all() else "differs",
        )


def _random_model(format_name: str) -> dict[str, StoredTensor]:
    """Weights of mean 0 and a spread that keeps activations near 1; vectors near 1 in F32."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in tensor_shapes(_SPEC).items():
        if len(shape) == 1:
            tensors[name] = StoredTensor.from_floats(
                name, rng.uniform(0.5, 1.5, shape).astype(np.float32)
            )
        else:
            tensors[name] = StoredTensor.from_bytes(
                name, FORMATS[format_name], shape, _random_weights(rng, format_name, shape)
            )
    return tensors


def _random_weights(
    rng: np.random.Generator, format_name: str, shape: tuple[int, ...]
) -> NDArray[np.uint8]:
    rows, cols = shape
    spread = cols**-0.5
    if format_name == "BF16":
        return (
            (rng.normal(0, spread, rows * cols).astype(np.float32).view(np.uint32) >> 16)
            .astype(np.uint16)
            .view(np.uint8)
        )
    blocks = rows * cols // 32
    scale = rng.uniform(0.5, 1, blocks) * spread / (4 if format_name == "Q4_1" else 64)
    constants = (
        [scale, -7.5 * scale] if format_name == "Q4_1" else [scale]
    )  # Q4_1: scale and minimum, then 4-bit codes
    head = np.stack(constants, axis=1).astype(np.float16).view(np.uint8)
    codes = rng.integers(0, 256, (blocks, FORMATS[format_name].nbytes - head.shape[1]), np.uint8)
    return np.concatenate([head, codes], axis=1).reshape(-1)


def _logits(
    tensors: dict[str, StoredTensor], backend: str, chunks: list[int], threads: int
) -> NDArray[np.float32]:
    """Logits of all rows of one prompt, [tokens, vocab], computed in chunks of the given sizes."""
    executable = compile_program(
        backend, trace_model(_SPEC, tensors), tensors, KvConfig((4,)), threads
    )
    try:
        starts = np.cumsum([0, *chunks[:-1]])
        return np.concatenate(
            [
                _step(executable, int(start), rows)
                for start, rows in zip(starts, chunks, strict=True)
            ]
        )
    finally:
        executable.close()


def _step(executable: Executable, start: int, rows: int) -> NDArray[np.float32]:
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
    assert logits is not None, "they were asked for"
    return logits.copy()
