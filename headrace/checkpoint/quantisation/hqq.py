"""HQQ checkpoints (Badri and Shaji 2023) of hqq 0.2 and transformers.

A layer X has `X.W_q`, `X.scale`, `X.zero`, and settings as tensors: `X.shape` I64 [2],
`X.group_size`, `X.axis`, `X.packing` as U8. With axis 1, `X.scale` and `X.zero` are [groups,
1], and a weight is (code - zero) * scale. Packing splits the groups into runs that share the
numbers of `X.W_q`, the first run in the highest bits.
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
    supported = (
        f"{_METHOD} with axis 1, encoded for safetensors, scales and zeros that are not "
        "quantised themselves"
    )

    def check(self, config: Config) -> None:
        given = config.get("quant_config")
        if not isinstance(given, dict):
            raise refusal("quant_config", given, self.supported)
        for layers in [given] if "weight_quant_params" in given else given.values():
            _check_layers(layers, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        parts = ("W_q", "scale", "zero", *_SETTINGS, *_OFF, *_FLAGS)
        return gathered(tensors, parts, lambda layer: _matrix(layer, tensors, where), where)


def _check_layers(given: Any, supported: str) -> None:
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
    _check_settings(layer, tensors, where)
    packing = bytes(numbers(tensors, f"{layer}packing", "U8", 1, where)).decode(errors="replace")
    if packing not in _PACKINGS:
        raise UnsupportedModelError(
            f"{where}: tensor {layer}packing is {packing[:32]!r}; supported: {', '.join(_PACKINGS)}"
        )
    bits, shared = _PACKINGS[packing]
    shape = numbers(tensors, f"{layer}shape", "I64", 1, where).tolist()
    group = int(numbers(tensors, f"{layer}group_size", "I32", 0, where))
    if len(shape) != 2 or min(*shape, group) < 1 or max(shape) >= 1 << 31 or shape[1] % group:
        raise FormatError(
            f"{where}: tensor {layer}shape is {shape}, not a matrix of groups of {group}"
        )
    rows, cols = shape
    if group < cols and group != 16 and group % 32:
        raise UnsupportedModelError(
            f"{where}: tensor {layer}group_size is {group}; supported: 16, multiples of 32"
        )
    groups = rows * cols // group
    codes = numbers(tensors, f"{layer}W_q", "I32" if bits == 3 else "U8", 2, where)
    scale_type, scales = finite_floats(tensors, f"{layer}scale", where)
    zero_type, zeros = finite_floats(tensors, f"{layer}zero", where)
    check_shapes(
        {"W_q": codes, "scale": scales, "zero": zeros},
        {"W_q": (-(-groups // shared), group), "scale": (groups, 1), "zero": (groups, 1)},
        layer,
        where,
    )

    # Zeros that are codes become zero points, other zeros become minima.
    row_scales = scales.reshape(rows, -1)
    row_zeros = floats(zeros, zero_type).reshape(rows, -1)
    is_point = bool(
        (row_zeros == np.rint(row_zeros)).all()
        and row_zeros.min() >= 0
        and row_zeros.max() < 1 << bits
    )
    stored_zeros: NDArray[Any]
    if is_point:
        stored_zeros = row_zeros.astype(np.uint8)
    else:
        with np.errstate(over="ignore"):
            stored_zeros = -row_zeros * floats(row_scales, scale_type)
    require_finite(stored_zeros.astype(np.float32), f"{layer}zero", where)

    spec = QuantSpec(
        bits=max(bits, 2),
        group=group if group < cols else 0,
        scale=scale_type,
        zero="point" if is_point else "minimum",
        zero_type="u8" if is_point else "f32",
    )
    parts: dict[str, NDArray[Any]] = {
        "codes": codes,
        "scales": np.ascontiguousarray(row_scales),
        "zeros": stored_zeros,
    }
    return StoredTensor(
        name=f"{layer}weight",
        format=_format(spec, bits, shared),
        shape=(rows, cols),
        parts=parts,
    )


def _check_settings(layer: str, tensors: Tensors, where: str) -> None:
    expected = {"axis": 1, "channel_wise": 1} | dict.fromkeys(_OFF, 0)
    for name, known in expected.items():
        if f"{layer}{name}" in tensors:
            dtype = "I32" if name == "axis" else "U8"
            value = int(numbers(tensors, f"{layer}{name}", dtype, 0, where))
            if value != known:
                raise UnsupportedModelError(
                    f"{where}: tensor {layer}{name} is {value}; supported: {known}"
                )


@cache
def _format(spec: QuantSpec, bits: int, shared: int) -> Format:
    """Codes are numbers [runs, group]."""
    parts = {"codes": TensorPart("<u4" if bits == 3 else "u1", by_row=False)} | table_parts(spec)

    def table_rows(stored: Parts, rows: Rows) -> TableRows:
        packed, (num_rows, row_groups) = stored["codes"], stored["scales"].shape
        indices = np.arange(num_rows)[rows]
        groups = indices[:, None] * row_groups + np.arange(row_groups)
        run, place = np.divmod(groups, len(packed))
        shifts = (bits * (shared - 1 - run)).astype(packed.dtype)
        codes = packed[place] >> shifts[:, :, None] & packed.dtype.type((1 << bits) - 1)
        return TableRows(
            codes.reshape(len(indices), -1).astype(np.uint8),
            stored["scales"][rows],
            stored["zeros"][rows],
        )

    name = f"HQQ {spec.name}, {bits} bits" if bits == 1 else f"HQQ {spec.name}"
    return table_format(name, spec, parts, table_rows)
