"""Comparing our two routes with each other, and our logits on a GGUF file with
llama.cpp's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backend.reference import activations as reference_activations
from headrace.backend.reference import ops as reference_ops
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.model import trace_model
from headrace.model.rope import inverse_frequencies
from headrace.model.spec import ModelSpec, RopeSpec
from tests.families import CONTEXT
from tests.oracle.test_families import rows_of_ours

Logits = NDArray[np.float32]

TOLERANCE = 1e-5
"""Relative error of a row of logits, if both sides compute in float32."""
GELU_TOLERANCE = 3e-4
"""Error for each layer with GELU: ggml's table in half precision turns last bits near a
limit of rounding into 0.1 %.
"""
ROUNDED_TOLERANCE = 0.03
"""Error if ggml rounds rows to 8 bits before it multiplies rounded weights."""
ROUNDED_TYPE_TOLERANCE = 0.1
"""Error if ggml rounds rows for all matrices, with a scale for 256 columns."""
_NOT_COMPARED = {"name", "architecture", "max_context", "rope", "window_rope"}
"""Names, a length that some GGUF files state differently, and rotary embeddings,
compared by frequencies.
"""


def differences(folder: Path, file: Path) -> list[str]:
    """Names of tensors and fields that differ between our two routes."""
    a, b = open_checkpoint(folder), open_checkpoint(file)
    names = sorted({*a.tensors, *b.tensors})
    return [name for name in names if not _same_tensor(name, a, b)] + _different_fields(
        a.spec, b.spec
    )


def _same_tensor(name: str, a: Checkpoint, b: Checkpoint) -> bool:
    if name not in a.tensors or name not in b.tensors:
        return False
    values, others = a.tensors[name].dequantise(), b.tensors[name].dequantise()
    return values.shape == others.shape and bool((values == others).all())


def _different_fields(a: ModelSpec, b: ModelSpec) -> list[str]:
    fields, others = vars(a), vars(b)
    found = [
        name
        for name in fields
        if name not in _NOT_COMPARED and not _same(fields[name], others[name])
    ]
    ropes = (
        (_frequencies(a.rope), _frequencies(b.rope)),
        (_frequencies(a.window_rope), _frequencies(b.window_rope)),
    )
    return found + ["rope"] * any(
        len(x) != len(y) or not np.allclose(x, y, 1e-6, 0) for x, y in ropes
    )


def _same(a: Any, b: Any) -> bool:
    """Whether values are equal, with numbers to float32 precision and records field by
    field.
    """
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.isclose(a, b, 1e-6, 0))
    if hasattr(a, "__dataclass_fields__") and type(a) is type(b):
        return all(_same(value, vars(b)[name]) for name, value in vars(a).items())
    return bool(a == b)


def _frequencies(rope: RopeSpec | None) -> NDArray[np.float64]:
    """Frequencies for short and long texts, and the factor."""
    if not rope:
        return np.empty(0)
    ranges = [inverse_frequencies(rope, CONTEXT, context) for context in (16, CONTEXT, 4 * CONTEXT)]
    return np.concatenate([[*frequencies, factor] for frequencies, factor in ranges])


def our_logits(file: Path, tokens: list[int], like_theirs: bool) -> tuple[Logits, float]:
    """Logits of the reference backend, optionally with llama.cpp's approximations, and
    the tolerance.
    """
    checkpoint = open_checkpoint(file)
    spec = replace(checkpoint.spec, context=CONTEXT)
    if not like_theirs:
        return _logits(spec, checkpoint.tensors, tokens), _tolerance(checkpoint)
    with _gelu_by_table():
        return _logits(_approximations(spec), checkpoint.tensors, tokens), _tolerance(checkpoint)


def _tolerance(checkpoint: Checkpoint) -> float:
    if any(tensor.format.name != "F32" for tensor in checkpoint.tensors.values()):
        return ROUNDED_TOLERANCE
    return (
        GELU_TOLERANCE * checkpoint.spec.num_layers
        if checkpoint.spec.activation.startswith("gelu")
        else TOLERANCE
    )


def _approximations(spec: ModelSpec) -> ModelSpec:
    """llama.cpp's specification: rounded limits of YaRN's ramp, also for gpt-oss, and
    Phi-3 without a window.
    """
    rope = replace(spec.rope, truncate=True) if spec.rope else None
    return replace(spec, rope=rope, windows=() if spec.architecture == "phi3" else spec.windows)


def _logits(spec: ModelSpec, tensors: Mapping[str, Any], tokens: list[int]) -> Logits:
    kv_groups = len(trace_model(spec, tensors).kv_groups)
    return rows_of_ours(spec, tensors, tokens, kv_groups, "reference")[0]


@contextmanager
def _gelu_by_table() -> Iterator[None]:
    """Replace GELU by ggml's, with a half-precision table for the tanh variant."""
    exact = reference_activations.activated

    def activated(x: NDArray[np.float64], activation: Any) -> NDArray[np.float64]:
        if activation not in ("gelu", "gelu_tanh"):
            return exact(x, activation)
        half = exact(x.astype(np.float16).astype(np.float64), "gelu_tanh").astype(np.float16)
        return np.where(x <= -10, 0, np.where(x >= 10, x, half))

    with pytest.MonkeyPatch.context() as patch:
        for module in (reference_ops, reference_activations):
            patch.setattr(module, "activated", activated)
        yield


def relative_error(got: Logits, want: Logits) -> float:
    """The relative error of the worst row."""
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())
