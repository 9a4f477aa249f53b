"""Quantisation methods of Hugging Face folders: which there are, and whose a checkpoint is."""

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
    "mxfp4": (".mxfp4", "Mxfp4"),
    "torchao": (".torchao", "TorchAo"),
}
"""The module and the class of each `quant_method`: imported when a checkpoint has it, since most
have none.
"""


def method_of(config: Any) -> Method:
    """The method whose `quantization_config` this is, checked. Raises UnsupportedModelError, which
    names the field.
    """
    name = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(name, str) or name not in METHODS:
        field, value = ("quant_method", name) if isinstance(config, dict) else ("all of it", config)
        raise refusal(field, value, ", ".join(METHODS))
    module, kind = METHODS[name]
    method: Method = getattr(import_module(module, __name__), kind)()
    method.check(config)
    return method
