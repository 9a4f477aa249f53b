"""Whole models, quantised in memory, or converted."""

from collections.abc import Callable
from pathlib import Path

from headrace.convert.gguf.writer import plan_gguf, write_gguf
from headrace.convert.methods import prepared, quantised_matrices
from headrace.convert.source_model import open_original
from headrace.model.spec import ModelSpec
from headrace.quant.spec import QuantSpec
from tests.tiny import Tensors


def quantise(
    method: str,
    spec: ModelSpec,
    tensors: Tensors,
    names: list[str],
    to: QuantSpec,
    pieces: list[list[int]] | None = None,
    threads: int = 1,
    tell: Callable[[float], None] = lambda done: None,
) -> Tensors:
    """All tensors, of which the named matrices are quantised by a method, with pieces of a text to
    calibrate with.
    """
    model = prepared(method, spec, tensors, names, to, pieces or [], threads, tell)
    return {
        **model.tensors,
        **dict(quantised_matrices(method, spec, model, names, to, pieces or [], threads)),
    }


def to_gguf(source: Path, out: Path, mixture: str = "F32") -> Path:
    """Convert a file or folder to a GGUF file, which is given back."""
    original = open_original(source)
    plan = plan_gguf(original, mixture)
    write_gguf(original, out, plan, {}, lambda done: None)
    return out
