"""Folders of NVIDIA's Model Optimizer (version 0.35).

`config.json` has `quantization_config`, or the folder has `hf_quant_config.json`. A layer X has

* NVFP4: `X.weight` uint8 [rows, cols / 2] of e2m1, low half first, `X.weight_scale` e4m3
  [rows, cols / 16] and `X.weight_scale_2`, one number; a weight is the product of the three;
* FP8: `X.weight` e4m3 and `X.weight_scale` by tensor, row, block of 128 x 128, or as powers of
  two per 32 columns (uint8).

`X.input_scale`, and `k_scale` and `v_scale` of an 8-bit KV cache, are for activations and KV that
are coarser than ours; nothing reads them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.quantisation.method import KV_SCALES, Config, Tensors, refusal
from headrace.checkpoint.quantisation.tables import (
    Codes,
    Scales,
    codes_of,
    float8_matrix,
    group_of,
    packed_format,
    scales_of,
)
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.formats import StoredTensor

METHOD, FILE = "modelopt", "hf_quant_config.json"
_ALGORITHMS = (
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MXFP8",
    "MIXED_PRECISION",
)
_UNREAD = (".input_scale", *KV_SCALES)
_INPUT_FACTORS = ".pre_quant_scale"
_BLOCK = (128, 128)


def modelopt_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantisation of a `hf_quant_config.json`; None if it has none."""
    given = config.get("quantization")
    if not isinstance(given, dict) or given.get("quant_algo") is None:
        return None
    return {**given, "quant_method": METHOD}


class ModelOpt:
    supported = f"{METHOD} with {', '.join(_ALGORITHMS)}"

    def check(self, config: Config) -> None:
        algorithm = config.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm.upper() not in _ALGORITHMS:
            raise refusal("quant_algo", algorithm, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        result = {name: t for name, t in tensors.items() if not name.endswith(_UNREAD)}
        for name, tensor in tensors.items():
            if name.endswith(_INPUT_FACTORS):
                raise UnsupportedModelError(
                    f"{where}: tensor {name} scales the input of a layer (AWQ), which is not "
                    "supported; export the model with NVFP4 or FP8 without AWQ"
                )
            if not name.endswith(".weight") or tensor.format.name not in ("U8", "F8_E4M3"):
                continue
            scale = _part(f"{name}_scale", tensors, where)
            make = _fours if tensor.format.name == "U8" else _eights
            result[name] = make(tensor, scale, tensors, where)
            for part in ("_scale", "_scale_2"):
                result.pop(name + part, None)
        return result


def _fours(tensor: StoredTensor, scale: StoredTensor, tensors: Tensors, where: str) -> StoredTensor:
    second = _part(f"{tensor.name}_scale_2", tensors, where).dequantise().reshape(-1)
    shape = (tensor.rows, 2 * tensor.cols)
    group = group_of(scale, shape, where)
    if scale.format.name != "F8_E4M3" or second.size != 1 or group != 16:
        raise FormatError(
            f"{where}: tensor {scale.name} is {scale.format.name} with {group} columns for a "
            f"number, and {tensor.name}_scale_2 has {second.size} numbers; expected F8_E4M3 with "
            "16 columns, and one number"
        )
    with np.errstate(all="ignore"):
        if not np.isfinite(scale.dequantise() * second).all():
            raise FormatError(f"{where}: tensor {scale.name} has a number that is not finite")
    parts: dict[str, NDArray[Any]] = {
        "codes": codes_of(tensor),
        "scales": codes_of(scale),
        "tensor_scale": second,
    }
    scales = Scales(group, "e4m3", is_multiplied=True)
    format = packed_format("e2m1", Codes(shape[1], 4), scales)
    return replace(tensor, shape=shape, format=format, parts=parts)


def _eights(
    tensor: StoredTensor, scale: StoredTensor, tensors: Tensors, where: str
) -> StoredTensor:
    sizes = tuple(size for size in scale.shape if size > 1)
    if scale.format.name == "U8":
        powers = codes_of(scale)
        if (powers == 255).any():
            raise FormatError(f"{where}: tensor {scale.name} has a power of two that is NaN")
        return float8_matrix(tensor, Scales(group_of(scale, tensor.shape, where), "e8m0"), powers)
    blocks = tuple(-(-size // block) for size, block in zip(tensor.shape, _BLOCK, strict=False))
    if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1:
        scale = replace(scale, shape=(scale.shape[0], scale.shape[2]))
    is_by_block = scale.shape == blocks and sizes != tensor.shape[:1]
    scales, numbers = scales_of(scale, tensor.shape, where, _BLOCK if is_by_block else None)
    return float8_matrix(tensor, scales, numbers)


def _part(name: str, tensors: Tensors, where: str) -> StoredTensor:
    if name not in tensors:
        raise FormatError(f"{where}: tensor {name} is missing")
    return tensors[name]
