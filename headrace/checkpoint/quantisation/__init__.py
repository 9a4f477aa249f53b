"""The quantisation methods of Hugging Face folders."""

from importlib import import_module
from typing import Any

from headrace.checkpoint.quantisation.method import Method, refusal

METHODS = {
    "awq": (".awq", "Awq"),
    "bitsandbytes": (".bitsandbytes", "BitsAndBytes"),
    "compressed-tensors": (".compressed_tensors", "CompressedTensors"),
    "fbgemm_fp8": (".fp8", "Fp8"),
    "fp8": (".fp8", "Fp8"),
    "gptq": (".gptq", "Gptq"),
    "hqq": (".hqq", "Hqq"),
    "mlx": (".mlx", "Mlx"),
    "modelopt": (".modelopt", "ModelOpt"),
    "mxfp4": (".mxfp4", "Mxfp4"),
    "torchao": (".torchao", "TorchAo"),
}


def method_of(config: Any) -> Method:
    """Find and check the method. Raises UnsupportedModelError."""
    name = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(name, str) or name not in METHODS:
        field, value = ("quant_method", name) if isinstance(config, dict) else ("all of it", config)
        raise refusal(field, value, ", ".join(METHODS))
    module, class_name = METHODS[name]
    method: Method = getattr(import_module(module, __name__), class_name)()
    method.check(config)
    return method
