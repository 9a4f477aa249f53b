"""Integer checkpoints of torchao 0.18 (pytorch/ao) as transformers 5 writes them to safetensors.

A quantised layer X has `X._weight_qdata`, `X._weight_scale` and `X._weight_zero_point`.
`Int8Tensor` and `IntxUnpackedToInt8Tensor` have codes I8 [rows, cols], with sign and one to a byte
whatever their bits, scales [rows, groups] or [1, 1] and zero points I8 of that shape; a weight is
scale * (code - zero point). `Int4Tensor` has two codes of 4 bits with sign in a byte [rows, cols /
2], the first in the low bits, scales and zero points [groups, rows] that are floats; a weight is
scale * code + zero point (`int4_row_quantize_zp` of mslk).

The class of a tensor is named in the file's header, which is not needed: the configuration names
the one that it makes.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.quantisation.method import Config, Tensors, refusal
from headrace.checkpoint.quantisation.packed_codes import (
    check_shapes,
    finite_floats,
    gathered,
    numbers,
    require_finite,
)
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.dequantise import Parts, Rows
from headrace.quant.formats import Format, StoredTensor, TensorPart, table_format, table_parts
from headrace.quant.spec import QuantSpec, TableRows, floats

_METHOD = "torchao"
_CODES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_OF_ACTIVATIONS = (
    "_weight_act_quant_scale",
    "_weight_act_quant_zero_point",
    "_weight_act_pre_scale",
)
_INT4 = "Int4WeightOnlyConfig"
_UNPACKED = {"intx_packing_format": "UNPACKED_TO_INT8"}
_KNOWN = {
    _INT4: {"int4_packing_format": "PLAIN"},
    "Int8WeightOnlyConfig": {},
    "Int8DynamicActivationInt8WeightConfig": {},
    "IntxWeightOnlyConfig": _UNPACKED,
    "Int8DynamicActivationIntxWeightConfig": _UNPACKED,
}
"""Classes of configurations, and what their fields have to be; each is that by default."""
_VERSION = 2
_KERNEL_BITS = (2, 3, 4, 8)


class TorchAo:
    """Integers of 1 to 8 bits by group, by row or by tensor; activations by token or left alone,
    which is one to the kernels.
    """

    supported = (
        f"{_METHOD} with one of {', '.join(_KNOWN)} in version {_VERSION}, int4 as PLAIN, "
        "intx as UNPACKED_TO_INT8"
    )

    def check(self, config: Config) -> None:
        given = _default(config)
        if given.get("_type") not in _KNOWN:
            raise refusal(
                "quant_type", given.get("_type", config.get("quant_type")), self.supported
            )
        if given.get("_version") != _VERSION:
            raise refusal("quant_type._version", given.get("_version"), self.supported)
        for field, known in _KNOWN[given["_type"]].items():
            if (value := _named(given, field, known)) != known:
                raise refusal(f"quant_type.{field}", value, self.supported)
        if _bits(config) is None:
            raise refusal(
                "quant_type.weight_dtype", _named(given, "weight_dtype", None), self.supported
            )

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        is_int4, bits = _default(config)["_type"] == _INT4, _bits(config)
        assert bits

        def matrix(layer: str) -> StoredTensor:
            if given := [
                f"{layer}{part}" for part in _OF_ACTIVATIONS if f"{layer}{part}" in tensors
            ]:
                raise UnsupportedModelError(
                    f"{where}: tensor {given[0]} scales activations, which is not supported"
                )
            return (
                _nibbles(layer, tensors, where) if is_int4 else _bytes(layer, bits, tensors, where)
            )

        return gathered(tensors, (_CODES, _SCALE, _ZERO, *_OF_ACTIVATIONS), matrix, where)


def _default(config: Config) -> Mapping[str, Any]:
    """The configuration of all layers; empty where there is none."""
    given = config.get("quant_type")
    default = given.get("default") if isinstance(given, dict) else None
    fits = (
        isinstance(default, dict)
        and isinstance(default.get("_type"), str)
        and isinstance(default.get("_data"), dict)
    )
    return default if fits and default else {}


def _named(given: Mapping[str, Any], field: str, default: str | None) -> Any:
    """A field that names a member of an enumeration, or a dtype."""
    value = given["_data"].get(field)
    return default if value is None else value.get("_data") if isinstance(value, dict) else value


def _bits(config: Config) -> int | None:
    """Bits of a code; None for a `weight_dtype` that is no int1 to int8."""
    given = _default(config)
    if given["_type"] == _INT4:
        return 4
    dtype = _named(given, "weight_dtype", "int8")
    return next((bits for bits in range(1, 9) if dtype == f"int{bits}"), None)


def _group(cols: int, groups: int, name: str, where: str) -> int:
    """Columns of a group, 0 where it is the whole row."""
    if cols % groups:
        raise FormatError(
            f"{where}: tensor {name} has {groups:,} scales for each row of {cols:,} columns"
        )
    group = cols // groups
    if groups > 1 and group != 16 and group % 32:
        raise UnsupportedModelError(
            f"{where}: tensor {name} has groups of {group} columns, which are neither 16 "
            "nor a multiple of 32"
        )
    return group if groups > 1 else 0


def _bytes(layer: str, bits: int, tensors: Tensors, where: str) -> StoredTensor:
    """A matrix of one code a byte; `layer` ends with a dot."""
    codes = numbers(tensors, f"{layer}{_CODES}", "I8", 2, where)
    kind, scales = finite_floats(tensors, f"{layer}{_SCALE}", where)
    rows, cols = codes.shape
    groups = scales.shape[1]
    points = (
        numbers(tensors, f"{layer}{_ZERO}", "I8", 2, where)
        if f"{layer}{_ZERO}" in tensors
        else np.zeros_like(scales, np.int8)
    )
    shape = (1, 1) if scales.shape == (1, 1) else (rows, groups)
    check_shapes({_SCALE: scales, _ZERO: points}, {_SCALE: shape, _ZERO: shape}, layer, where)
    group = _group(cols, groups, f"{layer}{_SCALE}", where)
    stored_bits = next(known for known in _KERNEL_BITS if known >= bits)
    half = 1 << stored_bits - 1
    if (points < -half).any() or (points >= half).any():
        raise FormatError(
            f"{where}: tensor {layer}{_ZERO} has a zero point that is no int{stored_bits}"
        )
    parts: dict[str, NDArray[Any]] = {"codes": codes, "scales": _by_row(scales, rows)}
    if points.any():
        parts["zeros"] = _by_row((points.astype(np.int16) + half).astype(np.uint8), rows)
    spec = QuantSpec(
        stored_bits, group, kind, *(("point", "u8") if points.any() else ("none", None))
    )
    return StoredTensor(f"{layer}weight", _format(spec, False), (rows, cols), parts)


def _nibbles(layer: str, tensors: Tensors, where: str) -> StoredTensor:
    """A matrix of two codes a byte; `layer` ends with a dot."""
    codes = numbers(tensors, f"{layer}{_CODES}", "I8", 2, where)
    kind, scales = finite_floats(tensors, f"{layer}{_SCALE}", where)
    zero_kind, zeros = finite_floats(tensors, f"{layer}{_ZERO}", where)
    rows, cols = len(codes), 2 * codes.shape[1]
    shape = len(scales), rows
    check_shapes({_SCALE: scales, _ZERO: zeros}, {_SCALE: shape, _ZERO: shape}, layer, where)
    group = _group(cols, len(scales), f"{layer}{_SCALE}", where)
    parts: dict[str, NDArray[Any]] = {"codes": codes, "scales": np.ascontiguousarray(scales.T)}
    middles = floats(zeros, zero_kind)  # the values of code 0; minima are those of code -8
    is_symmetric = not middles.any()
    if not is_symmetric:
        with np.errstate(over="ignore"):
            parts["zeros"] = np.ascontiguousarray((middles - 8 * floats(scales, kind)).T)
        require_finite(parts["zeros"], f"{layer}{_ZERO}", where)
    spec = QuantSpec(4, group, kind, *(("none", None) if is_symmetric else ("minimum", "f32")))
    return StoredTensor(f"{layer}weight", _format(spec, True), (rows, cols), parts)


def _by_row(found: NDArray[Any], rows: int) -> NDArray[Any]:
    """Numbers [rows, groups], or one of all rows, for each row."""
    return np.ascontiguousarray(np.broadcast_to(found, (rows, found.shape[1])))


@cache
def _format(spec: QuantSpec, is_packed: bool) -> Format:
    """Codes lie with their signs as i1 [rows, cols], or packed by two."""
    parts = {"codes": TensorPart("i1")} | table_parts(spec)
    half, mask = np.uint8(1 << spec.bits - 1), np.uint8((1 << spec.bits) - 1)

    def rows_of(of: Parts, rows: Rows) -> TableRows:
        codes = of["codes"][rows].view(np.uint8)
        if is_packed:
            codes = np.stack([codes, codes >> 4], axis=2).reshape(len(codes), -1)
        return TableRows(
            codes + half & mask, of["scales"][rows], of["zeros"][rows] if spec.zero_type else None
        )

    return table_format(f"torchao {spec.name}", spec, parts, rows_of)
