"""Helpers that quantise models in memory or convert them to files."""

from collections.abc import Callable
from pathlib import Path

from headrace.convert.gguf.writer import plan_gguf, write_gguf
from headrace.convert.methods import prepare_model, quantise_matrices
from headrace.convert.source_model import open_source_model
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
    on_progress: Callable[[float], None] = lambda done: None,
) -> Tensors:
    """All tensors, with the named matrices quantised by a method."""
    model = prepare_model(method, spec, tensors, names, to, pieces or [], threads, on_progress)
    return {
        **model.tensors,
        **dict(
            quantise_matrices(
                method, spec, model, names, to, pieces or [], threads, lambda done: None
            )
        ),
    }


def to_gguf(source: Path, out: Path, mixture: str = "F32") -> Path:
    """Convert a file or folder to a GGUF file, and return its path."""
    original = open_source_model(source)
    plan = plan_gguf(original, mixture)
    write_gguf(original, out, plan, {}, lambda done: None)
    return out
