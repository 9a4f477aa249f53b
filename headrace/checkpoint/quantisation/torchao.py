"""Integer checkpoints of torchao 0.18 in the safetensors format of transformers 5.

A layer X has `X._weight_qdata`, `X._weight_scale` and `X._weight_zero_point`. `Int8Tensor` and
`IntxUnpackedToInt8Tensor` have codes I8 [rows, cols], and scales and zero points [rows, groups]
or [1, 1]; a weight is scale * (code - zero point). `Int4Tensor` has codes [rows, cols / 2], low
bits first, and scales and zero points [groups, rows]; a weight is scale * code + zero point.
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
_ACTIVATION_PARTS = (
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
_VERSION = 2
_KERNEL_BITS = (2, 3, 4, 8)


class TorchAo:
    """Integers of 1 to 8 bits by group, row or tensor; kernels ignore how activations are
    quantised.
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
            for part in _ACTIVATION_PARTS:
                if f"{layer}{part}" in tensors:
                    raise UnsupportedModelError(
                        f"{where}: tensor {layer}{part} scales activations, which is not supported"
                    )
            if is_int4:
                return _nibbles(layer, tensors, where)
            return _bytes(layer, bits, tensors, where)

        return gathered(tensors, (_CODES, _SCALE, _ZERO, *_ACTIVATION_PARTS), matrix, where)


def _default(config: Config) -> Mapping[str, Any]:
    given = config.get("quant_type")
    default = given.get("default") if isinstance(given, dict) else None
    fits = (
        isinstance(default, dict)
        and isinstance(default.get("_type"), str)
        and isinstance(default.get("_data"), dict)
    )
    return default if fits and default else {}


def _named(given: Mapping[str, Any], field: str, default: str | None) -> Any:
    value = given["_data"].get(field)
    return default if value is None else value.get("_data") if isinstance(value, dict) else value


def _bits(config: Config) -> int | None:
    given = _default(config)
    if given["_type"] == _INT4:
        return 4
    dtype = _named(given, "weight_dtype", "int8")
    return next((bits for bits in range(1, 9) if dtype == f"int{bits}"), None)


def _group(cols: int, groups: int, name: str, where: str) -> int:
    if cols % groups:
        raise FormatError(
            f"{where}: tensor {name} has {groups:,} scales per row, which do not divide its "
            f"{cols:,} columns"
        )
    group = cols // groups
    if groups > 1 and group != 16 and group % 32:
        raise UnsupportedModelError(
            f"{where}: tensor {name} has groups of {group} columns; supported: 16, multiples of 32"
        )
    return group if groups > 1 else 0


def _bytes(layer: str, bits: int, tensors: Tensors, where: str) -> StoredTensor:
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
            f"{where}: tensor {layer}{_ZERO} has a zero point outside int{stored_bits}"
        )
    parts: dict[str, NDArray[Any]] = {"codes": codes, "scales": _by_row(scales, rows)}
    has_points = bool(points.any())
    if has_points:
        parts["zeros"] = _by_row((points.astype(np.int16) + half).astype(np.uint8), rows)
    spec = QuantSpec(
        bits=stored_bits,
        group=group,
        scale=kind,
        zero="point" if has_points else "none",
        zero_type="u8" if has_points else None,
    )
    return StoredTensor(
        name=f"{layer}weight",
        format=_format(spec, is_packed=False),
        shape=(rows, cols),
        parts=parts,
    )


def _nibbles(layer: str, tensors: Tensors, where: str) -> StoredTensor:
    codes = numbers(tensors, f"{layer}{_CODES}", "I8", 2, where)
    kind, scales = finite_floats(tensors, f"{layer}{_SCALE}", where)
    zero_kind, zeros = finite_floats(tensors, f"{layer}{_ZERO}", where)
    rows, cols = len(codes), 2 * codes.shape[1]
    shape = len(scales), rows
    check_shapes({_SCALE: scales, _ZERO: zeros}, {_SCALE: shape, _ZERO: shape}, layer, where)
    group = _group(cols, len(scales), f"{layer}{_SCALE}", where)
    parts: dict[str, NDArray[Any]] = {"codes": codes, "scales": np.ascontiguousarray(scales.T)}
    middles = floats(zeros, zero_kind)
    is_symmetric = not middles.any()
    if not is_symmetric:
        # The file has the value of code 0; the minimum is the value of code -8.
        with np.errstate(over="ignore"):
            parts["zeros"] = np.ascontiguousarray((middles - 8 * floats(scales, kind)).T)
        require_finite(parts["zeros"], f"{layer}{_ZERO}", where)
    spec = QuantSpec(
        bits=4,
        group=group,
        scale=kind,
        zero="none" if is_symmetric else "minimum",
        zero_type=None if is_symmetric else "f32",
    )
    return StoredTensor(
        name=f"{layer}weight",
        format=_format(spec, is_packed=True),
        shape=(rows, cols),
        parts=parts,
    )


def _by_row(values: NDArray[Any], rows: int) -> NDArray[Any]:
    return np.ascontiguousarray(np.broadcast_to(values, (rows, values.shape[1])))


@cache
def _format(spec: QuantSpec, is_packed: bool) -> Format:
    parts = {"codes": TensorPart("i1")} | table_parts(spec)
    half, mask = np.uint8(1 << spec.bits - 1), np.uint8((1 << spec.bits) - 1)

    def table_rows(stored: Parts, rows: Rows) -> TableRows:
        codes = stored["codes"][rows].view(np.uint8)
        if is_packed:
            codes = np.stack([codes, codes >> 4], axis=2).reshape(len(codes), -1)
        zeros = stored["zeros"][rows] if spec.zero_type else None
        return TableRows(codes + half & mask, stored["scales"][rows], zeros)

    return table_format(f"torchao {spec.name}", spec, parts, table_rows)
