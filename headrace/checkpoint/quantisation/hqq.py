"""HQQ checkpoints (Badri and Shaji 2023) as `HQQLinear.state_dict` of hqq 0.2 encodes layers for
safetensors, also in transformers.

A layer X has `X.W_q`, `X.scale`, `X.zero` and its settings as tensors: `X.shape` I64 [2],
`X.group_size`, `X.axis`, `X.packing` and other strings as U8. With axis 1 the matrix [rows, cols]
is [groups, group_size] in its own order, `X.scale` and `X.zero` are floats [groups, 1], and a
weight is (code - zero) * scale. Packed, the groups are cut into 2, 4 or 8 (10 of 3 bits, the last
filled up) runs of one length, which share the bytes (words) of `X.W_q`, the first run in the
highest bits.
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

_METHOD = "hqq"
_PACKINGS = {
    "8bit_u8": (8, 1),
    "4bit_u8": (4, 2),
    "3bit_32": (3, 10),
    "2bit_u8": (2, 4),
    "1bit_u8": (1, 8),
}
"""Bits of a code, and how many codes share a number."""
_OFF = ("view_as_float", "quant_scale", "quant_zero")
_SETTINGS = (
    "nbits",
    "group_size",
    "shape",
    "axis",
    "packing",
    "unpack_view_dtype",
    "compute_dtype",
    "offload_meta",
    "channel_wise",
)
_FLAGS = ("encoded_state_dict", "stores_quant_config", "optimize", "round_zero")


class Hqq:
    """Integers of 1 to 8 bits with zeros that are floats, by groups of columns."""

    supported = (
        f"{_METHOD} with axis 1, encoded for safetensors, scales and zeros that are not "
        "quantised themselves"
    )

    def check(self, config: Config) -> None:
        given = config.get("quant_config")
        if not isinstance(given, dict):
            raise refusal("quant_config", given, self.supported)
        for of_layers in [given] if "weight_quant_params" in given else given.values():
            _check_layers(of_layers, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        parts = ("W_q", "scale", "zero", *_SETTINGS, *_OFF, *_FLAGS)
        return gathered(tensors, parts, lambda layer: _matrix(layer, tensors, where), where)


def _check_layers(given: Any, supported: str) -> None:
    """Refuse what layers of a configuration cannot have; None leaves them plain."""
    if given is None:
        return
    params = given.get("weight_quant_params") if isinstance(given, Mapping) else None
    if not isinstance(params, Mapping):
        raise refusal("quant_config", given, supported)
    for field, known in (("axis", 1), ("view_as_float", False), ("channel_wise", True)):
        if (value := params.get(field, 0 if field == "axis" else known)) != known:
            raise refusal(f"weight_quant_params.{field}", value, supported)
    for field in ("scale_quant_params", "zero_quant_params"):
        if given.get(field) is not None:
            raise refusal(field, given[field], supported)


def _matrix(layer: str, tensors: Tensors, where: str) -> StoredTensor:
    """The matrix [rows, cols] of a layer; `layer` ends with a dot."""
    _check_settings(layer, tensors, where)
    packing = bytes(numbers(tensors, f"{layer}packing", "U8", 1, where)).decode(errors="replace")
    if packing not in _PACKINGS:
        raise UnsupportedModelError(
            f"{where}: tensor {layer}packing is {packing[:32]!r}; known: {', '.join(_PACKINGS)}"
        )
    bits, shared = _PACKINGS[packing]
    shape = numbers(tensors, f"{layer}shape", "I64", 1, where).tolist()
    group = int(numbers(tensors, f"{layer}group_size", "I32", 0, where))
    if len(shape) != 2 or min(*shape, group) < 1 or max(shape) >= 1 << 31 or shape[1] % group:
        raise FormatError(
            f"{where}: tensor {layer}shape is {shape}, which is no matrix of groups of {group}"
        )
    rows, cols = shape
    if group < cols and group != 16 and group % 32:
        raise UnsupportedModelError(
            f"{where}: tensor {layer}group_size is {group}, which is neither 16 nor a "
            "multiple of 32"
        )
    groups = rows * cols // group
    codes = numbers(tensors, f"{layer}W_q", "I32" if bits == 3 else "U8", 2, where)
    (kind, scales), (zero_kind, zeros) = (
        finite_floats(tensors, f"{layer}{name}", where) for name in ("scale", "zero")
    )
    found = {"W_q": codes, "scale": scales, "zero": zeros}
    check_shapes(
        found,
        {"W_q": (-(-groups // shared), group), "scale": (groups, 1), "zero": (groups, 1)},
        layer,
        where,
    )
    by_row = scales.reshape(rows, -1), floats(zeros, zero_kind).reshape(rows, -1)
    is_point = bool(
        (by_row[1] == np.rint(by_row[1])).all()
        and by_row[1].min() >= 0
        and by_row[1].max() < 1 << bits
    )
    with np.errstate(over="ignore"):
        points = by_row[1].astype(np.uint8) if is_point else -by_row[1] * floats(by_row[0], kind)
    require_finite(points.astype(np.float32), f"{layer}zero", where)
    spec = QuantSpec(
        max(bits, 2),
        group if group < cols else 0,
        kind,
        *(("point", "u8") if is_point else ("minimum", "f32")),
    )
    parts: dict[str, NDArray[Any]] = {
        "codes": codes,
        "scales": np.ascontiguousarray(by_row[0]),
        "zeros": points,
    }
    return StoredTensor(f"{layer}weight", _format(spec, bits, shared), (rows, cols), parts)


def _check_settings(layer: str, tensors: Tensors, where: str) -> None:
    """Refuse what the settings of a layer say otherwise than the configuration."""
    expected = {"axis": 1, "channel_wise": 1} | dict.fromkeys(_OFF, 0)
    for name, known in expected.items():
        if f"{layer}{name}" in tensors:
            value = int(
                numbers(tensors, f"{layer}{name}", "I32" if name == "axis" else "U8", 0, where)
            )
            if value != known:
                raise UnsupportedModelError(
                    f"{where}: tensor {layer}{name} is {value}, and only {known} is supported"
                )


@cache
def _format(spec: QuantSpec, bits: int, shared: int) -> Format:
    """Codes lie as numbers [runs, group], which no single row can be a view of."""
    parts = {"codes": TensorPart("<u4" if bits == 3 else "u1", by_row=False)} | table_parts(spec)

    def rows_of(of: Parts, rows: Rows) -> TableRows:
        codes, (count, of_row) = of["codes"], of["scales"].shape
        wanted = np.arange(count)[rows]
        run, place = np.divmod(wanted[:, None] * of_row + np.arange(of_row), len(codes))
        shifts = (bits * (shared - 1 - run)).astype(codes.dtype)
        found = codes[place] >> shifts[:, :, None] & codes.dtype.type((1 << bits) - 1)
        return TableRows(
            found.reshape(len(wanted), -1).astype(np.uint8), of["scales"][rows], of["zeros"][rows]
        )

    return table_format(
        f"HQQ {spec.name}, {bits} bits" if bits == 1 else f"HQQ {spec.name}", spec, parts, rows_of
    )
