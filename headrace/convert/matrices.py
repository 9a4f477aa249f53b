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
from headrace.quant.arrays import Bytes, Floats
from headrace.quant.encode import encode
from headrace.quant.format_names import LLM_INT8, W8A8
from headrace.quant.formats import FORMATS, StoredTensor, plain_table
from headrace.quant.rounding import round_to_nearest
from headrace.quant.spec import QuantSpec, TableRows

ProgressCallback = Callable[[float], None]
"""Receives the finished share, from 0 to 1."""
Target = QuantSpec | str

_CHUNK_VALUES = 1 << 24


def quantisable(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """List the matrices of linear ops and experts.

    Logits, token lookups and routers are small and sensitive, so they are left out.
    """
    program = trace_model(spec, tensors)
    router_outputs = {
        op.x.id if isinstance(op, Route) else op.gate.id
        for op in program.ops
        if isinstance(op, Route | GateRows)
    }
    selected: list[str] = []
    excluded: set[str] = set()
    for op in program.ops:
        out = op.output()
        is_sensitive = (
            out is not None
            and (out == program.logits or out.id in router_outputs)
            and not isinstance(op, Experts)
        )
        names = [weight.name for weight in op.matrices()]
        if isinstance(op, Linear | Experts) and not is_sensitive:
            selected += names
        else:
            excluded.update(names)
    return [name for name in dict.fromkeys(selected) if name not in excluded]


def expert_matrices(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> set[str]:
    ops = trace_model(spec, tensors).ops
    return {weight.name for op in ops if isinstance(op, Experts) for weight in op.matrices()}


def round_matrix(
    tensor: StoredTensor, target: Target, importance: Floats | None = None
) -> StoredTensor:
    """Round to the nearest; `importance` [cols] weights squared errors.

    Raises RequestError if the format does not divide the columns or a weight is not finite.
    """
    if isinstance(target, QuantSpec):
        rows = [
            round_to_nearest(chunk, target, importance=importance) for chunk in row_chunks(tensor)
        ]
        return quantised_matrix(tensor, target, rows)

    stored = FORMATS[target]
    if tensor.cols % stored.block:
        raise RequestError(
            f"tensor {tensor.name} has {tensor.cols:,} columns, not a multiple of the "
            f"{stored.block} of a {target} block; choose a format with smaller blocks"
        )
    blocks = [encode_rows(tensor.name, target, chunk, importance) for chunk in row_chunks(tensor)]
    return StoredTensor(
        name=tensor.name,
        format=stored,
        shape=tensor.shape,
        parts={"codes": np.concatenate(blocks)},
    )


def encode_rows(name: str, target: str, rows: Floats, importance: Floats | None = None) -> Bytes:
    """Raises RequestError, which names the tensor."""
    try:
        return encode(target, rows, importance)
    except ValueError as error:
        raise RequestError(f"tensor {name}: {error}") from None


def quantised_matrix(
    tensor: StoredTensor, target: QuantSpec, chunks: list[TableRows]
) -> StoredTensor:
    if target in (W8A8, LLM_INT8):
        signed = np.concatenate([chunk.codes for chunk in chunks])[..., None] ^ np.uint8(0x80)
        scales = np.concatenate([chunk.scales[:, 0] for chunk in chunks])
        return replace(
            tensor,
            format=FORMATS["I8_MIXED" if target.has_wide_outliers else "I8_ROW"],
            parts={"codes": signed, "row_scales": scales},
            row_order=None,
        )
    parts: dict[str, NDArray[Any]] = {
        "codes": np.concatenate([chunk.codes for chunk in chunks]),
        "scales": np.concatenate([chunk.scales for chunk in chunks]),
    }
    if chunks[0].zeros is not None:
        parts["zeros"] = np.concatenate(
            [chunk.zeros for chunk in chunks if chunk.zeros is not None]
        )
    return replace(tensor, format=plain_table(target), parts=parts, row_order=None)


def row_chunks(tensor: StoredTensor) -> Iterator[Floats]:
    step = max(1, _CHUNK_VALUES // tensor.cols)
    for first in range(0, tensor.rows, step):
        yield tensor.dequantise_rows(range(first, min(first + step, tensor.rows)))
