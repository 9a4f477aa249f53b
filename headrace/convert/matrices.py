"""The matrices of a model that are quantised, and quantising them by themselves."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RequestError
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program.moe import Experts, GateRows, Route
from headrace.program.ops import Linear
from headrace.quant.encode import encode
from headrace.quant.formats import FORMATS, StoredTensor, plain_table
from headrace.quant.named import LLM_INT8, W8A8
from headrace.quant.rounding import round_to_nearest
from headrace.quant.spec import QuantSpec, TableRows

Floats = NDArray[np.float32]
Tell = Callable[[float], None]
Target = QuantSpec | str
"""A format to quantise to: what is stored code by code, or the name of a format of GGUF files, of
`quant/encode.py`.
"""

_CHUNK_VALUES = 1 << 24
"""Weights of a matrix that are float32 at a time."""


def quantisable(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The matrices that rows are multiplied with, in the order of the program, but those that make
    logits or look tokens up.

    These are few, and a model is more sensitive to them than to all others; a router decides for a
    whole row.
    """
    program = trace_model(spec, tensors)
    gates = {
        op.x.id if isinstance(op, Route) else op.gate.id
        for op in program.ops
        if isinstance(op, Route | GateRows)
    }
    kept: set[str] = set()
    wanted: list[str] = []
    for op in program.ops:
        out = op.output()
        decides = (
            out is not None
            and (out == program.logits or out.id in gates)
            and not isinstance(op, Experts)
        )
        if isinstance(op, Linear | Experts) and not decides:
            wanted += [weight.name for weight in op.matrices()]
        else:
            kept |= {weight.name for weight in op.matrices()}
    return [name for name in dict.fromkeys(wanted) if name not in kept]


def round_matrix(
    tensor: StoredTensor, to: Target, importance: Floats | None = None
) -> StoredTensor:
    """A matrix rounded to the nearest; `importance` says how much an error in each column counts
    [cols].

    Raises RequestError, which names the tensor, where its columns are no whole blocks, or one of
    its numbers is not finite.
    """
    if isinstance(to, QuantSpec):
        return quantised(
            tensor,
            to,
            [round_to_nearest(chunk, to, importance=importance) for chunk in chunks(tensor)],
        )
    stored = FORMATS[to]
    if tensor.cols % stored.block:
        raise RequestError(
            f"tensor {tensor.name} has {tensor.cols:,} columns, no multiple of the "
            f"{stored.block} of a block of {to}"
        )
    blocks = np.concatenate(
        [encoded_rows(tensor.name, to, chunk, importance) for chunk in chunks(tensor)]
    )
    return StoredTensor(tensor.name, stored, tensor.shape, {"codes": blocks})


def encoded_rows(
    name: str, to: str, rows: Floats, importance: Floats | None = None
) -> NDArray[np.uint8]:
    """Rows of a tensor in a format of GGUF files. Raises RequestError, which names it, for numbers
    that are not finite.
    """
    try:
        return encode(to, rows, importance)
    except ValueError as error:
        raise RequestError(f"tensor {name}: {error}") from None


def expert_matrices(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> set[str]:
    """The matrices of experts."""
    return {
        w.name
        for op in trace_model(spec, tensors).ops
        if isinstance(op, Experts)
        for w in op.matrices()
    }


def quantised(tensor: StoredTensor, to: QuantSpec, pieces: list[TableRows]) -> StoredTensor:
    """A matrix of these rows, in the place of `tensor`; of W8A8 and LLM.int8 as the engine
    multiplies them with activations by row.
    """
    if to in (W8A8, LLM_INT8):
        signed = np.concatenate([piece.codes for piece in pieces])[..., None] ^ np.uint8(0x80)
        scales = np.concatenate([piece.scales[:, 0] for piece in pieces])
        return replace(
            tensor,
            format=FORMATS["I8_MIXED" if to.has_wide_outliers else "I8_ROW"],
            parts={"codes": signed, "row_scales": scales},
            row_order=None,
        )
    parts: dict[str, NDArray[Any]] = {
        "codes": np.concatenate([piece.codes for piece in pieces]),
        "scales": np.concatenate([piece.scales for piece in pieces]),
    }
    if pieces[0].zeros is not None:
        parts["zeros"] = np.concatenate(
            [piece.zeros for piece in pieces if piece.zeros is not None]
        )
    return replace(tensor, format=plain_table(to), parts=parts, row_order=None)


def chunks(tensor: StoredTensor) -> Iterator[Floats]:
    """A matrix in float32, some rows at a time."""
    step = max(1, _CHUNK_VALUES // tensor.cols)
    for first in range(0, tensor.rows, step):
        yield tensor.dequantise_rows(range(first, min(first + step, tensor.rows)))
