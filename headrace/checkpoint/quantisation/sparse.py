"""Sparse layers of compressed-tensors (versions 0.9 to 0.14).

* `sparse-24-bitmask`: `X.compressed` [rows, cols / 2] of the kept values, `X.bitmask` uint8
  [rows, cols / 8] with a bit per column, lowest first, and `X.shape` int64 [2, 1].

* `sparse-bitmask`: `X.compressed` [kept values] of any mask, `X.row_offsets` int64 [rows], and the
  other two as above. The matrix is read as a dense one.

* `dense`: weights with their zeros, which the configuration declares as 2:4.

Values are plain numbers, or int8 codes with the scales of `int-quantized`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.quantisation.method import Config, Tensors
from headrace.checkpoint.quantisation.tables import Scales, codes_of, plain
from headrace.errors import FormatError
from headrace.quant import dequantise as dq
from headrace.quant.arrays import Bytes
from headrace.quant.formats import RAW_FORMATS, Format, StoredTensor, TensorPart, table_format
from headrace.quant.sparse import GROUP, KEPT, check_places, kept, largest_two, places_of
from headrace.quant.spec import QuantSpec, TableRows

BITMASK, BITMASK_24, DENSE = "sparse-bitmask", "sparse-24-bitmask", "dense"
LAYOUTS = (BITMASK_24, BITMASK, DENSE)
_STRUCTURE = "2:4"
_PRUNE_METHODS = ("magnitude", "wanda", "sparsegpt")
"""Names that `headrace convert` writes; a file is not trusted with others."""
_VALUES, _PLACES, _SHAPE = ".compressed", ".bitmask", ".shape"
_PARTS = (_VALUES, _PLACES, _SHAPE, ".row_offsets")
_BF16 = QuantSpec(bits=16, group=0, scale="none", codebook="bf16", is_sparse=True)
_SAMPLED_ROWS = 16

KEPT_INT8 = replace(
    RAW_FORMATS["I8"],
    name="I8 2:4",
    parts={"codes": TensorPart("u1"), "places": TensorPart("u1")},
)
"""Kept codes [rows, cols / 2] of a matrix [rows, cols], before they have scales."""


def layout_of(config: Config) -> str | None:
    """The layout of sparse layers; None if the configuration declares none."""
    sparsity = config.get("sparsity_config")
    return sparsity["format"] if sparsity and _has_structure(sparsity) else None


def sparse_loss(config: Any) -> str:
    """A description of 2:4 layers; empty if the configuration declares none."""
    sparsity = config.get("sparsity_config") if isinstance(config, dict) else None
    if not sparsity or sparsity.get("sparsity_structure") != _STRUCTURE:
        return ""
    by = f" by {sparsity['prune']}" if sparsity.get("prune") in _PRUNE_METHODS else ""
    return f"two of four weights are 0, pruned{by}"


def unknown(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are not supported."""
    sparsity = config.get("sparsity_config")
    if not sparsity:
        return
    if not isinstance(sparsity, dict) or sparsity.get("format") not in LAYOUTS:
        yield "sparsity_config", sparsity
    elif sparsity["format"] == BITMASK_24 and not _has_structure(sparsity):
        yield "sparsity_config.sparsity_structure", sparsity.get("sparsity_structure")


def _has_structure(sparsity: Config) -> bool:
    """Whether the layers are stored with a mask, or declared as 2:4."""
    structure = sparsity.get("sparsity_structure", _STRUCTURE)
    return bool(sparsity["format"] == BITMASK or structure == _STRUCTURE)


def without_bitmasks(layout: str | None, tensors: Tensors, where: str) -> Tensors:
    """Make a matrix of the parts of each layer with a mask.

    Raises FormatError for parts that do not fit, and for other than 2 of 4 values in
    `sparse-24-bitmask`.
    """
    layers = [name.removesuffix(_PLACES) for name in tensors if name.endswith(_PLACES)]
    if not layers or layout not in (BITMASK, BITMASK_24):
        return tensors
    parts = {layer + part for layer in layers for part in _PARTS}
    result = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for layer in layers:
        name = f"{layer}.weight"
        if name in result:
            raise FormatError(f"{where}: tensors {name} and {layer}{_PLACES} exclude each other")
        result[name] = replace(_matrix(layer, layout, tensors, where), name=name)
    return result


def _matrix(layer: str, layout: str, tensors: Tensors, where: str) -> StoredTensor:
    values, mask, shape = (
        _required(layer + part, tensors, where) for part in (_VALUES, _PLACES, _SHAPE)
    )
    if shape.format.name not in ("I64", "I32") or math.prod(shape.shape) != 2:
        raise FormatError(f"{where}: tensor {shape.name} does not hold the 2 sizes of a matrix")
    rows, cols = (int(size) for size in plain(shape).reshape(-1))
    if min(rows, cols) < 1 or mask.format.name != "U8" or mask.shape != (rows, -(-cols // 8)):
        raise FormatError(
            f"{where}: tensor {mask.name} has shape {list(mask.shape)}, which is not a bit for "
            f"each column of a matrix [{rows}, {cols}]"
        )
    places = codes_of(mask)
    if layout == BITMASK:
        return _spread(values, places, (rows, cols), where)

    if values.shape != (rows, cols // GROUP * KEPT):
        raise FormatError(
            f"{where}: tensor {values.name} has shape {list(values.shape)}, but a matrix "
            f"[{rows}, {cols}] has half as many kept values"
        )
    try:
        check_places(places, cols)
    except ValueError as error:
        raise FormatError(f"{where}: tensor {mask.name}: {error}") from None
    formats = {"BF16": _sparse_bf16(), "I8": KEPT_INT8}
    if values.format.name not in formats:
        return _spread(values, places, (rows, cols), where)
    parts = {"codes": values.parts["codes"], "places": places}
    return replace(values, shape=(rows, cols), format=formats[values.format.name], parts=parts)


def _spread(
    values: StoredTensor, places: Bytes, shape: tuple[int, int], where: str
) -> StoredTensor:
    """Put values of any mask to their columns."""
    is_kept = np.unpackbits(places, axis=1, count=shape[1], bitorder="little").view(np.bool_)
    width = values.format.nbytes
    numbers = values.parts["codes"].reshape(-1, width)
    if len(numbers) != is_kept.sum():
        raise FormatError(
            f"{where}: tensor {values.name} has {len(numbers):,} values, but its mask has "
            f"{is_kept.sum():,}"
        )
    codes = np.zeros((*shape, width), np.uint8)
    codes[is_kept] = numbers
    return replace(values, shape=shape, parts={"codes": codes})


def integers(kept_codes: StoredTensor, scales: Scales, numbers: NDArray[Any]) -> StoredTensor:
    """Give kept int8 codes their scales."""
    places = kept_codes.parts["places"]
    parts = {"codes": codes_of(kept_codes), "places": places, "scales": numbers}
    return replace(kept_codes, format=_sparse_int8(scales), parts=parts)


def declared(layout: str | None, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Read dense weights that the configuration declares as 2:4 in a sparse format, if there is
    one and some of their rows are 2:4. Another row that is not raises ValueError when kernels
    pack it.
    """
    if layout != DENSE:
        return tensors
    return {
        name: _as_sparse(tensor) if name.endswith(".weight") and len(tensor.shape) == 2 else tensor
        for name, tensor in tensors.items()
    }


def _as_sparse(tensor: StoredTensor) -> StoredTensor:
    spec = _sparse_spec(tensor.format)
    if spec is None or tensor.cols % GROUP:
        return tensor
    matrix = replace(tensor, format=_sparse_dense(tensor.format, spec))
    try:
        matrix.dequantise_rows(np.arange(_SAMPLED_ROWS) * tensor.rows // _SAMPLED_ROWS)
    except ValueError:
        return tensor
    return matrix


def _sparse_spec(format: Format) -> QuantSpec | None:
    """The sparse format of a dense one's values."""
    if format.name == "BF16":
        return _BF16
    spec = format.spec
    if spec is None or (format.table_rows is None and format.name != "I8_ROW"):
        return None
    if spec.codebook != "integer" or spec.zero != "none" or spec.bits not in (4, 8):
        return None
    return replace(spec, is_sparse=True)


@cache
def _sparse_bf16() -> Format:
    def table_rows(stored: dq.Parts, rows: dq.Rows) -> TableRows:
        codes = stored["codes"][rows].view("<u2")[..., 0]
        return TableRows(codes, _no_scales(codes), None, stored["places"][rows])

    parts = {"codes": TensorPart("u1"), "places": TensorPart("u1")}
    return table_format(_BF16.name, _BF16, parts, table_rows)


@cache
def _sparse_int8(scales: Scales) -> Format:
    assert scales.number != "e8m0" and scales.number != "e4m3"
    spec = QuantSpec(bits=8, group=scales.group, scale=scales.number, is_sparse=True)

    def table_rows(stored: dq.Parts, rows: dq.Rows) -> TableRows:
        codes = stored["codes"][rows] ^ np.uint8(128)
        return TableRows(codes, scales.read(stored, rows), None, stored["places"][rows])

    parts = {"codes": TensorPart("u1"), "places": TensorPart("u1"), **scales.parts}
    return table_format(spec.name, spec, parts, table_rows)


@cache
def _sparse_dense(base: Format, spec: QuantSpec) -> Format:
    """A format of dense codes, two of four of which are not 0."""

    def table_rows(stored: dq.Parts, rows: dq.Rows) -> TableRows:
        if base.table_rows:
            codes, scales, *_ = base.table_rows(stored, rows)
        elif spec.codebook == "bf16":
            codes = stored["codes"][rows].view("<u2")[..., 0]
            scales = _no_scales(codes)
        else:
            codes = stored["codes"][rows][..., 0].view(np.uint8) ^ np.uint8(128)
            scales = stored["row_scales"][rows][:, None]
        is_zero = (codes << 1 == 0) if spec.codebook == "bf16" else codes == 1 << spec.bits - 1
        is_kept = largest_two((~is_zero).astype(np.float32))
        if (~is_zero & ~is_kept).any():
            raise ValueError(
                "the configuration says 2:4, but more than 2 of 4 neighbouring weights are not 0"
            )
        return TableRows(kept(codes, is_kept), scales, None, places_of(is_kept))

    return table_format(spec.name, spec, base.parts, table_rows)


def _no_scales(codes: NDArray[Any]) -> NDArray[np.float32]:
    return np.empty((len(codes), 0), np.float32)


def _required(name: str, tensors: Tensors, where: str) -> StoredTensor:
    if name not in tensors:
        raise FormatError(f"{where}: tensor {name} is missing")
    return tensors[name]
