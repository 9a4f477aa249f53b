"""What is compared: our two routes with each other, and our logits on a GGUF file with those of
llama.cpp.
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
"""Relative error of a row of logits, of float32 on both sides."""
GELU_TOLERANCE = 3e-4
"""That for each layer with GELU. ggml looks it up in half precision, where numbers that are equal
but for their last bits, next to a limit of rounding, differ by one part in a thousand.
"""
ROUNDED_TOLERANCE = 0.03
"""That where ggml rounds rows to 8 bits, before they are multiplied with weights that are
themselves rounded.
"""
ROUNDED_TYPE_TOLERANCE = 0.1
"""That where it rounds rows for all matrices of a model, with a scale for 256 columns."""
_NOT_COMPARED = {"name", "architecture", "max_context", "rope", "window_rope"}
"""Names; a length that GGUF files of some families say otherwise; rotary embeddings, whose
frequencies are compared.
"""


def differences(folder: Path, file: Path) -> list[str]:
    """What is not the same in our two routes: names of tensors and fields."""
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
    """Whether two values are the same: numbers to the precision of a float32, records field by
    field.
    """
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.isclose(a, b, 1e-6, 0))
    if hasattr(a, "__dataclass_fields__") and type(a) is type(b):
        return all(_same(value, vars(b)[name]) for name, value in vars(a).items())
    return bool(a == b)


def _frequencies(rope: RopeSpec | None) -> NDArray[np.float64]:
    """All numbers of a rotary embedding: frequencies for short texts and long ones, and the
    factor.
    """
    if not rope:
        return np.empty(0)
    ranges = [inverse_frequencies(rope, CONTEXT, context) for context in (16, CONTEXT, 4 * CONTEXT)]
    return np.concatenate([[*frequencies, factor] for frequencies, factor in ranges])


def our_logits(file: Path, tokens: list[int], like_theirs: bool) -> tuple[Logits, float]:
    """The logits of the reference backend on a GGUF file, on request with the liberties that
    llama.cpp takes, and the tolerance.
    """
    checkpoint = open_checkpoint(file)
    spec = replace(checkpoint.spec, context=CONTEXT)
    if not like_theirs:
        return _logits(spec, checkpoint.tensors, tokens), _tolerance(checkpoint)
    with _gelu_by_table():
        return _logits(_taken_liberties(spec), checkpoint.tensors, tokens), _tolerance(checkpoint)


def _tolerance(checkpoint: Checkpoint) -> float:
    if any(tensor.format.name != "F32" for tensor in checkpoint.tensors.values()):
        return ROUNDED_TOLERANCE
    return (
        GELU_TOLERANCE * checkpoint.spec.num_layers
        if checkpoint.spec.activation.startswith("gelu")
        else TOLERANCE
    )


def _taken_liberties(spec: ModelSpec) -> ModelSpec:
    """What llama.cpp computes: it rounds the limits of YaRN's ramp, also for gpt-oss, and Phi-3 has
    no window.
    """
    rope = replace(spec.rope, truncate=True) if spec.rope else None
    return replace(spec, rope=rope, windows=() if spec.architecture == "phi3" else spec.windows)


def _logits(spec: ModelSpec, tensors: Mapping[str, Any], tokens: list[int]) -> Logits:
    kv_groups = len(trace_model(spec, tensors).kv_groups)
    return rows_of_ours(spec, tensors, tokens, kv_groups, "reference")[0]


@contextmanager
def _gelu_by_table() -> Iterator[None]:
    """Let GELU of both kinds be what ggml makes of them: the one with tanh, looked up in a table in
    half precision.
    """
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
    """Of the row that is farthest off."""
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())
