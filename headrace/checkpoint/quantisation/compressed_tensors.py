"""Checkpoints of the compressed-tensors library (version 0.20), which llm-compressor
writes.

A layer X has `X.weight_scale`, by tensor [1], channel [rows, 1], group [rows, groups]
or block, and

* `int-quantized`: `X.weight` int8 [rows, cols], perhaps `X.weight_zero_point` int8;
* `pack-quantized`: `X.weight_packed` int32 [rows, cols * bits / 32], lowest bits first,
  with 2^(bits - 1) added to codes; `X.weight_shape` int64 [2]; zero points packed down
  the rows, int32 [rows * bits / 32, groups]. Codes cross the borders of words; the gaps
  of early versions are refused;
* `float-quantized`: `X.weight` e4m3 [rows, cols];
* `mxfp8-quantized`: `X.weight` e4m3, scales as powers of two [rows, cols / 32];
* `nvfp4-pack-quantized`: `X.weight_packed` uint8 [rows, cols / 2] of e2m1, low half
  first, scales e4m3 [rows, cols / 16] divided by `X.weight_global_scale`;
* `mxfp4-pack-quantized`: `X.weight_packed` of e2m1, scales as powers of two [rows, cols
  / 32].

`naive-quantized` is `int-quantized` or `float-quantized`. The tensors imply `targets`,
`ignore` and the choice among `config_groups`. Sparse layers are in `sparse.py` and `marlin_24.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.quantisation import marlin_24, sparse
from headrace.checkpoint.quantisation.method import KV_SCALES, Config, Tensors, refusal
from headrace.checkpoint.quantisation.tables import (
    Codes,
    Scales,
    codes_of,
    float8_matrix,
    group_of,
    packed_format,
    plain,
    scales_of,
    unpacked,
)
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.formats import FORMATS, RAW_FORMATS, StoredTensor

_METHOD = "compressed-tensors"
_PACKED = "_packed"
_FORMATS = (
    "int-quantized",
    "pack-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    marlin_24.FORMAT,
    "mixed-precision",
)
_TOP: dict[str, tuple[Any, ...]] = {
    "transform_config": (None, {}),
}
_BITS: dict[str, tuple[int, ...]] = {"int": tuple(range(1, 9)), "float": (4, 8)}
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "type": tuple(_BITS),
    "strategy": (None, "tensor", "channel", "group", "block", "tensor_group"),
    "dynamic": (False,),
}
_INT_ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": ("token",),
    "dynamic": (True,),
}
_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
_PARTS = ("scale", "zero_point", "shape", "g_idx", "global_scale")
_ACTIVATIONS = tuple(f"input_{part}" for part in ("scale", "zero_point", "global_scale"))


class CompressedTensors:
    """Integers of 1 to 8 bits, and floats of 8 and 4 bits.

    Activations are at least as fine as the file's: int8 by row, int8 by 32 columns, or float32.
    """

    supported = (
        f"{_METHOD} in the formats {', '.join(_FORMATS)}: integers and floats by tensor, "
        "channel, group or block, with dynamic "
        "symmetric int8 activations by token (W8A8), float ones, or none; 2:4 sparsity as "
        f"{', '.join(sparse.LAYOUTS)}"
    )

    def check(self, config: Config) -> None:
        for field, value in _unknown(config):
            raise refusal(field, value, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        kinds = {
            "I8": _int8,
            sparse.KEPT_INT8.name: _kept_int8,
            "F8_E4M3": _float8,
            "F8_E5M2": _float8,
        }
        layout = sparse.layout_of(config)
        tensors = sparse.without_bitmasks(layout, tensors, where)
        if marlin_24.FORMAT in _formats(config):
            tensors = marlin_24.decoded(tensors, _int_widths(config), where)
        result, block = dict(tensors), _block(config)
        for name in tensors:
            if name.endswith(KV_SCALES):
                del result[name]
        for name, tensor in tensors.items():
            weight = name.removesuffix(_PACKED)
            if name.endswith(".weight" + _PACKED):
                if tensor.format.name == "U8":
                    matrix = _packed_fours(weight, tensors, where)
                else:
                    matrix = _packed(weight, config, tensors, where)
            elif name.endswith(".weight") and tensor.format.name in kinds:
                matrix = kinds[tensor.format.name](name, tensors, block, where)
            else:
                continue
            layer = weight.removesuffix("weight")
            for part in (
                *(f"{weight}_{part}" for part in _PARTS),
                *(layer + part for part in _ACTIVATIONS),
                name,
            ):
                result.pop(part, None)
            result[weight] = replace(matrix, name=weight)
        for name, tensor in result.items():
            if tensor.format.name == "I8":
                raise UnsupportedModelError(
                    f"{where}: tensor {name} is int8 but not a weight; only weights can be int8"
                )
        return sparse.declared(layout, result)


def _int8(name: str, tensors: Tensors, block: tuple[int, int] | None, where: str) -> StoredTensor:
    tensor, scale = tensors[name], _int8_scale(name, tensors, where)
    scales, numbers = scales_of(scale, tensor.shape, where, block)
    zeros = _zero_points(tensors.get(f"{name}_zero_point"), numbers.shape, 8, where)
    if zeros is None and scales.group == 0:
        row_scales = np.broadcast_to(scale.dequantise().reshape(-1), tensor.rows)
        parts = {**tensor.parts, "row_scales": np.ascontiguousarray(row_scales)}
        return replace(tensor, format=FORMATS["I8_ROW"], parts=parts)
    return _integers(tensor, Codes(tensor.cols, is_signed=True), scales, numbers, zeros)


def _kept_int8(
    name: str, tensors: Tensors, block: tuple[int, int] | None, where: str
) -> StoredTensor:
    tensor, scale = tensors[name], _int8_scale(name, tensors, where)
    scales, numbers = scales_of(scale, tensor.shape, where, block)
    zeros = _zero_points(tensors.get(f"{name}_zero_point"), numbers.shape, 8, where)
    if zeros is not None:
        raise UnsupportedModelError(
            f"{where}: tensor {name} is 2:4 sparse and has zero points, which its zeros would need "
            "codes for; quantise the model symmetrically"
        )
    return sparse.integers(tensor, scales, numbers)


def _int8_scale(name: str, tensors: Tensors, where: str) -> StoredTensor:
    scale = tensors.get(f"{name}_scale")
    if scale is None or scale.format.name in RAW_FORMATS:
        raise FormatError(
            f"{where}: tensor {name} is int8, but {name}_scale is missing or not floats"
        )
    return scale


def _float8(name: str, tensors: Tensors, block: tuple[int, int] | None, where: str) -> StoredTensor:
    tensor, scale = tensors[name], _required(f"{name}_scale", tensors, where)
    if scale.format.name != "U8":
        scales, numbers = scales_of(scale, tensor.shape, where, block)
        return float8_matrix(tensor, scales, numbers)
    scales = Scales(group_of(scale, tensor.shape, where), "e8m0")
    return float8_matrix(tensor, scales, _powers(scale, where))


def _packed(name: str, config: Config, tensors: Tensors, where: str) -> StoredTensor:
    tensor = _required(name + _PACKED, tensors, where)
    shape = _required(f"{name}_shape", tensors, where)
    scale = _required(f"{name}_scale", tensors, where)
    if (
        tensor.format.name != "I32"
        or len(tensor.shape) != 2
        or shape.format.name not in ("I64", "I32")
        or shape.shape != (2,)
    ):
        raise FormatError(
            f"{where}: tensors {name}{_PACKED} and {name}_shape are not int32 [rows, "
            "words] and int64 [2]"
        )
    rows, cols = (int(size) for size in plain(shape))
    widths = _int_widths(config)
    fitting = [bits for bits in sorted(widths) if tensor.shape == (rows, -(-cols * bits // 32))]
    if cols < 1 or len(fitting) != 1:
        raise FormatError(
            f"{where}: tensor {name}{_PACKED} has shape {list(tensor.shape)}, which does not fit "
            f"a matrix [{rows}, {cols}] in codes of {' or '.join(map(str, sorted(widths)))} bits "
            "without gaps"
        )
    bits = fitting[0]
    scales, numbers = scales_of(scale, (rows, cols), where)
    _check_order(name, tensors, cols, scales.group or cols, where)
    zeros = _zero_points(tensors.get(f"{name}_zero_point"), numbers.shape, bits, where)
    return _integers(tensor, Codes(cols, bits), scales, numbers, zeros)


def _packed_fours(name: str, tensors: Tensors, where: str) -> StoredTensor:
    tensor = _required(name + _PACKED, tensors, where)
    scale = _required(f"{name}_scale", tensors, where)
    if len(tensor.shape) != 2 or scale.format.name not in ("U8", "F8_E4M3"):
        raise FormatError(
            f"{where}: tensor {name}{_PACKED} has shape {list(tensor.shape)} and scales of type "
            f"{scale.format.name}, expected a matrix and U8 (powers of two) or F8_E4M3"
        )
    rows, cols = shape = tensor.rows, 2 * tensor.cols
    group = group_of(scale, shape, where)
    if scale.format.name == "U8":
        if group != 32:
            raise UnsupportedModelError(
                f"{where}: tensor {name}_scale has scales of {group} columns each; supported: 32"
            )
        parts = {
            "codes": tensor.parts["codes"].reshape(rows, cols // 32, 16),
            "block_scales": _powers(scale, where),
        }
        return replace(tensor, shape=shape, format=FORMATS["MXFP4_PAIRS"], parts=parts)

    tensor_scale = _required(f"{name}_global_scale", tensors, where).dequantise().reshape(-1)
    is_usable = tensor_scale.size == 1
    if is_usable:
        with np.errstate(all="ignore"):
            is_usable = bool(np.isfinite(scale.dequantise() / tensor_scale).all())
    if not is_usable:
        raise FormatError(
            f"{where}: tensor {name}_scale divided by {name}_global_scale, which must be one "
            "number, is not finite"
        )
    parts = {"codes": codes_of(tensor), "scales": codes_of(scale), "tensor_scale": tensor_scale}
    format = packed_format("e2m1", Codes(cols, 4), Scales(group, "e4m3"))
    return replace(tensor, shape=shape, format=format, parts=parts)


def _zero_points(
    points: StoredTensor | None, shape: tuple[int, int], bits: int, where: str
) -> NDArray[np.uint8] | None:
    """Zero points as codes [rows, scales of a row]; None if all are in the middle."""
    if points is None:
        return None
    rows, per_row = shape
    zeros: NDArray[Any]
    if points.format.name == "I8" and math.prod(points.shape) in (1, rows * per_row):
        signed = plain(points).astype(np.int16)
        zeros = signed.reshape(-1, 1 if signed.size == 1 else per_row) + (1 << bits - 1)
    elif points.format.name == "I32" and points.shape == (-(-rows * bits // 32), per_row):
        words = points.parts["codes"].transpose(1, 0, 2).reshape(per_row, -1)
        zeros = unpacked(words, bits, rows).T
    else:
        raise FormatError(
            f"{where}: tensor {points.name} is {points.format.name} {list(points.shape)}, which "
            f"does not fit {per_row} scales for each of {rows} rows"
        )
    if (zeros < 0).any() or (zeros >= 1 << bits).any():
        raise FormatError(
            f"{where}: tensor {points.name} has a zero point that is not a code of {bits} bits"
        )
    if (zeros == 1 << bits - 1).all():
        return None
    return np.ascontiguousarray(np.broadcast_to(zeros, shape), np.uint8)


def _integers(
    tensor: StoredTensor,
    codes: Codes,
    scales: Scales,
    numbers: NDArray[np.generic],
    zeros: NDArray[np.uint8] | None,
) -> StoredTensor:
    parts = {"codes": codes_of(tensor), "scales": numbers}
    if zeros is not None:
        parts["zeros"] = np.repeat(zeros, scales.block_rows, axis=0)[: tensor.rows]
    return replace(
        tensor,
        shape=(tensor.rows, codes.cols),
        format=packed_format("integer", codes, scales, zeros is not None),
        parts=parts,
    )


def _required(name: str, tensors: Tensors, where: str) -> StoredTensor:
    if name not in tensors:
        raise FormatError(f"{where}: tensor {name} is missing")
    return tensors[name]


def _powers(scale: StoredTensor, where: str) -> NDArray[np.uint8]:  # [rows, groups]
    powers = codes_of(scale)
    if (powers == 255).any():
        raise FormatError(f"{where}: tensor {scale.name} has a power of two that is NaN")
    return powers


def _check_order(name: str, tensors: Tensors, cols: int, group: int, where: str) -> None:
    if (index := tensors.get(f"{name}_g_idx")) is None:
        return
    groups = plain(index)
    if not (np.array_equal(groups, np.arange(cols) // group) or (groups == -1).all()):
        raise UnsupportedModelError(
            f"{where}: tensor {index.name} orders columns by activation (actorder = group), "
            "which is not supported; quantise the model without it"
        )


def _formats(config: Config) -> set[str]:
    groups = config.get("config_groups") or {}
    return {config.get("format", ""), *(group.get("format", "") for group in groups.values())}


def _int_widths(config: Config) -> set[int]:
    return {weights["num_bits"] for weights in _weights(config) if weights["type"] == "int"}


def _weights(config: Config) -> list[dict[str, Any]]:
    groups = config.get("config_groups") or {}
    return [_DEFAULTS | group["weights"] for group in groups.values()]


def _block(config: Config) -> tuple[int, int] | None:
    for weights in _weights(config):
        if weights.get("strategy") == "block":
            rows, cols = weights["block_structure"]
            return rows, cols
    return None


def _unknown(config: Config) -> Iterator[tuple[str, Any]]:
    yield from (
        (key, config.get(key)) for key, known in _TOP.items() if config.get(key) not in known
    )
    groups, sparsity = config.get("config_groups"), list(sparse.unknown(config))
    yield from sparsity
    is_sparse = bool(config.get("sparsity_config")) and not sparsity
    layout = config.get("format")
    if layout not in _FORMATS and not (is_sparse and not groups and layout in (None, "dense")):
        yield "format", layout
    if is_sparse and not groups:
        return
    if (
        not isinstance(groups, dict)
        or not groups
        or not all(isinstance(group, dict) for group in groups.values())
    ):
        yield "config_groups", groups
        return
    blocks = []
    for name, group in groups.items():
        if group.get("output_activations") is not None:
            yield f"{name}.output_activations", group["output_activations"]
        if group.get("format") not in (None, *_FORMATS):
            yield f"{name}.format", group["format"]
        for part, unknown in (
            ("weights", _unknown_weights),
            ("input_activations", _unknown_activations),
        ):
            given = group.get(part)
            if isinstance(given, dict):
                for key, value in unknown(_DEFAULTS | given):
                    yield f"{name}.{part}.{key}", value
            elif given is not None or part == "weights":
                yield f"{name}.{part}", given
        if group["weights"].get("strategy") == "block":
            blocks.append(group["weights"]["block_structure"])
    if any(block != blocks[0] for block in blocks):
        yield "block_structure", blocks


def _unknown_weights(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from (
        (key, given.get(key)) for key, known in _WEIGHTS.items() if given.get(key) not in known
    )
    bits, structure = _BITS[given["type"]], given.get("block_structure")
    if type(given["num_bits"]) is not int or given["num_bits"] not in bits:
        yield "num_bits", given["num_bits"]
    if given["type"] == "float" and given["symmetric"] is not True:
        yield "symmetric", given["symmetric"]
    is_block = (
        isinstance(structure, list)
        and len(structure) == 2
        and all(type(size) is int and size > 0 for size in structure)
    )
    if given.get("strategy") == "block" and not is_block:
        yield "block_structure", structure


def _unknown_activations(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if given["type"] != "float":
        known = {"type": ("int",), **_INT_ACTIVATIONS}
        yield from (
            (key, given.get(key)) for key, values in known.items() if given.get(key) not in values
        )
