"""Scales next to the weights of a GGUF file, as NVFP4 has them.

A weight `X.weight` may have `X.scale`: one number, or one for each matrix of a stack of experts.
The product of a row with the weight is multiplied by it (llama.cpp, `build_lora_mm`). Some
converters call it `X.weight.scale`. `X.input_scale` is a scale for activations in NVFP4;
activations here are finer, so nothing reads it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.arrays import Floats
from headrace.quant.dequantise import Parts, Rows
from headrace.quant.formats import FORMATS, Format, StoredTensor, TensorPart, table_format
from headrace.quant.spec import PLAIN, TableRows

_WEIGHT = ".weight"
_SCALE, _INPUT_SCALE = ".scale", ".input_scale"


def with_scales(tensors: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors, each scaled weight with its scale.

    Raises FormatError for scales that do not fit their weight, UnsupportedModelError for a type
    whose blocks take no scale.
    """
    result = dict(tensors)
    for name in tensors:
        for suffix in (_SCALE, _INPUT_SCALE):
            layer = name.removesuffix(suffix).removesuffix(_WEIGHT)
            weight = layer + _WEIGHT
            if not name.endswith(suffix) or weight not in tensors:
                continue
            if suffix == _SCALE:
                if weight in result and result[weight] is not tensors[weight]:
                    raise FormatError(f"{where}: tensor {weight} has two scales")
                result[weight] = _scaled(tensors[weight], tensors[name], where)
            del result[name]
    return result


def _scaled(tensor: StoredTensor, scale: StoredTensor, where: str) -> StoredTensor:
    if scale.format.name not in PLAIN:
        raise FormatError(f"{where}: tensor {scale.name} is {scale.format.name}, expected floats")
    numbers = scale.dequantise().reshape(-1)
    stacked = tensor.shape[0] if len(tensor.shape) > 2 else 1
    if numbers.size not in (1, stacked) or not np.isfinite(numbers).all():
        raise FormatError(
            f"{where}: tensor {scale.name} has shape {list(scale.shape)}; expected {stacked} "
            f"finite number{'s' * (stacked > 1)} for the weight {list(tensor.shape)}"
        )
    if (numbers == 1).all():
        return tensor
    rows = np.repeat(numbers, tensor.rows // numbers.size).astype(np.float32)
    if tensor.format.name in PLAIN:
        values = tensor.dequantise().reshape(tensor.rows, -1) * rows[:, None]
        return StoredTensor.from_floats(tensor.name, values.reshape(tensor.shape))
    if tensor.format.table_rows is None:
        raise UnsupportedModelError(
            f"{where}: tensor {tensor.name} is {tensor.format.name} with a scale, {scale.name}; "
            "scales are supported for NVFP4, IQ4_NL, ternary and float weights; convert the "
            "original model to another type"
        )
    parts = {**tensor.parts, "weight_scales": rows}
    return replace(tensor, format=_scaled_format(tensor.format.name), parts=parts)


@cache
def _scaled_format(name: str) -> Format:
    stored = FORMATS[name]
    read, spec = stored.table_rows, stored.spec
    assert read and spec

    def table_rows(parts: Parts, rows: Rows) -> TableRows:
        table = read(parts, rows)
        scales: Floats = table.scales.astype(np.float32) * parts["weight_scales"][rows][:, None]
        return table._replace(scales=scales)

    parts = {**stored.parts, "weight_scales": TensorPart("f4")}
    return table_format(f"{name}, scaled", replace(spec, scale="f32"), parts, table_rows)
