"""int8 checkpoints of the compressed-tensors library (vllm-project/compressed-tensors, format `int-quantized`), W8A8 above all.

A quantised linear layer has `X.weight` int8 [rows, cols] and `X.weight_scale` [rows, 1]; a weight is code times scale. Which
layers are quantised is plain from the tensors, so `targets` and `ignore` of the configuration are not needed.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.checkpoint.quantisation.method import Config, Tensors, refusal
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.formats import FORMATS, RAW_FORMATS, StoredTensor

_METHOD = "compressed-tensors"
_SCALE = "_scale"
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_TOP: dict[str, tuple[Any, ...]] = {
    "format": ("int-quantized",),
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
}
_GROUP: dict[str, dict[str, Any]] = {
    "weights": _INT8 | {"strategy": "channel", "dynamic": False},
    "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
}
_DEFAULTS = {"type": "int", "symmetric": True, "dynamic": False}
"""Of the library, for fields that a file leaves out."""


class CompressedTensors:
    """int8 by channel, with activations by token or left alone.

    Activations are int8 by token in either case: no kernel multiplies int8 weights with anything else.
    """

    supported = (
        f"{_METHOD} in the format int-quantized, symmetric int8 weights by channel, dynamic symmetric int8 activations by token (W8A8)"
    )

    def claims(self, config: Config) -> bool:
        return config.get("quant_method") == _METHOD

    def check(self, config: Config) -> None:
        for field, value in _unknown(config):
            raise refusal(field, value, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        quantised = {name for name, tensor in tensors.items() if tensor.format.name == "I8"}
        result = {name: tensor for name, tensor in tensors.items() if name.removesuffix(_SCALE) not in quantised}
        return result | {name: _with_scales(name, tensors, where) for name in sorted(quantised)}


def _with_scales(name: str, tensors: Tensors, where: str) -> StoredTensor:
    """An int8 tensor, with its scales as a part."""
    tensor, scale = tensors[name], tensors.get(name + _SCALE)
    if not name.endswith(".weight"):
        raise UnsupportedModelError(f"{where}: tensor {name} is int8 and no weight; zero points and the like are not supported")
    if scale is None or scale.format.name in RAW_FORMATS:
        raise FormatError(f"{where}: tensor {name} is int8, and {name}{_SCALE} is not there as numbers to scale it with")
    if len(tensor.shape) != 2 or scale.shape not in ((tensor.rows, 1), (tensor.rows,)):
        shapes = f"{list(tensor.shape)} and {list(scale.shape)}"
        raise FormatError(f"{where}: tensors {name} and {name}{_SCALE} have shapes {shapes}, expected [rows, columns] and [rows, 1]")
    row_scales = scale.dequantise().reshape(-1)
    if not np.isfinite(row_scales).all():
        raise FormatError(f"{where}: tensor {name}{_SCALE} has a number that is not finite")
    return replace(tensor, format=FORMATS["I8_ROW"], parts={**tensor.parts, "row_scales": row_scales})


def _unknown(config: Config) -> Iterator[tuple[str, Any]]:
    """The fields whose values we do not compute."""
    yield from ((key, config.get(key)) for key, known in _TOP.items() if config.get(key) not in known)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        yield "config_groups", groups
        return
    for name, group in groups.items():
        if group.get("output_activations") is not None:
            yield f"{name}.output_activations", group["output_activations"]
        for part, fields in _GROUP.items():
            given = group.get(part)
            if given is None and part == "input_activations":
                continue
            if not isinstance(given, dict):
                yield f"{name}.{part}", given
                continue
            found = _DEFAULTS | given
            yield from ((f"{name}.{part}.{key}", found.get(key)) for key, value in fields.items() if found.get(key) != value)
