"""Floats of 8 bits: `fp8` (DeepSeek-V3, Qwen3, vLLM) and `fbgemm_fp8` (Llama 3.1 405B).

A layer X has `X.weight` e4m3 or e5m2 [rows, cols], and `X.weight_scale_inv` or
`X.weight_scale`: one number, [rows, 1], or by `weight_block_size`, rounded up. A weight is
float times scale.
"""

from typing import Any

from headrace.checkpoint.quantisation.method import KV_SCALES, Config, Tensors, refusal
from headrace.checkpoint.quantisation.tables import float8_matrix, scales_of
from headrace.errors import FormatError
from headrace.quant.formats import StoredTensor

_FLOATS = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
_ACTIVATIONS = ("input_scale", "input_scale_ub", "activation_scale")
_FIELDS: dict[str, tuple[Any, ...]] = {
    "activation_scheme": (None, "dynamic", "static"),
    "fmt": (None, "e4m3", "float8_e4m3fn", "e5m2"),
    "expert_dtype": (None, "fp8"),
}


class Fp8:
    """Floats of 8 bits, multiplied with float32 activations."""

    supported = "fp8 or fbgemm_fp8: e4m3 or e5m2 by tensor, row or block"

    def check(self, config: Config) -> None:
        for field, known in _FIELDS.items():
            if config.get(field) not in known:
                raise refusal(field, config[field], self.supported)
        block = config.get("weight_block_size")
        is_pair = (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and size > 0 for size in block)
        )
        if block is not None and not is_pair:
            raise refusal("weight_block_size", block, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        block = tuple(config["weight_block_size"]) if config.get("weight_block_size") else None
        result = {name: t for name, t in tensors.items() if not name.endswith(KV_SCALES)}
        for name, tensor in tensors.items():
            if tensor.format.name not in _FLOATS:
                continue
            scale = next(
                (tensors[name + suffix] for suffix in _SCALES if name + suffix in tensors), None
            )
            if scale is None:
                raise FormatError(
                    f"{where}: tensor {name} is {tensor.format.name}, but "
                    f"{name}_scale_inv and {name}_scale are missing; "
                    "one of them is needed"
                )
            scales, numbers = scales_of(scale, tensor.shape, where, block)
            result[name] = float8_matrix(tensor, scales, numbers)
            result.pop(scale.name, None)
            for activation in _ACTIVATIONS:
                result.pop(name.removesuffix("weight") + activation, None)
        return result
