"""Packs stored tensors into the weights of a native plan."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.errors import UnsupportedModelError
from headrace.quant.formats import StoredTensor
from headrace.quant.spec import CODEBOOKS, QuantSpec, floats

GROUP = 32
"""Columns that share a scale in packed activations."""

_CHUNK_CODES = 1 << 22


def packed_bytes(tensor: StoredTensor) -> int:
    """Raises ValueError for a format without a kernel."""
    spec = _table_spec(tensor)
    if spec:
        return spec.nbytes
    return _native.packed_bytes(tensor.format.name, tensor.rows, tensor.cols)


def copy_bytes(tensor: StoredTensor, *, by_rows: bool) -> int:
    """Bytes of a copy by rows or columns, of which kernels read parts; 0 for a format without."""
    spec = _table_spec(tensor)
    if spec:
        return spec.copy_bytes(by_rows)
    return _native.copy_bytes(tensor.format.name, tensor.rows, tensor.cols, by_rows)


def add_weight(plan: _native.Plan, tensor: StoredTensor) -> int:
    """Add a matrix, which is packed now or by `start_weights`, and then release the pages of its
    file. Raises UnsupportedModelError.
    """
    with named_in_errors(tensor.name):
        if spec := _table_spec(tensor):
            weight = plan.add_table(spec)
            _fill(plan, weight, tensor)
            tensor.release()
        else:
            weight = plan.add_weight(
                tensor.format.name,
                tensor.rows,
                tensor.cols,
                tensor.parts["codes"],
                tensor.row_order,
                tensor.scales,
                _codebook(tensor),
                tensor.is_mapped,
            )
    return weight


def add_weight_pair(plan: _native.Plan, a: StoredTensor, b: StoredTensor) -> tuple[int, int]:
    """Add two matrices with alternating tiles: kernels read memory in order."""
    first, second = _table_spec(a), _table_spec(b)
    if (
        bool(first) != bool(second)
        or (not first and a.format != b.format)
        or a.row_order is not None
        or b.row_order is not None
    ):
        return add_weight(plan, a), add_weight(plan, b)
    with named_in_errors(f"{a.name} or {b.name}"):
        if first and second:
            weights = plan.add_table_pair(first, second)
            _fill(plan, weights[0], a)
            _fill(plan, weights[1], b)
            a.release()
            b.release()
        else:
            weights = plan.add_weight_pair(
                a.format.name,
                a.parts["codes"],
                a.scales,
                b.format.name,
                b.parts["codes"],
                b.scales,
                a.rows,
                a.cols,
                _codebook(a),
                a.is_mapped and b.is_mapped,
            )
    return weights


def column_order(tensor: StoredTensor) -> tuple[int, ...]:
    """The activation's column for each packed column; empty: no reordering."""
    return () if tensor.column_order is None else tuple(tensor.column_order.tolist())


@contextmanager
def named_in_errors(tensor: str) -> Iterator[None]:
    """Turn a ValueError of the kernels into an UnsupportedModelError."""
    try:
        yield
    except ValueError as error:
        raise UnsupportedModelError(f"tensor {tensor}: {error}") from None


def _table_spec(tensor: StoredTensor) -> _native.TableSpec | None:
    spec = tensor.format.spec
    if spec is None or tensor.format.table_rows is None:
        return None
    values = list(CODEBOOKS[spec.codebook]) if spec.codebook in CODEBOOKS else []
    columns = spec.group or -(-tensor.cols // GROUP) * GROUP
    scale = "f32" if spec.needs_rows_in_int8 else spec.scale
    return _native.TableSpec(
        _code_kind(spec), tensor.rows, tensor.cols, columns, scale, spec.zero_type, values
    )


def _code_kind(spec: QuantSpec) -> str:
    """Name of the codes in `_native.TableSpec`."""
    if spec.is_sparse:
        number = f"int{spec.bits}" if spec.codebook == "integer" else spec.codebook
        return f"2:4 {number}{' by row' if spec.needs_rows_in_int8 else ''}"
    if spec.codebook in CODEBOOKS:
        return "lookup"
    return str(spec.bits) if spec.codebook == "integer" else spec.codebook


def _codebook(tensor: StoredTensor) -> NDArray[np.int8] | None:
    return tensor.format.integers() if tensor.format.integers else None


def _fill(plan: _native.Plan, weight: int, tensor: StoredTensor) -> None:
    if tensor.format.block > 1:
        plan.fill_table_blocks(weight, tensor.format.name, tensor.parts["codes"], tensor.row_order)
        return
    read = tensor.format.table_rows
    assert read
    step = max(1, _CHUNK_CODES // tensor.cols // 16) * 16
    for first in range(0, tensor.rows, step):
        last = min(first + step, tensor.rows)
        rows = read(
            tensor.parts,
            slice(first, last) if tensor.row_order is None else tensor.row_order[first:last],
        )
        numbers = rows.scales
        if tensor.format.needs_rows_in_int8 and tensor.format.spec:
            numbers = floats(numbers, tensor.format.spec.scale)
        zeros, places = (
            None if part is None else _bytes(part) for part in (rows.zeros, rows.places)
        )
        plan.fill_table(weight, first, _bytes(rows.codes), _bytes(numbers), zeros, places)


def _bytes(numbers: NDArray[np.generic]) -> NDArray[np.uint8]:  # [rows, bytes of a row]
    return np.ascontiguousarray(numbers).view(np.uint8)
