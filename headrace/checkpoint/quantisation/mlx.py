"""Folders of mlx-lm (version 0.28), whose `config.json` has `quantization`.

A layer X has `X.weight` U32 [rows, cols * bits / 32], lowest bits first and without gaps, and

* mode `affine`: `X.scales` and `X.biases` [rows, cols / group_size] in floats; a weight is
  scale * code + bias;
* mode `mxfp4`, `mxfp8`: `X.scales` uint8, powers of two per 32 columns;
* mode `nvfp4`: `X.scales` uint8, e4m3 per 16 columns.

`quantization` has the mode, bits and group size of all layers, and may have those of one layer
under its name. Experts are stacked as `switch_mlp`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.adapter_parts import plain_name
from headrace.checkpoint.quantisation.method import Config, Tensors
from headrace.checkpoint.quantisation.packed_codes import require_finite
from headrace.checkpoint.quantisation.tables import Codes, Scales, codes_of, packed_format, plain
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model.fields import shown
from headrace.quant.dequantise import Parts, Rows
from headrace.quant.formats import (
    FORMATS,
    Format,
    StoredTensor,
    TensorPart,
    table_format,
    table_parts,
)
from headrace.quant.spec import PLAIN, QuantSpec, TableRows, floats

METHOD, FIELD = "mlx", "quantization"
_WIDTHS = (2, 3, 4, 8)
_MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((2, 3, 4, 5, 6, 8), (16, 32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
"""Bits and group sizes by mode."""
_EXPERT_NAMES = {
    "mlp.switch_mlp.": {"gate_proj": "", "up_proj": "", "down_proj": ""},
    "block_sparse_moe.switch_mlp.": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
}
"""Names of stacked experts, and other names of their matrices."""


def mlx_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantisation of a folder of mlx-lm; None for other folders.

    mlx-lm repeats it as `quantization_config`, without a method.
    """
    given, repeated = config.get(FIELD), config.get("quantization_config")
    if not isinstance(given, dict) or (isinstance(repeated, dict) and "quant_method" in repeated):
        return None
    return {**given, "quant_method": METHOD}


class Mlx:
    supported = "; ".join(
        f"mode {mode} with {', '.join(map(str, bits))} bits in groups of "
        f"{', '.join(map(str, groups))}"
        for mode, (bits, groups) in _MODES.items()
    )

    def check(self, config: Config) -> None:
        _layer_form(config, "", self.supported)
        for name, value in config.items():
            if isinstance(value, dict):
                _layer_form({**config, **value}, name, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        by_layer = {
            plain_name(name): {**config, **value}
            for name, value in config.items()
            if isinstance(value, dict)
        }
        result = dict(tensors)
        for name, tensor in tensors.items():
            if not name.endswith(".weight") or tensor.format.name != "U32":
                continue
            layer = name.removesuffix("weight")
            form = by_layer.get(plain_name(layer.removesuffix(".")), config)
            matrix = _matrix(tensor, layer, form, tensors, where)
            for part in ("weight", "scales", "biases"):
                result.pop(layer + part, None)
            result |= _experts(matrix) or {name: matrix}
        return result


def _layer_form(config: Config, layer: str, supported: str) -> tuple[str, int, int]:
    """Mode, bits and group size. Raises UnsupportedModelError."""
    mode, bits, group = config.get("mode", "affine"), config.get("bits"), config.get("group_size")
    is_known = isinstance(mode, str) and mode in _MODES
    if not is_known or bits not in _MODES[mode][0] or group not in _MODES[mode][1]:
        field = f"{FIELD}: {layer[:200]}" if layer else FIELD
        raise UnsupportedModelError(
            f"config.json: {field} has mode {shown(mode)}, bits {shown(bits)} and group_size "
            f"{shown(group)}; supported: {supported}. Quantise the original model again with "
            "one of these, or convert it with headrace convert"
        )
    return mode, bits, group


def _matrix(
    tensor: StoredTensor, layer: str, config: Config, tensors: Tensors, where: str
) -> StoredTensor:
    mode, bits, group = _layer_form(config, layer, "")
    scales = _part(f"{layer}scales", tensors, where)
    cols, num_groups = tensor.cols * 32 // bits, scales.cols
    if (
        len(tensor.shape) not in (2, 3)
        or scales.shape[:-1] != tensor.shape[:-1]
        or tensor.cols * 32 % bits
        or num_groups * group != cols
    ):
        raise FormatError(
            f"{where}: tensors {tensor.name} and {scales.name} have shapes {list(tensor.shape)} "
            f"and {list(scales.shape)}, which {bits} bits in groups of {group} do not fill"
        )
    shape = (*tensor.shape[:-1], cols)
    if mode != "affine":
        if scales.format.name != "U8":
            raise FormatError(f"{where}: tensor {scales.name} is {scales.format.name}, expected U8")
        return replace(tensor, shape=shape, **_small_floats(mode, tensor, codes_of(scales), where))

    biases = _part(f"{layer}biases", tensors, where)
    number = PLAIN.get(scales.format.name)
    if number is None or biases.format.name != scales.format.name or biases.shape != scales.shape:
        raise FormatError(
            f"{where}: tensors {scales.name} and {biases.name} are {scales.format.name} "
            f"{list(scales.shape)} and {biases.format.name} {list(biases.shape)}, expected floats "
            "of one type and shape"
        )
    parts: dict[str, NDArray[Any]] = {"codes": codes_of(tensor)}
    for part, numbers in (("scales", scales), ("zeros", biases)):
        parts[part] = plain(numbers).reshape(tensor.rows, num_groups)
        require_finite(floats(parts[part], number), numbers.name, where)
    spec = QuantSpec(
        bits=next(width for width in _WIDTHS if width >= bits),
        group=group,
        scale=number,
        zero="minimum",
        zero_type=number,
    )
    return replace(tensor, shape=shape, format=_affine(Codes(cols, bits), spec), parts=parts)


def _small_floats(
    mode: str, tensor: StoredTensor, scales: NDArray[np.uint8], where: str
) -> dict[str, Any]:
    """The format and parts of floats of 4 or 8 bits."""
    codes, rows = codes_of(tensor), tensor.rows
    if mode == "nvfp4":
        format = packed_format("e2m1", Codes(codes.shape[1] * 2, 4), Scales(16, "e4m3"))
        one = np.ones(1, np.float32)
        return {"format": format, "parts": {"codes": codes, "scales": scales, "tensor_scale": one}}
    if (scales == 255).any():
        raise FormatError(f"{where}: the scales of {tensor.name} have a power of two that is NaN")
    if mode == "mxfp8":
        format = packed_format("e4m3", Codes(codes.shape[1]), Scales(32, "e8m0"))
        return {"format": format, "parts": {"codes": codes, "scales": scales}}
    parts = {"codes": codes.reshape(rows, -1, 16), "block_scales": scales}
    return {"format": FORMATS["MXFP4_PAIRS"], "parts": parts}


def _part(name: str, tensors: Tensors, where: str) -> StoredTensor:
    if name not in tensors:
        raise FormatError(f"{where}: tensor {name} is missing")
    return tensors[name]


def _experts(matrix: StoredTensor) -> dict[str, StoredTensor]:
    """The matrices of stacked experts, by usual names; empty for another matrix."""
    found = next((part for part in _EXPERT_NAMES if part in matrix.name), None)
    if found is None or len(matrix.shape) != 3:
        return {}
    before, _, after = matrix.name.partition(found)
    kind = after.removesuffix(".weight")
    kind = _EXPERT_NAMES[found].get(kind) or kind
    prefix = before + found.replace("switch_mlp", "experts")
    num_experts, rows, _ = matrix.shape
    names = [f"{prefix}{expert}.{kind}.weight" for expert in range(num_experts)]
    return {
        name: matrix.take(name, np.arange(rows) + expert * rows)
        for expert, name in enumerate(names)
    }


@cache
def _affine(codes: Codes, spec: QuantSpec) -> Format:
    def table_rows(stored: Parts, rows: Rows) -> TableRows:
        return TableRows(
            codes.read(stored["codes"][rows]), stored["scales"][rows], stored["zeros"][rows]
        )

    parts = {"codes": TensorPart("u1")} | table_parts(spec)
    return table_format(f"MLX {spec.name}", spec, parts, table_rows)
